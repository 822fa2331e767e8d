"""Training data from a source to packed tokens, once: prepare, cache, and say what was done in numbers.

data = encode.prepare("docstrings", tokenizer, max_length=512, packing=True, seed=0, vocab_size=49152)
data.train[0]     # {"input_ids": [...], "labels": [...], "seq_lengths": [...]}
print(*encode.describe(data.facts), sep="\\n")
"""

import hashlib
import importlib.metadata
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway import cache, docstrings, files, held_out, labels, pack, shapes, sources, topology
from slipway.errors import InputError

if TYPE_CHECKING:  # the launcher imports this module, and `datasets` takes seconds
    import datasets

SHORTEST_MAX_LENGTH = 4
LOSS_ON = ("answer", "all")
BATCH = 500  # rows tokenized in one call
DROPPED = (
    shapes.NO_ANSWER,
    shapes.NO_PROMPT,
    shapes.NO_TEXT,
    shapes.NO_TOKENS,
    labels.TOO_LONG,
    labels.NO_LABELS,
)
CUT = {"truncated": labels.TRUNCATED, "texts_split": labels.SPLIT, "end_added": labels.END_ADDED}
_NOTES = {
    "truncated": "{:,} rows truncated at max_length {size}",
    "texts_split": "{:,} texts longer than {size} tokens split into pieces",
    "end_added": "{:,} answers got an end token that the chat template does not write",
    "eval_dropped": "{:,} rows of the evaluation data dropped",
    "in_held_out_too": "{:,} training rows dropped: they are in the evaluation data too",
}


@dataclass
class Prepared:
    """What `prepare` gives. prompts: {"messages": [...]} or {"text": "..."}, each with "reference"."""

    train: "datasets.Dataset"
    held_out: "datasets.Dataset"
    facts: dict
    prompts: list[dict]
    folder: Path


def prepare(
    source: str,
    tokenizer: Any,
    *,
    max_length: int,
    packing: bool,
    seed: int,
    vocab_size: int,
    shape: str | None = None,
    split: str = "train",
    config: str | None = None,
    columns: dict[str, str] | None = None,
    eval_source: str | None = None,
    held_out_rows: int = 64,
    max_rows: int | None = None,
    loss_on: str = "answer",
) -> Prepared:
    """Reads, checks, tokenizes, splits and packs a source, or takes all that from the cache.

    Raises InputError for everything in the source that the user has to mend.
    """
    _check_numbers(max_length, held_out_rows, max_rows, loss_on)
    asked = {
        "max_length": max_length,
        "packing": packing,
        "seed": seed,
        "vocab_size": vocab_size,
        "shape": shape,
        "columns": columns,
        "held_out_rows": held_out_rows,
        "max_rows": max_rows,
        "loss_on": loss_on,
    }
    opened = sources.open_source(source, split, config)
    opened_eval = sources.open_source(eval_source, split, config) if eval_source else None
    name = _name(tokenizer, asked, [opened, opened_eval])
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        _make(folder, tokenizer, asked, opened, opened_eval)

    folder = cache.build(name, make)
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    return Prepared(
        pack.load(folder / "train", packing),
        pack.load(folder / "held_out", packing),
        facts | {"cache": "made" if made or _made_by_launcher(folder) else "hit"},
        json.loads((folder / "prompts.json").read_text(encoding="utf-8")),
        folder,
    )


def _made_by_launcher(folder: Path) -> bool:
    """Whether this very run's launcher made it, a moment ago, for its ranks."""
    return (folder / "facts.json").stat().st_mtime >= topology.launched_at(math.inf)


def _check_numbers(max_length: int, held_out_rows: int, max_rows: int | None, loss_on: str) -> None:
    if max_length < SHORTEST_MAX_LENGTH:
        raise InputError(f"max_length is {max_length}", f"give at least {SHORTEST_MAX_LENGTH} tokens")
    if held_out_rows < 0:
        raise InputError(f"held_out_rows is {held_out_rows}", "give 0 for none, or a number of rows")
    if max_rows is not None and max_rows < 1:
        raise InputError(f"max_rows is {max_rows}", "give at least 1, or leave it out for all rows")
    if loss_on not in LOSS_ON:
        raise InputError(f"loss_on is {loss_on!r}", f"give one of {', '.join(LOSS_ON)}")


