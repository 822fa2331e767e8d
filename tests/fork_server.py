"""A python that has imported what the recipes need, and runs scripts as forks of itself: a start takes no 10 s.

Started by forking.ForkServer. A line of JSON is a job: {"words": [SCRIPT, ...], "env": {}, "out": FILE, "err": FILE}.
The answer is its process number; its exit code goes to a file, `err` with ".code" behind it. Only for scripts that
start no ranks: a launcher has several threads when it starts them, and a fork of those can stand still.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import sys
import threading
from pathlib import Path

from harness import FINETUNE, TRAIN


def script(words: list[str], env: dict[str, str]) -> None:
    """Ends this fork, a new session, as a python would end that runs the script."""
    os.setsid()
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
    script(job["words"], job["env"])


def main() -> None:
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
        for child, file in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                part = file.with_suffix(".part")
                part.write_text(str(os.waitstatus_to_exitcode(status)))
                part.rename(file)
                del running[child]


if __name__ == "__main__":
    main()
