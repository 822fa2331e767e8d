"""Writes small data files of every format, and reads them as the recipes do."""

import csv
import gzip
import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway import files, shapes, sources
from slipway.errors import InputError

PAIRS = [{"prompt": f"What is {n}?", "completion": f"It is, so to say, {n}.\nÜ"} for n in range(3)]


def write(path: Path, rows: list[dict]) -> Path:
    """A file of the format that its name says."""
    kind = files.suffix(path)
    if kind == ".parquet":
        raw = path.with_name("raw.tmp")
        pq.write_table(pa.Table.from_pylist(rows), raw)
        data = raw.read_bytes()
        raw.unlink()
    elif kind == ".csv":
        raw = path.with_name("raw.tmp")
        with raw.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        data = raw.read_bytes()
        raw.unlink()
    elif kind == ".json":
        data = json.dumps(rows, indent=1).encode()
    else:
        data = "\n".join(json.dumps(row) for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(source: Path | str, tally: Counter | None = None, found: dict | None = None, **options) -> list[dict]:
    """The contents of all usable rows of a source."""
    rows = sources.open_source(str(source), "train", None).rows()
    settings = {"shape": None, "columns": None, "chat": True, "seed": 0} | options
    tally, found = Counter() if tally is None else tally, {} if found is None else found
    return [one.content for one in shapes.examples(rows, tally=tally, found=found, **settings)]


def refused(source: Path | str, *parts: str, **options) -> None:
    """Reading `source` ends in an InputError with a fix, whose text has all `parts`."""
    with pytest.raises(InputError) as caught:
        read(source, **options)
    assert caught.value.fix
    for part in parts:
        assert part in str(caught.value), str(caught.value)