def _name(tokenizer: Any, asked: dict, opened: list[sources.Source | None]) -> str:
    """The cache name: a hash of all that the result depends on, our own modules' text included."""
    modules = (cache, docstrings, files, held_out, labels, pack, shapes, sources)
    texts = [Path(module.__file__).read_text(encoding="utf-8") for module in modules]
    versions = {name: importlib.metadata.version(name) for name in ("datasets", "transformers", "trl")}
    stamps = [one and one.fingerprint for one in opened]
    whole = [
        Path(__file__).read_text(encoding="utf-8"),
        texts,
        versions,
        asked,
        stamps,
        _fingerprint(tokenizer),
    ]
    return f"data/{hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:24]}"


def _fingerprint(tokenizer: Any) -> list:
    """The tokenizer's content: what it does to text, whatever folder it came from."""
    if tokenizer.is_fast:
        backend = tokenizer.backend_tokenizer
        backend.no_padding()  # both are left behind by earlier calls, and set anew by each
        backend.no_truncation()
        content = backend.to_str()
    else:
        content = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    kind = type(tokenizer).__name__
    return [kind, hashlib.sha256(content.encode()).hexdigest(), special, tokenizer.chat_template]


def _make(
    folder: Path, tokenizer: Any, asked: dict, opened: sources.Source, opened_eval: sources.Source | None
) -> None:
    with pack.quiet_progress():
        train = _encode(folder / "rows.arrow", tokenizer, asked, opened)
        other = train
        if opened_eval:
            other = _encode(folder / "eval.arrow", tokenizer, asked | {"max_rows": None}, opened_eval)
            chosen, places = list(range(len(other.tokens))), held_out.without(train.tokens, other.tokens)
            if not places:
                raise InputError(
                    f"all rows of {opened.name} are also in {opened_eval.name}, which is held out",
                    "give other rows for the evaluation, or none to hold some of the data out",
                )
        else:
            chosen, places = held_out.divide(train.tokens, asked["held_out_rows"])
        facts = _facts(train, other, places, chosen, asked) | {
            "source": opened.name,
            "ignored": opened.ignored,
        }
        prompts = held_out.prompts(other.tokens, chosen, other.candidates, tokenizer)
        facts |= pack.save(train.tokens, places, folder / "train", asked, "")
        facts |= pack.save(other.tokens, chosen, folder / "held_out", asked, "held_out_")
    (folder / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    for path in folder.glob("*.arrow"):
        path.unlink()


@dataclass
class _Rows:
    """One source after tokenization. tally: rows by what was done to them; candidates: see held_out."""

    tokens: pack.Encoded
    tally: Counter
    found: dict
    candidates: list[shapes.Example]


def _encode(path: Path, tokenizer: Any, asked: dict, opened: sources.Source) -> _Rows:
    tally, found = Counter(), {}
    labeler = labels.Labeler(tokenizer, asked["max_length"], asked["vocab_size"], asked["loss_on"] == "all", tally)
    rows = _Rows(pack.Encoded(path), tally, found, [])
    examples = shapes.examples(
        itertools.islice(opened.rows(), asked["max_rows"]),
        shape=asked["shape"],
        columns=asked["columns"],
        chat=tokenizer.chat_template is not None,
        seed=asked["seed"],
        tally=tally,
        found=found,
    )

    def batches() -> Iterator[list[labels.Sequence]]:
        while batch := list(itertools.islice(examples, BATCH)):
            sequences = labeler(batch)
            held_out.remember(rows.candidates, batch, {one.key for one in sequences})
            yield sequences

    rows.tokens.write(batches())
    if not rows.tokens:
        raise _nothing(opened.name, tally, labeler)
    return rows


def _nothing(name: str, tally: Counter, labeler: labels.Labeler) -> InputError:
    """No row is left: which rule dropped how many, and by how much."""
    read, length = tally["read"], labeler.max_length
    needs = f"the shortest needs {labeler.shortest}"
    if tally[labels.TOO_LONG] == read:
        return InputError(
            f"{name}: all {read} rows are longer than max_length {length} and keep nothing of their answer: {needs}",
            f"give max_length of {labeler.shortest} or more",
        )
    if tally[labels.NO_LABELS] == read:
        return InputError(f"{name}: 0 trainable tokens in {read} rows", "give labels other than -100")
    rules = {rule: tally[rule] for rule in DROPPED if tally[rule]}
    said = ", ".join(f"{count} with {rule}" for rule, count in rules.items())
    said += f" ({length} tokens; {needs})" if tally[labels.TOO_LONG] else ""
    return InputError(f"{name}: no usable row: {read} rows read, {said}", "mend the rows, or name the right columns")


def _facts(train: _Rows, other: _Rows, places: list[int], chosen: list[int], asked: dict) -> dict:
    lengths = sorted(train.tokens.lengths[place] for place in places)
    trained = sum(train.tokens.trained[place] for place in places)
    return {
        "shape": train.found["shape"],
        "ignored_columns": train.found["ignored_columns"],
        "rows_read": train.tally["read"],
        "dropped": {rule: train.tally[rule] for rule in DROPPED if train.tally[rule]},
        **{name: train.tally[rule] for name, rule in CUT.items()},
        "eval_dropped": sum(other.tally[rule] for rule in DROPPED) if other is not train else 0,
        "in_held_out_too": len(train.tokens) - len(places) if other is not train else 0,
        "train_rows": train.tokens.count_rows(places),
        "held_out_rows": other.tokens.count_rows(chosen),
        "held_out_asked": asked["held_out_rows"] if other is train else None,
        "tokens": sum(lengths),
        "trainable_tokens": trained,
        "held_out_tokens": sum(other.tokens.lengths[place] for place in chosen),
        "mean_length": round(statistics.fmean(lengths), 1),
        "median_length": statistics.median(lengths),
        "longest": lengths[-1],
        "max_length": asked["max_length"],
    }


def describe(facts: dict) -> list[str]:
    """The console's lines about prepared data: what was read, dropped and cut, and what it comes to."""
    share = facts["trainable_tokens"] / facts["tokens"]
    lines = [
        f"{facts['source']} ({facts['shape']}): {facts['rows_read']:,} rows read, "
        f"{facts['train_rows']:,} to train on, {facts['held_out_rows']:,} held out; cache {facts['cache']}",
        f"{facts['tokens']:,} tokens, {share:.0%} of them trained on; a row has "
        f"{facts['mean_length']:,} tokens in the mean, {facts['median_length']:,} in the median, "
        f"{facts['longest']:,} at most",
    ]
    size = facts["max_length"]
    if "fill" in facts:
        lines.append(f"packed into {facts['sequences']:,} sequences of {size}, {facts['fill']:.1%} full")
    notes = [f"{count:,} rows dropped: {rule}" for rule, count in facts["dropped"].items()]
    for name, text in _NOTES.items():
        if facts[name]:
            notes.append(text.format(facts[name], size=size))
    if facts["held_out_asked"] and facts["held_out_rows"] < facts["held_out_asked"]:
        few = f"{facts['held_out_rows']} rows held out, not {facts['held_out_asked']}"
        notes.append(f"{few}: a tenth of them at most, and equal rows stay together")
    if facts["ignored_columns"]:
        notes.append(f"columns not used: {', '.join(facts['ignored_columns'])}")
    if facts["ignored"]:
        notes.append(f"{len(facts['ignored'])} other files not read: {', '.join(facts['ignored'][:5])}")
    return lines + notes
