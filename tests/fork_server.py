"""A python that has imported what the recipes need, and runs scripts as forks of itself: a start takes no 10 s.

Started by forking.ForkServer. A line of JSON is a job: {"words": [SCRIPT, ...], "env": {}, "out": FILE, "err": FILE}.
The answer is its process number; its exit code goes to a file, `err` with ".code" behind it.

The ranks of a launcher are forks too, and its children as any ranks. It has several threads when it starts them, and a
fork of those can stand still; so a twin is forked from it at its start, and the ranks from that one.
"""

import atexit
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from harness import FINETUNE, TRAIN
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from slipway import attached, watch

assert watch  # a launcher imports it
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class ForkedRank(subprocess.Popen):
    """As torch's agent starts a rank, but by the twin."""

    twin: socket.socket

    def __init__(self, words: list[str], env: dict[str, str]):
        self.env = env
        super().__init__(words)

    def _execute_child(self, words: list[str], *_: object) -> None:
        self.twin.sendall(json.dumps({"words": words[words.index("-u") + 1 :], "env": self.env}).encode() + b"\n")
        self.pid = int(self.twin.recv(20))
        self._child_created = True


def adopt() -> None:
    """From now on, who is below this process and loses its parent becomes its child."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def fork_twin() -> None:
    """In a launcher, before it has threads: its twin makes ranks, which lose their parent to become its children."""
    adopt()
    launcher = os.getpid()
    ForkedRank.twin, requests = socket.socketpair()
    SubprocessHandler._popen = lambda self, words, env: ForkedRank(words, env)
    if os.fork():
        requests.close()
        return
    attached.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the launcher's session; a rank has one of its own
    for line in requests.makefile():
        job = json.loads(line)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
        elif not os.fork():
            while os.getppid() != launcher:
                time.sleep(0.001)
            os.setsid()
            requests.sendall(str(os.getpid()).encode())
            sys.stdout.reconfigure(write_through=True)  # as `python -u` has it
            script(job["words"], job["env"])
        else:
            os._exit(0)


def script(words: list[str], env: dict[str, str]) -> None:
    """Ends this fork as a python would end that runs the script."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()  # else it would remove the temporary folders of the process that it is a fork of
    os.environ.clear()
    os.environ |= env
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
    code: object = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def start(job: dict) -> int:
    child = os.fork()
    if child:
        return child
    for number, name in enumerate([os.devnull, job["out"], job["err"]]):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    os.setsid()
    fork_twin()
    script(job["words"], job["env"])


def reap() -> tuple[int, int] | None:
    """A child that has ended and its status, if there is one."""
    try:
        child, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (child, status) if child else None


def main() -> None:
    adopt()  # what a killed launcher leaves, so that it is gone as soon as it has ended
    for recipe in (FINETUNE, TRAIN):
        runpy.run_path(str(recipe), run_name="imported")
    gc.freeze()  # else each fork's collection would copy all of what was imported
    running: dict[int, Path] = {}
    while True:
        if select.select([sys.stdin], [], [], 0.02)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            job = json.loads(line)
            child = start(job)
            running[child] = Path(job["err"] + ".code")
            print(child, flush=True)
        while ended := reap():
            child, status = ended
            if file := running.pop(child, None):
                part = file.with_suffix(".part")
                part.write_text(str(os.waitstatus_to_exitcode(status)))
                part.rename(file)


if __name__ == "__main__":
    main()
