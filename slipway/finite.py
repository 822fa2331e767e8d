"""Numbers that go bad end the run at that step, before such weights are saved: a loss or gradient that is no finite
number, a loss that jumps, a loss scale that has fallen to its minimum."""

import math
import os
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from slipway import record, topology
from slipway.errors import InputError

_SHOWN_TOKENS = 24  # of each row of the step
# A jump is a loss that is this many times the median of the steps before it, and worse than guessing among all tokens:
# a hard row after easy ones is the first, a model that is only beginning to learn the second.
JUMP, RECENT, AT_LEAST = 10, 20, 5
_LR = "a lower --learning_rate, more --warmup_steps, a smaller --max_grad_norm"
_FIX = f"look at these rows; {_LR}, or bf16 for fp16, in another OUTPUT; the checkpoints before it are good"


class Finite(TrainerCallback):
    """After each step, before it is saved: raises InputError on all ranks where one has a NaN or an infinity, or where
    the mean of their losses jumps.

    Under fp16 an infinite gradient is normal: the step is skipped and the loss scale lowered; the loss alone counts,
    until the scale has nowhere to go.
    """

    def __init__(self, run: record.Record):
        self.run = run
        self.trainer: Any = None
        self._rows: list[Any] = []  # the micro-batches of the step that runs
        self._gradients_finite = True
        self._before = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)

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

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before = self.trainer._tr_loss.item()  # the Trainer sums the losses of the steps up until it logs them

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wrong, loss = self._wrong(args), self.trainer._tr_loss.item() - self._before
        told, ranks = torch.tensor([bool(wrong), loss], dtype=torch.float64), 1
        if torch.distributed.is_initialized():
            ranks = torch.distributed.get_world_size()
            torch.distributed.all_reduce(told, group=topology.cpu_group())
        if told[0]:
            self._end(state.global_step, "gave no finite number", wrong)
        loss = told[1].item() / ranks
        if why := jump(self._recent, loss, len(self.trainer.processing_class)):
            self._end(state.global_step, "made the loss jump", why)
        self._recent.append(loss)
        scale = lowest_scale(self.trainer) if args.fp16 else None
        if scale is not None:
            self._end(state.global_step, "left the loss scale at its minimum", f"fp16's loss scale fell to {scale:g}")

    def _wrong(self, args: Any) -> str:
        if not self.trainer._tr_loss.isfinite().all():
            return f"the loss is {self.trainer._tr_loss.item()}"
        if self.trainer.is_deepspeed_enabled and not args.fp16:
            norm = self.trainer.model_wrapped.get_global_grad_norm()
            if norm is not None and not torch.as_tensor(norm).isfinite():
                return f"the norm of the gradients is {float(norm)}"
        return "" if self._gradients_finite else "a gradient is no finite number"

    def _end(self, step: int, what: str, wrong: str) -> None:
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
        raise InputError(f"step {step} {what}, and was not saved:\n  " + "\n  ".join(found), _FIX)


def jump(recent: Sequence[float], loss: float, vocabulary: int) -> str:
    """How a step's loss, in nats per token, stands out from those before it; empty if it does not."""
    if len(recent) < AT_LEAST:
        return ""
    usual = statistics.median(recent)
    if loss <= max(JUMP * usual, math.log(vocabulary)):
        return ""
    return f"the loss is {loss:.4g}, after a median of {usual:.4g} of the {len(recent)} steps before it"


def lowest_scale(trainer: Any) -> float | None:
    """fp16's loss scale where it has fallen to its minimum: DeepSpeed ends without a word of help at the next overflow,
    and torch's GradScaler goes on to steps that change nothing. None where it has not, or where it is fixed."""
    if trainer.is_deepspeed_enabled:
        scaler = getattr(trainer.model_wrapped.optimizer, "loss_scaler", None)
        moves = getattr(scaler, "dynamic", False)
        return scaler.cur_scale if moves and scaler.cur_scale <= scaler.min_scale else None
    scaler = trainer.accelerator.scaler
    return scaler.get_scale() if scaler is not None and scaler.get_scale() <= 1 else None
