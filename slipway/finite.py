"""A loss or gradient that is no finite number ends the run at that step, before such weights are saved."""

import os
from typing import Any

import torch
from transformers import TrainerCallback

from slipway import record, topology
from slipway.errors import InputError

_SHOWN_TOKENS = 24  # of each row of the step


class Finite(TrainerCallback):
    """After each step, before it is saved: raises InputError on all ranks where one has a NaN or an infinity.

    Under fp16 an infinite gradient is normal: the step is skipped and the loss scale lowered; the loss alone counts.
    """

    def __init__(self, run: record.Record):
        self.run = run
        self.trainer: Any = None
        self._rows: list[Any] = []  # the micro-batches of the step that runs
        self._gradients_finite = True

    def watch(self, trainer: Any) -> None:
        """Set by the recipe: a Trainer needs its callbacks first. Sees what each step is made from."""
        self.trainer, get = trainer, trainer.get_batch_samples

        def get_and_keep(*args: Any, **kwargs: Any) -> Any:
            samples = get(*args, **kwargs)
            self._rows = samples[0]
            return samples

        trainer.get_batch_samples = get_and_keep

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.trainer.is_deepspeed_enabled and not args.fp16:
            gradients = [p.grad for p in self.trainer.model.parameters() if p.grad is not None]
            self._gradients_finite = bool(torch.stack([g.isfinite().all() for g in gradients]).all())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wrong = self._wrong(args)
        worst = torch.tensor([bool(wrong)], dtype=torch.int32)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX, group=topology.cpu_group())
        if worst.item():
            self._end(state.global_step, wrong)

    def _wrong(self, args: Any) -> str:
        if not self.trainer._tr_loss.isfinite().all():
            return f"the loss is {self.trainer._tr_loss.item()}"
        if self.trainer.is_deepspeed_enabled and not args.fp16:
            norm = self.trainer.model_wrapped.get_global_grad_norm()
            if norm is not None and not torch.as_tensor(norm).isfinite():
                return f"the norm of the gradients is {float(norm)}"
        return "" if self._gradients_finite else "a gradient is no finite number"

    def _end(self, step: int, wrong: str) -> None:
        starts = [row[:_SHOWN_TOKENS] for batch in self._rows for row in batch["input_ids"]]
        texts = self.trainer.processing_class.batch_decode(starts) if wrong else []
        lines = [f"rank {os.environ['RANK']}, {wrong}; a row of it starts: {' '.join(text.split())}" for text in texts]
        everyones: list[list[str]] = [lines]
        if torch.distributed.is_initialized():
            everyones = [[]] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everyones, lines, group=topology.cpu_group())
        found = [line for lines in everyones for line in lines]
        self.run.content["status"] = "stopped"
        self.run.event("stop", step, cause=found[0])
        raise InputError(
            f"step {step} gave no finite number, and was not saved:\n  " + "\n  ".join(found),
            "look at these rows; a lower --learning_rate, more --warmup_steps, a smaller --max_grad_norm, or bf16 for "
            "fp16, in another OUTPUT; the checkpoints before it are good",
        )
