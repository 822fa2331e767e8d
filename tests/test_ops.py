"""Ops are built before the ranks start, and a build that was broken off does not stop the next one."""

import sys
from pathlib import Path

from harness import run

from slipway import ops

BUILD = "from slipway import ops; ops.prepare(offload=False)"


def test_a_stale_lock_does_not_hang_the_build(tmp_path):
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    lock = tmp_path / ops.SHM / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    done = run(sys.executable, "-c", BUILD, timeout=180, **environ)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"removed {lock}" in done.stderr
    assert (tmp_path / ops.SHM / f"{ops.SHM}.so").exists()
    lock.touch()  # a rank that was killed while it loaded
    again = run(sys.executable, "-c", BUILD, timeout=60, **environ)
    assert (again.returncode, again.stderr) == (0, f"removed {lock}: its build was broken off\n")
    third = run(sys.executable, "-c", BUILD, timeout=60, **environ)
    assert (third.returncode, third.stderr) == (0, "")


def test_a_compiler_that_is_missing_is_named(tmp_path):
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu", "CXX": "no-such-compiler"}
    environ["PATH"] = str(Path(sys.executable).parent)
    code = f"from slipway import errors\nwith errors.stop_on_bad_input():\n    {BUILD}"
    done = run(sys.executable, "-c", code.replace("; ", "\n    "), timeout=180, **environ)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "C++ compiler" in done.stderr
