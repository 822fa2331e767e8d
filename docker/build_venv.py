"""Makes the image's Python environment from docker/requirements.lock, with every hash checked.

    PYTHONPATH=scripts python3 docker/build_venv.py /opt/venv

The steps are those of `make venv` (scripts/fill_venv.py), without the project itself: it comes in last, so that a
change in a recipe does not touch this layer of 7 GB.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import dist_record
from fill_venv import Steps

HERE = Path(__file__).resolve().parent
# What nothing reads: libraries that a linker puts into programs that profile, and pandas' own tests; 0.12 GB.
UNUSED = {"triton": "triton/backends/nvidia/lib/cupti/*.a", "pandas": "pandas/tests/**/*"}


def main(venv: Path) -> None:
    venv.mkdir(parents=True)
    with Path(os.devnull).open() as nothing:  # no second process is at work here, so no lock is held
        steps = Steps(venv, nothing.fileno())
        steps.step("a bare environment", [sys.executable, "-I", "-m", "venv", str(venv)])
        steps.install_uv()
        steps.sync()
    (packages,) = venv.glob("lib/python3.*/site-packages")
    forget_excluded(packages)
    keep_one_bitsandbytes(packages, venv)
    for package, pattern in UNUSED.items():
        drop(packages, package, [file for file in packages.glob(pattern) if file.is_file()])
    prove(venv)


def forget_excluded(packages: Path) -> None:
    """Takes what docker/requirements.exclude leaves out from the needs of who asks for it, so that `pip check` is clean
    here and in every child image."""
    lines = (HERE / "requirements.exclude").read_text().splitlines()
    names = "|".join(re.escape(line) for line in lines if line and not line.startswith("#"))
    wanted = re.compile(rf"^Requires-Dist: (?:{names})(?![\w.-]).*\n", re.MULTILINE)
    for file in packages.glob("*.dist-info/METADATA"):
        text = file.read_text()
        if wanted.search(text):
            file.write_text(wanted.sub("", text))
            dist_record.update(file.with_name("RECORD"), [file])


def keep_one_bitsandbytes(packages: Path, venv: Path) -> None:
    """bitsandbytes brings a library for every CUDA, ROCm and XPU, 0.2 GB; it loads one or two."""
    code = "import torch; print(torch.version.cuda.replace('.', ''))"
    cuda = subprocess.check_output([venv / "bin/python", "-c", code], text=True).strip()
    kept = [packages / f"bitsandbytes/libbitsandbytes_{name}.so" for name in (f"cuda{cuda}", "cpu")]
    dropped = [file for file in packages.glob("bitsandbytes/libbitsandbytes_*.so") if file not in kept]
    drop(packages, "bitsandbytes", dropped)
    if not all(file.exists() for file in kept):
        raise SystemExit(f"bitsandbytes has no library for CUDA {cuda}")


def drop(packages: Path, package: str, files: list[Path]) -> None:
    """Removes files of a package, from its list of files too. Stops where there are none: the package has changed."""
    if not files:
        raise SystemExit(f"{package} no longer has the files that are left out of it")
    for file in files:
        file.unlink()
    (info,) = packages.glob(f"{package}-*.dist-info")
    dist_record.update(info / "RECORD", files)


def prove(venv: Path) -> None:
    """All packages agree with each other, and torch loads and is the build for CUDA."""
    subprocess.run([venv / "bin/uv", "pip", "check", "--python", venv / "bin/python"], check=True)
    code = "import torch; assert torch.version.cuda, torch.__version__; print('torch', torch.__version__)"
    subprocess.run([venv / "bin/python", "-c", code], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
