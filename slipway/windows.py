"""How an epoch falls into micro-batches and optimizer steps, and which rows of a micro-batch count.

    window = Windows(rows=1000, batch=4, accumulation=4, ranks=2, rank=0)
    window.steps                      # optimizer steps an epoch: 32, the last one over 8 rows instead of 32
    window.share(losses, micro=124)   # this rank's part of the mean loss over the rows of that optimizer step

accelerate deals the batches of one common order to the ranks in turn, and fills the last round up with rows from the
start of the epoch, so that all ranks get as many; it divides by the accumulation steps that were asked, also where the
last window has fewer. Here the rows that fill up do not count, and the division is by the rows that do.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Windows:
    """`rows` of an epoch in micro-batches of `batch` on each of `ranks`, `accumulation` of them an optimizer step."""

    rows: int
    batch: int
    accumulation: int
    ranks: int
    rank: int

    @property
    def global_batch(self) -> int:
        """Rows of a full optimizer step."""
        return self.batch * self.accumulation * self.ranks

    @property
    def steps(self) -> int:
        """Optimizer steps an epoch."""
        return math.ceil(self.rows / self.global_batch)

    def rows_in(self, micro: int) -> int:
        """Rows of the optimizer step that this rank's micro-batch number `micro` (from 0) of the epoch belongs to."""
        before = micro // self.accumulation * self.global_batch
        return min(self.global_batch, self.rows - before)

    def real(self, micro: int) -> int:
        """How many rows of this rank's micro-batch are its own; those behind them only fill up."""
        first = (micro * self.ranks + self.rank) * self.batch
        return max(0, min(self.batch, self.rows - first))

    def share(self, losses: "torch.Tensor", micro: int) -> "torch.Tensor":
        """This rank's part of the mean over the optimizer step, of `losses` (rows,) of one micro-batch: the parts of
        all ranks and micro-batches of the step sum up to its mean loss."""
        return losses[: self.real(micro)].sum() / self.rows_in(micro)
