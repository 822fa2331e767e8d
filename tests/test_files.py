"""Files of every format are read, and one clear message names the place of whatever is wrong in them."""

import gzip
import json

import pytest
from rows import PAIRS, read, refused, write

from slipway import files
from slipway.errors import InputError


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("kind", sorted(set(files.READERS) - {".txt"}))
def test_every_format_gives_the_same_rows(tmp_path, kind, ending):
    assert read(write(tmp_path / f"a{kind}{ending}", PAIRS)) == PAIRS


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "b.txt").write_text("two\n\nparts\n")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"first"))
    assert read(tmp_path) == [{"text": "first"}, {"text": "two\n\nparts\n"}]


@pytest.mark.parametrize(
    "text",
    [
        '{"data": [{"text": "a"}, {"text": "b"}]}',
        '{"text": "a"}\n{"text": "b"}\n',
        '{\n "text": "a"}\n\n{"text": "b"}',
        '\ufeff[{"text": "a"},\n {"text": "b"}]\n',
    ],
    ids=["one list inside", "lines", "objects", "byte order mark"],
)
def test_forms_of_json(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    assert read(path) == [{"text": "a"}, {"text": "b"}]


def test_one_object_with_messages_is_a_row(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"messages": turns}))
    assert read(path) == [{"messages": turns, "answers_from": 0}]


BAD_FILES = {
    "a line of jsonl": (
        "a.jsonl",
        b'{"text": "a"}\n\n{"text": "b",}\n',
        ["a.jsonl:3: no valid JSON at column 1"],
    ),
    "an element of json": (
        "a.json",
        b'[{"text": "a"},\n\n{"text" "b"}]',
        ["a.json:3: no valid JSON at column 9"],
    ),
    "json that ends early": (
        "a.json",
        b'[{"text": "a"}\n',
        ["a.json:2: no valid JSON", "Expecting ',' or ']'"],
    ),
    "json and more": ("a.json", b'[{"text": "a"}]\n]', ["a.json:2: no valid JSON", "Extra data"]),
    "no object": ("a.jsonl", b'{"text": "a"}\n[1, 2]\n', ["a.jsonl:2: expected an object", "[1, 2]"]),
    "empty jsonl": ("a.jsonl", b"", ["a.jsonl is empty"]),
    "only white space": ("a.json", b" \n", ["a.json is empty"]),
    "empty csv": ("a.csv", b"text\n", ["a.csv is empty: it holds no row"]),
    "empty text": ("a.txt", b"\n \n", ["a.txt is empty"]),
    "empty list": ("a.json", b"[]", ["a.json is empty"]),
    "no utf-8": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "\xe9"}',
        ["a.jsonl:2: not UTF-8", "0xe9 at offset 24", "iconv"],
    ),
    "utf-16": ("a.txt", "text".encode("utf-16"), ["a.txt:1: not UTF-8", "UTF-16"]),
    "csv with a field too many": ("a.csv", b"text\na\nb,c\n", ["a.csv:3: 2 fields", "header has 1: text"]),
    "csv with a field too many in a row of two lines": ("a.csv", b'text\n"a\nb",c\n', ["a.csv:2: 2 fields"]),
    "csv with an open quote": ("a.csv", b'text\na\n\n"b\n\n', ["a.csv:4: no valid CSV"]),
    "csv with semicolons": ("a.csv", b"text;label\na;b\n", ["a.csv:1: the header is one column, 'text;label'", "';'"]),
    "csv with tabs": ("a.csv", b"text\tlabel\na\tb\n", ["a.csv:1: the header is one column", "'\\t'", "commas"]),
    "csv with a name twice": ("a.csv", b"text,text\na,b\n", ["a.csv:1: the header names text twice"]),
    "no parquet": ("a.parquet", b"PAR1 and then none", ["a.parquet: no valid Parquet"]),
    "no gzip": ("a.jsonl.gz", b'{"text": "a"}', ["a.jsonl.gz is no complete gzip file"]),
    "half a gzip": ("a.txt.gz", gzip.compress(b"text" * 99)[:-12], ["a.txt.gz is no complete gzip file"]),
    "two lists": ("a.json", b'{"a": [{"text": "a"}], "b": [{"text": "b"}]}', ["2 lists of rows: a, b"]),
    "unknown suffix": ("a.tsv", b"text\na", ["the suffix .tsv", ".jsonl"]),
    "a number as text": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": 7}',
        ["a.jsonl:2: column text: expected text", "a number (7)"],
    ),
    "a list as text": (
        "a.jsonl",
        b'{"prompt": "a", "completion": ["b"]}',
        ["a.jsonl:1: column prompt: expected a list of messages, found text"],
    ),
    "an unknown role": (
        "a.jsonl",
        b'{"messages": [{"role": "asistant", "content": "b"}]}',
        ["a.jsonl:1: messages[0]: no role 'asistant'", 'did you mean "assistant"?'],
    ),
    "no messages": (
        "a.jsonl",
        b'{"messages": [{"from": "human", "value": "b"}]}',
        ["a.jsonl:1", "messages[0]", '"role" and "content"', '"from": "human"'],
    ),
    "half a character": (
        "a.jsonl",
        b'{"text": "ab\\ud800"}',
        ["a.jsonl:1: column text", "\\ud800", "place 2"],
    ),
    "columns of no shape": (
        "a.jsonl",
        b'{"q": "a", "a": "b"}',
        ["a.jsonl:1", "fit no shape; found: q, a", "alpaca ("],
    ),
    "prompts without answers": (
        "a.jsonl",
        b'{"prompt": "a"}',
        ["a.jsonl:1: prompts without answers", "no completion"],
    ),
    "instructions without answers": (
        "a.jsonl",
        b'{"instruction": "a"}',
        ["prompts without answers", "no output"],
    ),
    "mixed shapes": (
        "a.jsonl",
        b'{"text": "a"}\n{"prompt": "b", "completion": "c"}',
        [
            "mixed shapes: ",
            "a.jsonl:2 has the columns prompt, completion (shape prompt_completion)",
            "a.jsonl:1 has text",
        ],
    ),
    "ids that are none": (
        "a.jsonl",
        b'{"input_ids": [1, "2"]}',
        ["a.jsonl:1: column input_ids: expected a list of whole"],
    ),
    "labels of another length": (
        "a.jsonl",
        b'{"input_ids": [1, 2], "labels": [1]}',
        ["2 input_ids but 1 labels"],
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_named_with_their_place(tmp_path, name):
    file, content, parts = BAD_FILES[name]
    (tmp_path / file).write_bytes(content)
    refused(tmp_path / file, *parts)


def test_reading_jsonl_does_not_hold_the_file_in_memory(tmp_path):
    path = write(tmp_path / "a.jsonl", PAIRS)
    path.write_bytes(path.read_bytes() + b"\nno JSON")
    rows = files.read(path)
    assert [next(rows).data for _ in PAIRS] == PAIRS  # given before the bad line was looked at
    with pytest.raises(InputError):
        next(rows)
