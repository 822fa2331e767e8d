"""Where prepared models and data are kept between runs, and how many processes share the making of one.

The folder is $SLIPWAY_CACHE, else $XDG_CACHE_HOME/slipway, else ~/.cache/slipway, else (none of them writable) a
folder of the user's own below the system's temporary one, which is said in one line.
"""

import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from slipway.errors import InputError


@functools.cache
def root() -> Path:
    """The cache folder, made if need be. Raises InputError if $SLIPWAY_CACHE is set and cannot be written."""
    asked = os.environ.get("SLIPWAY_CACHE")
    if asked:
        if _writable(Path(asked)):
            return Path(asked).absolute()
        raise InputError(f"SLIPWAY_CACHE={asked} is not a folder that this user can write", "set it to one that is")
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "slipway"
    if _writable(usual):
        return usual.absolute()
    other = Path(tempfile.gettempdir()) / f"slipway-cache-{os.getuid()}"
    if _writable(other) and other.stat().st_uid == os.getuid():
        print(f"cache: {usual} is not writable; using {other}", file=sys.stderr)
        return other
    raise InputError(f"neither {usual} nor {other} can be written", "set SLIPWAY_CACHE to a folder that can be")


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def build(name: str, make: Callable[[Path], None]) -> Path:
    """The cached folder `name`, made by `make(folder)` in the first process that asks; the others wait, however long.

    The folder appears by a rename after `make` returned, so a killed or failed `make` leaves nothing behind that
    looks finished, and the next caller makes it anew.
    """
    done = root() / name
    if done.is_dir():
        return done
    done.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{done}.lock")
    try:
        lock.acquire(timeout=2)
    except Timeout:
        print(f"waiting for another process to make {name}", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        if not done.is_dir():
            part = Path(f"{done}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            try:
                make(part)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
            part.rename(done)
    finally:
        lock.release()
    return done
