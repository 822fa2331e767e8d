"""What rows and folders mean: shapes, columns, dropped rows, stray files, and the embedded data."""

import re
from collections import Counter
from pathlib import Path

import pytest
from rows import PAIRS, read, refused, write

from slipway import docstrings, shapes, sources

ROOT = Path(__file__).resolve().parent.parent


def test_wrong_types_in_parquet_name_the_row(tmp_path):
    refused(
        write(tmp_path / "a.parquet", [{"text": None}, {"text": 1}]),
        "a.parquet row 2: column text",
        "a number (1)",
    )


def test_a_missing_file_names_similar_ones(tmp_path):
    write(tmp_path / "train.jsonl", PAIRS)
    refused(tmp_path / "trian.jsonl", "trian.jsonl: no such file or folder", "similar names there: train.jsonl")
    refused(tmp_path / "no" / "train.jsonl", "does not exist")


def test_a_stray_file_in_a_folder_is_named_with_its_columns(tmp_path):
    write(tmp_path / "a.jsonl", PAIRS)
    write(tmp_path / "package.json", [{"name": "x", "version": "1"}])
    refused(
        tmp_path,
        "package.json:2 has the columns name, version (no shape)",
        "a.jsonl:1 has prompt, completion",
    )


def test_a_folder_without_data_says_what_it_holds(tmp_path):
    (tmp_path / "notes.md").write_text("x")
    refused(tmp_path, "holds no data file, but notes.md")


def test_other_files_of_a_folder_are_counted_and_left_out(tmp_path):
    write(tmp_path / "a.jsonl", PAIRS)
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / ".hidden.json").write_text("x")
    opened = sources.open_source(str(tmp_path), "train", None)
    assert opened.ignored == ["notes.md"]
    assert len(list(opened.rows())) == len(PAIRS)


def test_rows_without_prompt_or_answer_are_dropped_by_rule(tmp_path):
    rows = [
        {"prompt": "q"},
        {"prompt": "q", "completion": "a"},
        {"prompt": "q", "completion": " "},
        {"completion": "a"},
    ]
    tally = Counter()
    assert read(write(tmp_path / "a.jsonl", rows), tally) == [{"prompt": "q", "completion": "a"}]
    assert tally == {"read": 4, shapes.NO_ANSWER: 2, shapes.NO_PROMPT: 1}


def test_a_conversation_without_an_answer_is_dropped(tmp_path):
    turns = [
        [{"role": "user", "content": "q"}],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}],
    ]
    tally = Counter()
    assert read(write(tmp_path / "a.jsonl", [{"messages": one} for one in turns]), tally) == []
    assert tally[shapes.NO_ANSWER] == 2


def test_shape_and_unused_columns_are_found(tmp_path):
    row = {"instruction": "i", "input": "x", "output": "o", "text": "rendered", "id": "7"}
    found = {}
    (content,) = read(write(tmp_path / "a.csv", [row]), found=found)
    assert found == {"shape": "alpaca", "ignored_columns": ["id", "text"]}
    assert content["messages"][0]["content"] == "i\n\nx"
    assert content["messages"][1] == {"role": "assistant", "content": "o"}


def test_alpaca_without_chat_template_is_the_known_text(tmp_path):
    rows = [
        {"instruction": "Add {them}.", "input": "1 2", "output": "3"},
        {"instruction": "Hi", "input": "", "output": "o"},
    ]
    first, second = read(write(tmp_path / "a.jsonl", rows), chat=False)
    assert "### Instruction:\nAdd {them}.\n\n### Input:\n1 2\n\n### Response:\n" in first["prompt"]
    assert "### Input" not in second["prompt"]
    assert second["completion"] == "o"


def test_columns_rename_and_shape_forces(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "a", "text": "t"}])
    columns = {"prompt": "question", "completion": "answer"}
    assert read(path, columns=columns) == [{"prompt": "q", "completion": "a"}]
    assert read(path, shape="text") == [{"text": "t"}]
    assert read(path, columns={"text": "answer"}, shape="text") == [{"text": "a"}]
    refused(path, "no shape txt", 'did you mean "text"?', shape="txt")
    refused(path, "shape messages needs messages; found: question, answer, text", shape="messages")
    refused(path, "prompt is to be qestion", 'did you mean "question"?', columns={"prompt": "qestion"})
    refused(path, "no column promt", 'did you mean "prompt"?', columns={"promt": "question"})


def test_equal_rows_have_equal_keys(tmp_path):
    path = write(tmp_path / "a.jsonl", [PAIRS[0], PAIRS[1], dict(reversed(PAIRS[0].items()))])
    rows = sources.open_source(str(path), "train", None).rows()
    options = {"shape": None, "columns": None, "chat": True, "seed": 0, "tally": Counter(), "found": {}}
    keys = [one.key for one in shapes.examples(rows, **options)]
    assert keys[0] == keys[2] != keys[1]


def test_equal_conversations_have_equal_keys(tmp_path):
    turn = {"role": "assistant", "content": "a"}
    path = write(tmp_path / "a.jsonl", [{"messages": [turn]}, {"messages": [dict(reversed(turn.items()))]}])
    rows = sources.open_source(str(path), "train", None).rows()
    options = {"shape": None, "columns": None, "chat": True, "seed": 0, "tally": Counter(), "found": {}}
    first, second = shapes.examples(rows, **options)
    assert first.key == second.key


@pytest.fixture(scope="module")
def embedded():
    return docstrings.load()


def test_docstrings_are_many_and_different(embedded):
    assert len(embedded) == docstrings.ROWS
    assert {row["package"] for row in embedded} == set(docstrings.PACKAGES)
    assert len({row["name"] for row in embedded}) > 0.99 * len(embedded)
    assert len({row["messages"][1]["content"] for row in embedded}) == len(embedded)
    for row in embedded:
        question, answer = row["messages"]
        assert question["content"].startswith(docstrings.ASK)
        assert len(answer["content"]) >= docstrings._SHORTEST
    # Modules are mixed, so that the first rows are not all of one.
    assert len({row["name"].rsplit(".", 2)[0] for row in embedded[:50]}) > 25


def test_docstrings_are_the_same_each_time_whatever_the_order_of_packages():
    once, twice = (docstrings.build(packages, 100) for packages in (("accelerate", "trl"), ("trl", "accelerate")))
    assert once == twice
    assert len(once) == 100


def test_docstrings_come_from_locked_packages_only():
    lock = (ROOT / "docker/requirements.lock").read_text()
    locked = {name.lower().replace("-", "_") for name in re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)}
    assert set(docstrings.PACKAGES) <= locked
