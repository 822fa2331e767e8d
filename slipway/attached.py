"""A rank that an agent started: it ends when the agent does, gives signs of life, and lets the others speak first.

Imported before torch, so that it holds from the first second on; in a process that no agent started nothing is done.
"""

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

BEATS = "SLIPWAY_BEATS"  # the folder in which each rank touches a file named after it
BEAT_S = 1.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PATIENCE_S = 3.0  # with 1.0 a launcher that stood still as long, on a busy host, was once too late


def attach() -> None:
    """For the recipe's first lines, on each rank."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the steps begin, a signal ends the rank without a traceback
    sys.excepthook = _patient
    if folder := os.environ.get(BEATS):
        threading.Thread(target=_beat, args=(Path(folder) / os.environ["RANK"],), daemon=True).start()


def end_with_parent() -> None:
    """The kernel kills this process when its parent ends, however that ends: no rank is left holding a GPU."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def _beat(file: Path) -> None:
    while True:
        try:
            file.touch()
        except OSError:  # the launcher has ended and removed its folder; so will this process
            return
        time.sleep(BEAT_S)


def _patient(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """Print the traceback after some seconds: a rank that only lost its peer is ended by then."""
    time.sleep(_PATIENCE_S)
    traceback.print_exception(kind, error, where)
