"""Texts with a class each: read, checked, split into training and held-out rows, encoded; and how well they are told.

    data = labelled.prepare("reviews.csv")      # or a folder, .jsonl, .parquet, or the embedded docstrings
    data.classes, data.train, data.held_out     # names of the classes, two lists of Text

Which rows are held out depends on their texts alone: the same on every machine, and equal texts stay together.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from slipway import cache, docstrings, files
from slipway.errors import InputError, nearest
from slipway.files import Row

EMBEDDED = "docstrings"
# Packages of the lock with many docstrings, each in a house style; the task is to tell which one a text is from.
PACKAGES = ("matplotlib", "numpy", "pandas", "sympy", "torch", "transformers")
ROWS_EACH = 400
_NAMES = re.compile(rf"\w*(?:{'|'.join(PACKAGES)})\w*", re.IGNORECASE)
_MOST_CLASSES = 1000


class Text(NamedTuple):
    """One row; `label` is the index of its class."""

    text: str
    label: int


@dataclass
class Labelled:
    """Rows to train on and to measure on; notes: what in them a person should look at."""

    source: str
    classes: tuple[str, ...]
    train: list[Text]
    held_out: list[Text]
    notes: list[str] = field(default_factory=list)

    @property
    def fingerprint(self) -> str:
        """Changes with any row, its class, or its side."""
        return hashlib.sha256(json.dumps([self.classes, self.train, self.held_out]).encode()).hexdigest()[:16]


def prepare(
    source: str, *, text: str = "text", label: str = "label", held_out: float = 0.1,
    eval_source: str | None = None, max_rows: int | None = None,
) -> Labelled:  # fmt: skip
    """Reads, checks and splits `source`; `held_out` is the share of each class that is not trained on.

    Raises InputError for missing columns, an empty file, texts that are none, and labels that are no classes.
    """
    rows = _read(source, text, label, max_rows)
    classes = _classes(source, label, rows)
    if eval_source is None:
        held = _held_out(rows, held_out)
        sides = [[row for row in rows if (row[1] in held) == side] for side in (False, True)]
    else:
        sides = [rows, _read(eval_source, text, label, None)]
    numbers = {name: number for number, name in enumerate(classes)}
    for where, _, name in sides[1]:
        if name not in numbers:
            raise InputError(f"{where}: class {name!r} is not in {source}", "train on rows of that class too")
    train, measured = ([Text(words, numbers[name]) for _, words, name in side] for side in sides)
    if not train or not measured:
        if len({words for _, words, _ in rows}) == 1:
            raise InputError(
                f"{source}: all {len(rows)} rows have the same {text}, {_short(rows[0][1])}",
                f"is another column the text? --text_column names it (now {text!r})",
            )
        raise InputError(
            f"{source}: {len(rows)} rows give {len(train)} to train on and {len(measured)} to measure on",
            "give more rows, another --held_out, or an --eval_data",
        )
    return Labelled(source, classes, train, measured, _notes(classes, rows))


def _read(source: str, text: str, label: str, max_rows: int | None) -> list[tuple[str, str, str]]:
    """(where, text, class's name) of each row."""
    found = []
    for row in _rows(source):
        if max_rows is not None and len(found) >= max_rows:
            break
        for column in (text, label):
            if column not in row.data:
                raise InputError(
                    f"{row.where}: no column {column!r}; there are {', '.join(row.data)}{nearest(column, row.data)}",
                    f"rename it, or name yours: --text_column and --label_column (now {text!r}, {label!r})",
                )
        words = row.data[text]
        if not isinstance(words, str) or not words.strip():
            raise InputError(f"{row.where}: {text} is no text but {words!r}", "mend or delete that row")
        found.append((row.where, words, _class(row, label)))
    return found


def _rows(source: str) -> Iterator[Row]:
    if source == EMBEDDED:
        yield from (Row(row["name"], row) for row in _docstrings())
        return
    if not files.looks_like_path(source):
        raise InputError(f"DATA={source} is no file or folder", f"name one, or {EMBEDDED}, which is embedded")
    for path in files.find(source)[0]:
        yield from files.read(path)


def _class(row: Row, column: str) -> str:
    """The class as a name: a text, a whole number, or true or false."""
    value = row.data[column]
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a whole number that passed through a table with gaps
    if isinstance(value, (bool, int)) or (isinstance(value, str) and value.strip()):
        return str(value).strip()
    found = "empty" if isinstance(value, str) else "null" if value is None else json.dumps(value)
    number = isinstance(value, float) and not math.isnan(value)
    raise InputError(
        f"{row.where}: {column} is {found}, which is no class",
        "this recipe tells classes apart; numbers on a scale need regression" if number else "mend or delete that row",
    )


def _classes(source: str, column: str, rows: list[tuple[str, str, str]]) -> tuple[str, ...]:
    """The names of the classes, in order; whole numbers by value."""
    count = Counter(name for _, _, name in rows)
    if len(count) < 2:
        raise InputError(
            f"{source}: all {len(rows)} rows have the {column} {next(iter(count), 'none')!r}; "
            "one class leaves nothing to tell apart",
            "add rows of another class",
        )
    fractions = [name for name in count if _number(name) is not None and not _number(name).is_integer()]
    if fractions and all(_number(name) is not None for name in count):
        raise InputError(
            f"{source}: {column} holds numbers on a scale, such as {fractions[0]}, and no classes",
            "this recipe tells classes apart: cut the scale into named classes first",
        )
    if len(count) > _MOST_CLASSES or (len(rows) > 20 and len(count) > len(rows) / 2):
        raise InputError(
            f"{source}: {len(count)} different values of {column} in {len(rows)} rows are no classes",
            f"is another column the class? --label_column names it; at most {_MOST_CLASSES} are taken",
        )
    whole = all(re.fullmatch(r"-?\d+", name) for name in count)
    return tuple(sorted(count, key=int if whole else str))


def _notes(classes: tuple[str, ...], rows: list[tuple[str, str, str]]) -> list[str]:
    """Classes that are in part numbers, and texts of more than one class: neither is wrong, both are often a slip."""
    found = []
    numbers = [name for name in classes if _number(name) is not None]
    if numbers and len(numbers) < len(classes):
        words = next(name for name in classes if name not in numbers)
        found.append(f"some classes are numbers, such as {numbers[0]}, and others words, such as {words!r}")
    first: dict[str, tuple[str, str]] = {}
    twice = {}
    for where, words, name in rows:
        was, before = first.setdefault(words, (where, name))
        if before != name:
            twice.setdefault(words, f"{was} {before!r}, {where} {name!r}")
    if twice:
        number = "1 text is" if len(twice) == 1 else f"{len(twice):,} texts are"
        found.append(f"{number} there with more than one class: {next(iter(twice.values()))}")
    return found


def _short(words: str) -> str:
    return repr(words if len(words) <= 40 else words[:37] + "...")


def _number(name: str) -> float | None:
    try:
        return float(name)
    except ValueError:
        return None


def _held_out(rows: list[tuple[str, str, str]], share: float) -> set[str]:
    """The texts to hold out: of each class its share, at least one; which ones, a hash of the text says."""
    by_class: dict[str, set[str]] = {}
    for _, words, name in rows:
        by_class.setdefault(name, set()).add(words)
    held: set[str] = set()
    for texts in by_class.values():
        held.update(sorted(texts, key=docstrings.key)[: max(1, round(share * len(texts))) if len(texts) > 1 else 0])
    return held


def _docstrings() -> list[dict]:
    """{"text", "label", "name"}: ROWS_EACH docstrings of each of PACKAGES, built once and cached.

    The packages' names are taken out of the texts: else looking for the name would be all there is to learn.
    """
    stamp = json.dumps([docstrings.versions(PACKAGES), ROWS_EACH])
    code = Path(__file__).read_bytes() + Path(docstrings.__file__).read_bytes()
    here = hashlib.sha256(code + stamp.encode()).hexdigest()[:16]

    def make(folder: Path) -> None:
        rows = [
            {"text": _NAMES.sub("it", row["messages"][1]["content"]), "label": package, "name": row["name"]}
            for package in PACKAGES
            for row in docstrings.build((package,), ROWS_EACH)
        ]
        rows.sort(key=lambda row: docstrings.key(row["name"]))  # so that the first few are of all packages
        (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")

    return json.loads((cache.build(f"labelled/{here}", make) / "rows.json").read_text(encoding="utf-8"))


def scores(predicted: list[int], labels: list[int]) -> dict[str, float]:
    """accuracy; macro_f1, the mean over the classes that occur of 2 x hits / (predicted + true); and majority, the
    accuracy of always saying the class that is the most frequent in `labels`."""
    hits = Counter(a for a, b in zip(predicted, labels, strict=True) if a == b)
    said, true = Counter(predicted), Counter(labels)
    f1 = [2 * hits[one] / (said[one] + true[one]) for one in said | true]
    return {
        "accuracy": hits.total() / len(labels),
        "macro_f1": sum(f1) / len(f1),
        "majority": max(true.values()) / len(labels),
        "rows": len(labels),
    }
