"""Run the blocks of docs/from-the-tutorials.md, each in processes of its own; started by test_tutorials.py.

The libraries take 10 s to import, so they are imported once, here, and every block gets forked copies of this process:
one, or two ranks that find each other as torchrun's do.

python tests/tutorial_runner.py FOLDER          # writes FOLDER/results.json: "title/kind" -> "" or what went wrong
python tests/tutorial_runner.py FOLDER ZeRO-3   # entries with that in their titles
"""

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

import datasets  # noqa: F401  what blocks import, and what that imports when it is first used
import deepspeed  # noqa: F401
import torch
import tutorial_cases
import tutorial_page
from torch import multiprocessing
from torch.distributed import TCPStore
from transformers import DataCollatorWithPadding, Trainer, get_linear_schedule_with_warmup  # noqa: F401

from slipway import ops

LIMIT_S = 60  # a block takes a second or two


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank; the store that ranks meet at is held by its agent, here by this script."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_SIZE": str(ranks),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def run_block(rank: int, entry: tutorial_page.Entry, kind: str, port: int) -> None:
    """In a forked process: the set-up, the block as it stands on the page, and what is claimed of it."""
    case = tutorial_cases.CASES[entry.title]
    torch.set_num_threads(1)
    if case.launched:
        os.environ.update(rank_environment(rank, case.ranks, port))
    names = tutorial_cases.set_up(case)
    block, check, expected = (entry.right, case.right, "")
    if kind == "wrong":
        block, check, expected = (entry.wrong, case.wrong, entry.error)
    error = outcome(block, names)
    if kind == "wrong" and case.fails_somewhere:
        names["_error"] = error
    else:
        assert (expected in error) if expected else not error, f"{error or 'no error'}, not {expected or 'none'}"
    if check:
        check(names)


def outcome(block: tutorial_page.Block, names: dict) -> str:
    """The block's error as `Type: words`, after its traceback; empty if it runs through."""
    try:
        exec(block.code(), names)
    except Exception as error:
        traceback.print_exc()
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def run(entry: tutorial_page.Entry, kind: str, folder: Path) -> str:
    """What went wrong with one block; empty if nothing did."""
    ranks = tutorial_cases.CASES[entry.title].ranks
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder.mkdir()
    with contextlib.chdir(folder):
        started = multiprocessing.start_processes(
            run_block, (entry, kind, store.port), ranks, join=False, start_method="fork"
        )
    deadline = time.monotonic() + LIMIT_S
    try:
        while not started.join(timeout=1):
            if time.monotonic() > deadline:
                return f"not done after {LIMIT_S} s"
    except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
        return str(error)
    finally:
        for process in started.processes:
            process.kill()
    return ""


def main(folder: Path, only: str = "") -> None:
    ops.prepare(offload=False)
    results = {}
    for number, entry in enumerate(tutorial_page.entries()):
        for kind in ("wrong", "right"):
            if only not in entry.title or (kind == "wrong" and tutorial_cases.CASES[entry.title].not_run):
                continue
            key = f"{entry.title}/{kind}"
            began = time.monotonic()
            results[key] = run(entry, kind, folder / f"{number}-{kind}")
            print(f"{time.monotonic() - began:5.1f} s  {key}  {results[key][-3000:]}", flush=True)
            (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
