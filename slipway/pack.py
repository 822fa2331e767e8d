"""Tokens on disk: written as they come, then packed and stored as `datasets`, which are mapped from disk."""

import contextlib
import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.labels import IGNORE, Sequence

if TYPE_CHECKING:  # all of these take seconds to import, and the launcher imports this module
    import datasets
    import numpy as np


class Encoded:
    """Sequences in the Arrow file `path`, with some numbers of each: 25 bytes a sequence stay in memory.

    keys: 64 bits of its row; own_keys: 64 bits of its tokens; starts: 1 where a row starts, 0 for later
    pieces of a text; lengths and trained: its tokens and those trained on.
    """

    def __init__(self, path: Path):
        self.path = path
        self.keys, self.own_keys, self.starts = array("Q"), array("Q"), array("B")
        self.lengths, self.trained = array("I"), array("I")

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, one: Sequence) -> None:
        """Takes the numbers of one sequence."""
        self.keys.append(one.key)
        own = hashlib.blake2b(array("i", one.input_ids).tobytes(), digest_size=8)
        self.own_keys.append(int.from_bytes(own.digest(), "big"))
        self.starts.append(one.piece == 0)
        self.lengths.append(len(one.input_ids))
        self.trained.append(sum(label != IGNORE for label in one.labels))

    def count_rows(self, places: Iterable[int]) -> int:
        """How many rows the sequences at `places` come from."""
        return sum(self.starts[place] for place in places)

    def make_pieces_rows(self) -> None:
        """From now on each piece of a text counts as a row of its own."""
        self.keys, self.starts = self.own_keys, array("B", [1]) * len(self)

    def write(self, batches: Iterator[list[Sequence]]) -> None:
        """Writes all batches and closes the file."""
        import pyarrow as pa

        schema = pa.schema({"input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int32())})
        with pa.OSFile(str(self.path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            for batch in batches:
                columns = [[one.input_ids for one in batch], [one.labels for one in batch]]
                arrays = [pa.array(column, pa.list_(pa.int32())) for column in columns]
                stream.write_batch(pa.record_batch(arrays, schema=schema))
                for one in batch:
                    self.add(one)

    def rows(self, chosen: "list[int] | np.ndarray") -> "datasets.Dataset":
        """The chosen sequences, in that order."""
        import datasets

        return datasets.Dataset.from_file(str(self.path)).select(chosen)


def save(encoded: Encoded, chosen: list[int], folder: Path, asked: dict[str, Any], prefix: str) -> dict:
    """Stores the chosen sequences, shuffled and packed if asked; returns their number and fill share.

    prefix: before the names of these two facts.
    """
    import numpy as np

    if not chosen:
        return {f"{prefix}sequences": 0, f"{prefix}fingerprint": "none"}
    length, packing = asked["max_length"], asked["packing"]
    if packing:
        from trl.data_utils import pack_dataset  # seconds, for nothing if nothing is packed

        order = np.random.default_rng(asked["seed"]).permutation(np.asarray(chosen, dtype=np.int64))
        data = pack_dataset(encoded.rows(order), length, strategy="bfd")
    else:
        data = encoded.rows(chosen)
    data.save_to_disk(str(folder))
    facts = {f"{prefix}sequences": len(data), f"{prefix}fingerprint": _fingerprint(load(folder, packing))}
    if packing:
        facts[f"{prefix}fill"] = sum(encoded.lengths[place] for place in chosen) / (len(data) * length)
    return facts


def _fingerprint(data: "datasets.Dataset") -> str:
    """A hash of all rows in their order, so that a resumed run knows its data wherever it was read from."""
    whole = hashlib.sha256()
    for batch in data.with_format("arrow").iter(1000):
        for name in sorted(batch.column_names):
            for value in (batch[name].combine_chunks().value_lengths(), batch[name].combine_chunks().flatten()):
                whole.update(value.to_numpy(zero_copy_only=False).tobytes())
    return whole.hexdigest()[:16]


def load(folder: Path, packing: bool) -> "datasets.Dataset":
    """What `save` stored, mapped from disk; no rows, but their columns, where it stored none."""
    import datasets

    if not folder.is_dir():  # `datasets` can save no rows, but not load them
        numbers = datasets.List(datasets.Value("int32"))
        names = ("input_ids", "labels", *(["seq_lengths"] if packing else []))
        features = datasets.Features({name: numbers for name in names})
        return datasets.Dataset.from_dict({name: [] for name in names}, features=features)
    return datasets.load_from_disk(str(folder))


@contextlib.contextmanager
def quiet_progress() -> Iterator[None]:
    """No progress bars of `datasets` where nobody watches: in a log each update is a line."""
    import datasets

    off = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if off:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if off:
            datasets.enable_progress_bars()
