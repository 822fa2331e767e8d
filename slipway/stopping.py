"""Signals on the ranks: all agree on the step, save it, and leave with a code that a scheduler can requeue on.

stop = stopping.Stop(saves=True, sigusr1=False)      # a Trainer's callback, after those that decide what is saved
trainer.train()
if stop.agreed: stopping.leave(...)
"""

import os
import signal
import sys
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

from slipway import record, topology
from slipway.errors import EXIT_GO_ON


class Stop(TrainerCallback):
    """A signal on any rank ends the training after the step that runs; all ranks then save that step.

    Before the first step and after the last it ends this rank at once: there is nothing more to save. A second one
    changes nothing here: it may be the same, come by another way. The launcher ends ranks that take too long.
    saves: whether this run saves at all.
    """

    def __init__(self, saves: bool, sigusr1: bool):
        self.saves = saves
        self.agreed: signal.Signals | None = None
        self._seen = 0
        self._in_steps = False
        for number in (signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if sigusr1 else [])):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._in_steps:
            os._exit(128 + number)
        self._seen = number

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._in_steps = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seen = torch.tensor([self._seen])
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(seen, torch.distributed.ReduceOp.MAX, group=topology.cpu_group())
        if not seen.item():
            return
        self.agreed = signal.Signals(int(seen.item()))
        control.should_training_stop = control.should_log = True
        control.should_save = self.saves

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._in_steps = self.agreed is not None  # once agreed, a further signal must not end one rank alone

    def leave_if_agreed(self, run: record.Record, step: int) -> None:
        """After the training: ends the rank if a stop was agreed on. No rank leaves before the record tells it.

        Collective.
        """
        if not self.agreed:
            return
        if os.environ["RANK"] == "0":
            run.content["status"] = "stopped"
            run.event("stop", step, cause=self.agreed.name)
        if torch.distributed.is_initialized():
            torch.distributed.barrier(group=topology.cpu_group())
        sys.stdout.flush()
        os._exit(EXIT_GO_ON if self.saves else 128 + self.agreed)  # what the interpreter still does can wait or hang
