"""Rows without labels fill an epoch's last micro-batches, which accelerate would fill with the epoch's first rows.

So no row is trained on twice in an epoch, and its last step is the same on any number of ranks.
"""

from collections.abc import Iterator
from typing import Any

import datasets
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import RandomSampler, Sampler

from slipway.labels import IGNORE


class RowsThenBlanks(Sampler[int]):
    """The order of `rows`, of which each epoch has its own, and the blank rows behind it."""

    def __init__(self, rows: Sampler[int], blanks: range):
        self.rows, self.blanks = rows, blanks

    def __len__(self) -> int:
        return len(self.rows) + len(self.blanks)

    def __iter__(self) -> Iterator[int]:
        yield from self.rows
        yield from self.blanks

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)


def fill(trainer: Any) -> None:
    """Before trainer.train(): its train_dataset gets blank rows up to a multiple of micro-batch x ranks. A blank is one
    token (trainer.train_dataset's first) and counts as one."""
    args, rows = trainer.args, trainer.train_dataset
    missing = -len(rows) % (args.train_batch_size * args.world_size)
    if not missing or args.dataloader_drop_last:
        return
    blank = {"input_ids": rows[0]["input_ids"][:1], "labels": [IGNORE], "seq_lengths": [1]}
    columns = {name: [blank[name]] * missing for name in rows.column_names}
    blanks = datasets.Dataset.from_dict(columns, features=rows.features)
    trainer.train_dataset = datasets.concatenate_datasets([rows, blanks])
    if args.train_sampling_strategy == "batch_rebalance":  # it makes whole batches, of the blanks too, in its own order
        return
    order_of, loader_of = trainer._get_train_sampler, trainer.get_train_dataloader
    made: list[RowsThenBlanks] = []

    def sampler(_: Any = None) -> RowsThenBlanks:
        order = order_of(rows)
        if isinstance(order, RandomSampler):  # accelerate makes it this, but only where it is not within another
            order = SeedableRandomSampler(rows, data_seed=args.data_seed)
        made.append(RowsThenBlanks(order, range(len(rows), len(rows) + missing)))
        return made[-1]

    def loader() -> Any:
        found = loader_of()
        # As accelerate does for a sampler it knows: else a run resumed within an epoch has the first one's order.
        found.set_sampler(made[-1])
        return found

    trainer._get_train_sampler, trainer.get_train_dataloader = sampler, loader
