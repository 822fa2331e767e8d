"""Checkpoints of a plain Accelerate loop that a kill at any moment leaves either complete or recognizable.

Each is written to `checkpoint-N.part`, gets a list of its files with their sizes last, and is then renamed. What is
not complete is named and passed over; it is never deleted, and never written into.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.errors import InputError

LIST = "complete.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete one. run: what its run was asked that decides the weights (see `must_agree`)."""

    folder: Path
    step: int
    run: dict[str, Any]


def save(accelerator: Any, output: Path, step: int, run: dict[str, Any], keep: int) -> Path:
    """Saves all that the accelerator holds, as of after `step`; then deletes complete ones but the newest `keep`.

    Collective: every rank calls it after the same step.
    """
    from accelerate.utils import broadcast_object_list

    folder = output / broadcast_object_list([_free_name(output, step)])[0]
    part = folder.with_name(f"{folder.name}.part")
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        sizes = {file.name: file.stat().st_size for file in sorted(part.iterdir())}
        for name in sizes:
            _to_disk(part / name)
        (part / LIST).write_text(json.dumps({"step": step, "run": run, "files": sizes}, indent=1) + "\n")
        _to_disk(part / LIST)
        part.rename(folder)
        _to_disk(output)
        for old in find(output)[0][:-keep]:
            shutil.rmtree(old.folder)
    accelerator.wait_for_everyone()
    return folder


def find(output: Path) -> tuple[list[Checkpoint], list[str]]:
    """The complete checkpoints in a run's folder, oldest first, and a line about each of the others."""
    complete, others = [], []
    for folder in sorted(output.glob("checkpoint-*")):
        found = _read(folder)
        if isinstance(found, Checkpoint):
            complete.append(found)
        else:
            others.append(f"{folder} is passed over: {found}")
    return sorted(complete, key=lambda one: one.step), others


def choose(asked: str, output: Path) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that --resume means, and what is to be said about it.

    `auto` is the newest complete one in `output`, or None if there is none; else a checkpoint's or a run's folder.
    """
    if asked == "auto":
        complete, notes = find(output)
        return (
            (complete[-1], notes)
            if complete
            else (None, [*notes, f"no complete checkpoint in {output}: starting anew"])
        )
    folder = Path(asked).expanduser().absolute()
    if not folder.is_dir():
        raise InputError(f"--resume {asked}: no such folder", "give a checkpoint's or a run's folder, or auto")
    found = _read(folder)
    if isinstance(found, Checkpoint):
        return found, []
    complete, notes = find(folder)
    if not complete:
        why = found if folder.name.startswith("checkpoint-") else "it holds no complete checkpoint"
        raise InputError(f"--resume {asked}: {why}", "\n  ".join(["give a complete one", *notes]))
    return complete[-1], notes


def must_agree(found: Checkpoint, run: dict[str, Any]) -> None:
    """InputError, with each difference, unless the checkpoint is of a run that was asked the same."""
    different = [
        f"{key}: {found.run.get(key)} there, {run.get(key)} now"
        for key in sorted({*run, *found.run})
        if found.run.get(key) != run.get(key)
    ]
    if different:
        raise InputError(
            f"{found.folder} is of another run:\n  " + "\n  ".join(different),
            "ask for the same, or start anew in another OUTPUT",
        )


def _read(folder: Path) -> Checkpoint | str:
    """The checkpoint in a folder, or why it is none."""
    try:
        content = json.loads((folder / LIST).read_text(encoding="utf-8"))
        found = Checkpoint(folder, content["step"], content["run"])
        sizes = content["files"].items()
    except FileNotFoundError:
        return f"it was not written to its end (no {LIST})"
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"{LIST} cannot be read ({error})"
    wrong = [name for name, size in sizes if not (folder / name).is_file() or (folder / name).stat().st_size != size]
    return f"{', '.join(wrong)} is missing or cut short" if wrong else found


def _free_name(output: Path, step: int) -> str:
    """checkpoint-STEP, or with a number behind it where a killed run has left one of that name."""
    names = (f"checkpoint-{step}{f'-{n}' if n else ''}" for n in range(10_000))
    taken = {file.name.removesuffix(".part") for file in output.glob("checkpoint-*")}
    return next(name for name in names if name not in taken)


def _to_disk(path: Path) -> None:
    """Have what was written survive a loss of power too."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
