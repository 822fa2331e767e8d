"""Makes .venv from docker/requirements.lock, once, and again when the lock changes.

    python3 scripts/make_venv.py

Needs Python 3.11 to 3.13 with its venv module and nothing else. Every make target calls it; with nothing to
do it costs a few hundredths of a second. $SLIPWAY_VENV names another folder than .venv. Where $SLIPWAY_PYTHON
names an interpreter that has everything (as in the image), nothing is made.

Any python3 from 3.6 on can start this: it finds the one that is needed, or says what to install.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from venv_state import PROJECT, Stop, folder, say, to_do

PROBE = """
import sys
try:
    import ensurepip, venv
except ImportError:
    ensurepip = None
base = getattr(sys, "_base_executable", sys.executable)
print("%d.%d" % sys.version_info[:2], int(ensurepip is not None), base)
"""


def main() -> int:
    if os.environ.get("SLIPWAY_PYTHON"):
        return 0
    try:
        venv = folder()
        if to_do(venv)[0]:
            python = find_python(sys.executable, os.environ.get("PATH", ""))
            if Path(python).resolve() != Path(sys.executable).resolve():
                os.execv(python, [python, str(Path(__file__).resolve())])
            from fill_venv import fill  # here, for it is written for the Python that was found

            fill(venv, python)
        return 0
    except Stop as stop:
        say(str(stop))
        return 1
    except OSError as error:
        say(f"error: {error}\n  fix: make room or give rights there, or name another with SLIPWAY_VENV")
        return 1
    except KeyboardInterrupt:
        say("\nvenv: interrupted; the next make starts it anew")
        return 130


def find_python(first: str, path: str) -> str:
    """The interpreter to use: `first` if it serves, else one from `path`. Raises Stop if none does."""
    low, high = map(int, re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', PROJECT.read_text()).groups())
    wanted = [f"3.{minor}" for minor in range(high - 1, low - 1, -1)]
    names = [f"python{version}" for version in wanted] + ["python3", "python"]
    rest = [Path(where) / name for name in names for where in path.split(os.pathsep) if where]
    incomplete, others = "", []
    for candidate in [first] + [str(file) for file in rest if file.exists()]:
        version, complete, base = probe(candidate)
        if version in wanted and complete:
            return base
        if version in wanted:
            incomplete = incomplete or version
        elif version and version not in others:
            others.append(version)
    if incomplete:
        raise Stop(
            f"Python {incomplete} is here, but without its venv and ensurepip modules",
            f"apt-get install python{incomplete}-venv (Debian, Ubuntu), then run make again",
        )
    raise Stop(
        f"no Python 3.{low} to 3.{high - 1} on PATH (found: {', '.join(others) or 'none that runs'})",
        f"install one (apt-get install python3.{low} python3.{low}-venv, dnf install python3.{low}, pyenv, "
        "conda), then run make again",
    )


def probe(candidate: str) -> "tuple[str, bool, str]":
    """(version such as "3.11", "" if it does not run; has venv and ensurepip; the real interpreter)."""
    # It must be run: pyenv's shims exist for versions that are not chosen too, and then only print an error.
    command = [candidate, "-I", "-c", PROBE]
    try:
        answer = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=20)
        version, complete, base = answer.decode().strip().split(" ", 2)
    except (OSError, ValueError, subprocess.SubprocessError):
        return "", False, ""
    return version, complete == "1", base


if __name__ == "__main__":
    sys.exit(main())
