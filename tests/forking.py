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

import psutil

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

    def start(self, words: list[object], folder: Path, env: dict[str, str]) -> "Fork":
        """words: a script and its arguments. Its output goes to files in `folder`, out and err."""
        job = {"words": [str(word) for word in words], "out": f"{folder}/out", "err": f"{folder}/err", "env": env}
        for name in ("out", "err"):
            (folder / name).touch()
        with self.lock:
            self.server.stdin.write(json.dumps(job) + "\n")
            self.server.stdin.flush()
            return Fork(int(self.server.stdout.readline()), folder / "err.code")


fork_server = functools.cache(ForkServer)


def run_forked(*words: object, timeout: float = 280, **env: str) -> subprocess.CompletedProcess:
    """run() of a script and its arguments, as a fork."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code = fork_server().start([*words], folder, os.environ | env).wait(timeout)
        return subprocess.CompletedProcess(words, code, (folder / "out").read_text(), (folder / "err").read_text())


class Fork(psutil.Process):
    """A process of ForkServer's, with what Running needs of subprocess.Popen."""

    def __init__(self, pid: int, code: Path):
        super().__init__(pid)
        self.code = code

    def poll(self) -> int | None:
        return int(self.code.read_text()) if self.code.exists() else None

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 100)
        while self.poll() is None:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                raise AssertionError(f"not done after {timeout} s: {self.code.with_suffix('').read_text()}")
            time.sleep(0.05)
        return self.poll()
