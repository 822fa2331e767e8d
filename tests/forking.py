"""Start scripts as forks of one python that has imported what they need, 10 s sooner than as a new python."""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SERVER = Path(__file__).with_name("fork_server.py")


class ForkServer:
    """That python (tests/fork_server.py)."""

    def __init__(self):
        # One thread and the CPU: what the server imports would settle that for all its forks.
        env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        words = [sys.executable, str(SERVER)]
        # It ends when its standard input does, which is when this process ends.
        self.server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.lock = threading.Lock()

    def start(self, job: dict[str, object]) -> int:
        """The number of the new process, which leads its group."""
        with self.lock:
            self.server.stdin.write(json.dumps(job, default=str) + "\n")
            self.server.stdin.flush()
            return int(self.server.stdout.readline())


fork_server = functools.cache(ForkServer)


def run_forked(*words: object, timeout: float = 280, **env: str) -> subprocess.CompletedProcess:
    """harness.run() of a script and its arguments, as a fork."""
    with tempfile.TemporaryDirectory() as name:
        out, err, code = (Path(name) / file for file in ("out", "err", "err.code"))
        words = [str(word) for word in words]
        pid = fork_server().start({"words": words, "out": out, "err": err, "env": os.environ | env})
        deadline = time.monotonic() + timeout
        while not code.exists():
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                raise AssertionError(f"not done after {timeout} s: {words}\n{err.read_text()[-3000:]}")
            time.sleep(0.05)
        return subprocess.CompletedProcess(words, int(code.read_text()), out.read_text(), err.read_text())
