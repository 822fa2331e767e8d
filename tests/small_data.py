"""Small rows of every shape, prepared with small tokenizers in a cache of the test's own."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from slipway import cache, encode
from slipway.labels import IGNORE


def turns(*contents: str, system: str | None = None) -> list[dict]:
    first = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return first + [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]


CHATS = [
    {"messages": turns("Hi", "Hello there")},
    {"messages": turns("One?", "First", "Two?", " second, with a space", system="Be short.")},
    {"messages": turns("Ünï?", "Çödé 🙂\n\nend\n")},
]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("SLIPWAY_CACHE", str(tmp_path / "cache"))
    cache.root.cache_clear()
    yield tmp_path / "cache"
    cache.root.cache_clear()


def write(folder: Path, rows: list[dict], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def prepare(source: str, tokenizer, **options) -> encode.Prepared:
    settings = {"max_length": 256, "packing": False, "seed": 0, "vocab_size": 1000, "held_out_rows": 0}
    return encode.prepare(source, tokenizer, **settings | options)


def trained(tokenizer, row: dict) -> list[str]:
    """The texts of the runs of tokens that are trained on."""
    runs, last = [], None
    for place, label in enumerate(row["labels"]):
        if label == IGNORE:
            continue
        assert label == row["input_ids"][place]
        if last != place - 1:
            runs.append([])
        runs[-1].append(label)
        last = place
    return [tokenizer.decode(run) for run in runs]


def ends(row: dict) -> list[int]:
    """The last label of each run."""
    padded = [*row["labels"], IGNORE]
    return [a for a, b in pairwise(padded) if a != IGNORE and b == IGNORE]
