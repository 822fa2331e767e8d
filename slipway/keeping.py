"""The Trainer's side of whole checkpoints: all ranks save, each reads its share back, rank 0 seals, old ones go.

Where the Trainer calls what (transformers 5.24, trainer.py, _save_checkpoint): it saves, removes old checkpoints, and
then calls on_save on all ranks. A manifest can come no earlier, so the Trainer is given no save_total_limit, and the
removal happens here, when the new one is known to be whole.
"""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from slipway import manifest, record, topology
from slipway.errors import InputError


class Keep(TrainerCallback):
    """Seals each checkpoint. facts: what its manifest tells besides run and files; limit: how many are kept.

    size: bytes that the first takes, by estimate. stop_on_full: end the run where that is not free.
    """

    def __init__(self, run: record.Record, facts: dict[str, Any], limit: int | None, size: int, stop_on_full: bool):
        self.run, self.facts, self.limit, self.size, self.stop_on_full = run, facts, limit, size, stop_on_full
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            self._make_way(args, state, control)

    on_epoch_end = on_step_end

    def _make_way(self, args: Any, state: Any, control: Any) -> None:
        # What the Trainer sums up for its log is not saved: logged first, a resumed run logs the same numbers.
        control.should_log = True
        self.began = time.perf_counter()
        output, step = Path(args.output_dir), state.global_step
        short = self._gather(
            manifest.make_room(output, self.size, self.limit, self.run.content["run_id"]) if self.rank == 0 else ""
        )[0]
        if short:
            self._go_without(step, short, control)
            return
        if self.rank == 0:
            manifest.set_aside(manifest.folder_of(output, step))
        self._gather(None)

    def _go_without(self, step: int, short: str, control: Any) -> None:
        control.should_save = False
        self.run.event("not saved", step, cause=short)
        if self.stop_on_full:
            self.run.content["status"] = "stopped"
            self.run.event("stop", step, cause="no room for a checkpoint")
            raise InputError(f"step {step} is not saved, {short}", "free some, then RESUME=auto")
        if self.rank == 0:
            print(f"step {step} is not saved, {short}; training goes on", file=sys.stderr)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        output = Path(args.output_dir)
        folder = manifest.folder_of(output, state.global_step)
        if self.rank == 0:
            shutil.copyfile(output / record.FILE, folder / record.FILE)
        self._gather(None)  # after this every rank's files are there, and nobody writes any more
        names = manifest.listing(folder)
        shares = self._gather(manifest.digest(folder, names[self.rank :: self.world], to_disk=True))
        if self.rank == 0:
            files = {name: file for share in shares for name, file in share.items()}
            facts = {"run_id": self.run.content["run_id"], **self.facts}
            manifest.seal(folder, facts, files)
            stall = time.perf_counter() - self.began  # of the training; what is removed now is not needed for it
            self.run.event("saved", state.global_step, seconds=round(stall, 3))
            manifest.rotate(output, self.limit, facts["run_id"])

    def _gather(self, mine: Any) -> list[Any]:
        """What each rank has, on all ranks; so also a barrier."""
        if self.world == 1:
            return [mine]
        all_of_it: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(all_of_it, mine, group=topology.cpu_group())
        return all_of_it
