"""One way to stop on bad input: a clear message, the fix below it, exit code 2, no traceback.

raise InputError("data.jsonl:7: no valid JSON (Expecting ',')", fix="mend line 7 or delete it")
"""

import contextlib
import difflib
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

EXIT_BAD_INPUT = 2
EXIT_CTRL_C = 130  # 128 + SIGINT, as shells count
LET_RANK_0_SPEAK_S = 10.0  # less where an agent ends this rank because rank 0 has ended
EXIT_GO_ON = 75  # EX_TEMPFAIL of sysexits.h: stopped with a checkpoint, to be started again with RESUME=auto


class InputError(Exception):
    """Something that the user can mend. `message` names the file, line or key and what was found; `fix` what to do.

    Raised alike on all ranks it is printed by rank 0 only. Set `this_rank_only` where the others cannot know.
    """

    def __init__(self, message: str, fix: str | None = None, this_rank_only: bool = False):
        super().__init__(message)
        self.message, self.fix, self.this_rank_only = message, fix, this_rank_only

    def __str__(self) -> str:
        return f"error: {self.message}" + (f"\n  fix: {self.fix}" if self.fix else "")


@contextlib.contextmanager
def stop_on_bad_input() -> Iterator[None]:
    """Around a script's main: an InputError ends the process with its message on stderr and exit code 2, Ctrl-C with
    130 and without a traceback."""
    try:
        yield
    except InputError as error:
        if error.this_rank_only or os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr, flush=True)
        elif "TORCHELASTIC_RUN_ID" in os.environ:  # its agent would end rank 0 before that has spoken
            time.sleep(LET_RANK_0_SPEAK_S)
        _leave(EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr, flush=True)
        _leave(EXIT_CTRL_C)


def _leave(code: int) -> NoReturn:
    """End the process; a rank at once. While its peers end too, threads of its process group are still running, and
    the interpreter's end would now and then abort on one: exit code -6 in the place of `code`."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


@contextlib.contextmanager
def refused_by_a_library() -> Iterator[None]:
    """Around what only builds from arguments: a library's ValueError about one that no check of ours knows becomes an
    InputError with the library's own words and the line that raised it."""
    try:
        yield
    except ValueError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise InputError(
            f"{' '.join(str(error).split())} ({Path(last.filename).name}:{last.lineno})",
            "change the argument that this is about; `--help` lists all",
        ) from error


def nearest(word: str, known: Iterable[str]) -> str:
    """`, did you mean "x"?` for the known word nearest to `word`; empty where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f', did you mean "{close[0]}"?' if close else ""
