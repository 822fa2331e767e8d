"""The folder of a run: which one, and that nothing in it is overwritten."""

import os
from pathlib import Path

from slipway import memory, record
from slipway.errors import InputError


def choose(asked: str | None, recipe: str) -> Path:
    """The folder that was asked for, else outputs/RECIPE, or where that holds a finished run outputs/RECIPE-2 and so
    on. A launcher tells its choice to its ranks, which would each choose for themselves."""
    first = output = Path(asked or Path("outputs") / recipe)
    number = 1
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    while not asked and alone and (record.read(output) or {}).get("status") == "finished":
        number += 1
        output = first.with_name(f"{recipe}-{number}")
    return output.expanduser().absolute()


def check(output: Path, goes_on: bool, ways: str) -> None:
    """InputError if the folder cannot be written, or holds something that would be overwritten.

    goes_on: an earlier run in it goes on, or is to be replaced. ways: what else than another folder can be done.
    """
    memory.check_writable(output)
    if os.environ.get("RANK", "0") != "0" or not output.is_dir() or not any(output.iterdir()):
        return
    earlier = record.read(output)
    if earlier is None:
        raise InputError(f"OUTPUT {output} is not empty and holds no run", "name another folder; nothing was changed")
    if not goes_on:
        status = "a finished" if earlier["status"] == "finished" else "an unfinished"
        raise InputError(f"OUTPUT {output} holds {status} run", f"another OUTPUT{ways}")
