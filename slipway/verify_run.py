"""Runs checks, each in a process with a time limit, and leaves none of their processes behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from slipway.verify import Check, Finding, Row, row

MARK = "SLIPWAY_VERIFY_RUN"  # in the environment of a check's processes, however they were started
TAIL = 30  # lines of a failed check's output that are kept
KILL_S = 5  # a process that outlives a SIGKILL by this long hangs in the kernel

HUNG = {
    "hung": "another run of `make verify ONLY={name}`: if it hangs again, the output in `make verify JSON=1` "
    "shows where; a GPU driver that hangs needs a reboot",
}
# What a process that was ended by a signal most often means.
DEATHS = {
    "SIGILL": "a compiled op was built for another CPU: delete torch_extensions in SLIPWAY_CACHE, then run again",
    "SIGBUS": "enlarge /dev/shm (docker run --shm-size=16g), or free the disk: a mapped file could not be extended",
    "SIGSEGV": "install the packages anew (`rm -rf .venv && make venv`, or pull the image again): a library is broken",
    "SIGKILL": "give the container more memory: the kernel ends processes by SIGKILL when it runs out",
    "SIGABRT": "read the last lines of the check's output in `make verify JSON=1`: a library gave up and said why",
}


def run_all(chosen: Iterable[Check], began: Callable[[Check], None] = lambda one: None) -> list[Row]:
    """The rows of the checks, in their order. Two or more run at a time; those that measure run alone, at the end."""
    chosen = list(chosen)

    def run(one: Check) -> Row:
        began(one)
        return run_one(one)

    together = [one for one in chosen if not one.alone]
    with ThreadPoolExecutor(max(2, min(4, os.cpu_count() or 2))) as pool:
        try:
            rows = dict(zip((one.name for one in together), pool.map(run, together), strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_processes(MARK, f"{os.getpid()}-")
            raise
    rows |= {one.name: run(one) for one in chosen if one.alone}
    return [rows[one.name] for one in chosen]


def run_one(one: Check) -> Row:
    """Run a check to its end or its limit; its processes have ended when this returns."""
    began, token = time.monotonic(), f"{os.getpid()}-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory(prefix="slipway-verify-") as folder:
        result, said = Path(folder, "finding.json"), Path(folder, "said")
        command = [sys.executable, "-P", "-m", "slipway.verify_child", one.name, str(result)]
        with said.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: token},
                start_new_session=True,  # a Ctrl-C at the terminal reaches this process, which ends the others
            )
        try:
            process.wait(one.limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            hung = process.poll() is None
            end_processes(MARK, token)
        seconds = time.monotonic() - began
        lines = said.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
        if result.exists():
            return row(one, Finding(**json.loads(result.read_text(encoding="utf-8"))), seconds, lines)
        return _without_finding(one, None if hung else process.wait(), seconds, lines)


def _without_finding(one: Check, code: int | None, seconds: float, lines: list[str]) -> Row:
    """The row of a check whose process was killed at its limit (`code` None), or died of `code`."""
    if code is None:
        fact, key, fixes = f"did not end within {one.limit_s} s and was killed", "hung", HUNG
    else:
        died = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        fact, key, fixes = f"its process was ended by {died}", died, DEATHS
    fix = fixes.get(key, one.fixes[""]).format(name=one.name)
    finding = f"any.{key}" if key in fixes else one.name
    return Row(
        one.name, one.sentence, "failed", fact, fix, finding, {"exit_code": code}, round(seconds, 2), one.limit_s, lines
    )


def end_processes(variable: str, value: str) -> None:
    """SIGKILL every process of ours whose environment has `variable` beginning with `value`.

    Found by environment and not by parent: a rank whose launcher died, or that has a session of its own, is found too,
    and a stopped one (SIGSTOP) dies all the same.
    """
    deadline = time.monotonic() + KILL_S
    while left := [one for one in psutil.process_iter() if _has(one, variable, value)]:
        for one in left:
            if one.is_running():
                one.kill()
        psutil.wait_procs(left, timeout=1)
        if time.monotonic() > deadline:
            return


def _has(process: psutil.Process, variable: str, value: str) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(variable, "").startswith(value)
    except (psutil.Error, OSError):
        return False  # ended meanwhile, or another user's
