"""Whether .venv is as the lock wants it. Read by any Python from 3.6 on, so newer annotations are quoted."""

import hashlib
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "docker" / "requirements.lock"
PROJECT = ROOT / "pyproject.toml"
STAMP = "slipway.stamp"  # written last: a .venv without one is half-made
MAKING = "slipway.lock"  # held while .venv is being made; its presence says that .venv is ours to make anew


class Stop(Exception):
    """Set-up cannot go on. The first argument says what was found, the second what to do."""

    def __str__(self) -> str:
        return f"error: {self.args[0]}\n  fix: {self.args[1]}"


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def folder() -> Path:
    """The environment to make: $SLIPWAY_VENV (from the project's root where it is relative), else .venv."""
    return ROOT / Path(os.environ.get("SLIPWAY_VENV") or ".venv").expanduser()


def inputs(venv: Path) -> "dict[str, str]":
    """What a finished .venv was made from and for; equal to its stamp while nothing is to be done."""
    return {
        "lock": hashlib.sha256(LOCK.read_bytes()).hexdigest(),
        "project": hashlib.sha256(PROJECT.read_bytes()).hexdigest(),
        "root": str(ROOT),
        "folder": str(venv.resolve()),
        # where the link leads: another Python behind the same name does not see the old one's packages
        "python": str((venv / "bin" / "python").resolve()),
    }


def to_do(venv: Path) -> "tuple[str, str]":
    """What is to be done to .venv and why; Stop if it is not ours.

    "make" it anew, "sync" it with the lock, "install" this project again, or "": it is as it should be.
    """
    if not venv.exists():
        return "make", "there is none yet"
    if not venv.is_dir() or (any(venv.iterdir()) and not (venv / MAKING).exists()):
        raise Stop(
            f"{venv} was not made by this project's Makefile, and what is in it may be yours",
            "move it away, or name another folder: SLIPWAY_VENV=.venv-slipway make ...",
        )
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        half = (venv / "pyvenv.cfg").exists()
        return "make", "it is half-made: an earlier set-up did not end" if half else "there is none yet"
    now = inputs(venv)
    changed = [key for key in now if stamp.get(key) != now[key]]
    if "python" in changed or not all((venv / "bin" / name).exists() for name in ("python", "uv")):
        return "make", "its Python or uv is gone or is another one"
    if "folder" in changed or "root" in changed:
        return "make", "it or the project was moved"
    if "lock" in changed:
        return "sync", f"{LOCK.relative_to(ROOT)} changed"
    return ("install", f"{PROJECT.name} changed") if changed else ("", "")


def write_stamp(venv: Path, made_from: "dict[str, str]") -> None:
    """Says that .venv is finished. `made_from`: inputs() at start, for the lock may since have changed."""
    part = venv / f"{STAMP}.part"
    part.write_text(json.dumps({**made_from, "python": inputs(venv)["python"]}, indent=1) + "\n")
    part.replace(venv / STAMP)
