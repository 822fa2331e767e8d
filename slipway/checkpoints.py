"""Checkpoints of a plain Accelerate loop: a kill at any moment leaves one either complete or known not to be.

Each is OUTPUT/checkpoint-STEP, which counts from the moment its manifest is there, the last file to be written
(slipway.manifest). What is not complete is named and passed over, and never written into; it goes when it is older than
all checkpoints that are kept.
"""

import sys
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from slipway import manifest
from slipway.errors import InputError
from slipway.manifest import Checkpoint


def save(accelerator: Any, output: Path, step: int, run: dict[str, Any], keep: int, size: int) -> None:
    """Saves all that the accelerator holds, as of after `step`; then deletes what is older than the newest `keep`.

    Where the disk has no room for it, the last checkpoint stays, and a line says so. run: what the run was asked that
    decides the weights (see `must_agree`). size: bytes that the first will take, at most. Collective: every rank calls
    it after the same step.
    """
    folder = manifest.folder_of(output, step)
    short = [manifest.make_room(output, size, keep) if accelerator.is_main_process else ""]
    broadcast_object_list(short)
    if short[0]:
        if accelerator.is_main_process:
            print(f"step {step} is not saved, {short[0]}; training goes on", file=sys.stderr)
        return
    if accelerator.is_main_process:
        manifest.set_aside(folder)  # what a killed run has left there
    accelerator.wait_for_everyone()
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        files = manifest.digest(folder, manifest.listing(folder), to_disk=True)
        manifest.seal(folder, {"run": run}, files)
        manifest.rotate(output, keep)
    accelerator.wait_for_everyone()


def choose(asked: str, output: Path) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that --resume means, and what is to be said about it.

    `auto` is the newest complete one in `output`, or None if there is none; else a checkpoint's or a run's folder.
    """
    if asked == "auto":
        found, notes = manifest.newest(output)
        return found, notes if found else [*notes, f"no complete checkpoint in {output}: starting anew"]
    folder = Path(asked).expanduser().absolute()
    if not folder.is_dir():
        raise InputError(f"--resume {asked}: no such folder", "give a checkpoint's or a run's folder, or auto")
    if not folder.name.startswith("checkpoint-"):
        found, notes = manifest.newest(folder)
        if not found:
            raise InputError(
                "\n  ".join([f"--resume {asked}: it holds no complete checkpoint", *notes]),
                "give a run's folder that does",
            )
        return found, notes
    try:
        return manifest.read(folder), []
    except manifest.Damaged as why:
        raise InputError(
            f"--resume {asked} is no complete checkpoint: {why}", "give the run's folder, or auto"
        ) from why


def must_agree(found: Checkpoint, run: dict[str, Any]) -> None:
    """InputError, with each difference, unless the checkpoint is of a run that was asked the same."""
    there = found.facts.get("run", {})
    different = [
        f"{key}: {there.get(key)} there, {run.get(key)} now"
        for key in sorted({*run, *there})
        if there.get(key) != run.get(key)
    ]
    if different:
        raise InputError(
            f"{found.path} is of another run:\n  " + "\n  ".join(different),
            "ask for the same, or start anew in another OUTPUT",
        )
