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


class Forked:
    """What is used of a subprocess.Popen, of such a fork; its output goes to files in `folder`."""

    def __init__(self, words: list[str], folder: Path, env: dict[str, str]):
        self.words, self.out, self.err = words, folder / "out", folder / "err"
        self._code = folder / "err.code"
        self.out.touch()
        self.err.touch()
        self.pid = fork_server().start({"words": words, "out": self.out, "err": self.err, "env": os.environ | env})

    def poll(self) -> int | None:
        return int(self._code.read_text()) if self._code.exists() else None

    def wait(self, timeout: float = 280) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.words, timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(*words: object, timeout: float = 280, **env: str) -> subprocess.CompletedProcess:
    """harness.run() of a script and its arguments, as a fork."""
    with tempfile.TemporaryDirectory() as name:
        process = Forked([str(word) for word in words], Path(name), env)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"not done after {timeout} s: {words}\n{process.err.read_text()[-3000:]}") from None
        return subprocess.CompletedProcess(words, code, process.out.read_text(), process.err.read_text())
