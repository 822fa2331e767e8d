"""Reads data files row by row: .json, .jsonl, .csv, .parquet and .txt, each also as .gz, and folders of them.

    paths, ignored = files.find("data/")        # ignored: names in the folder that are no data files
    for row in files.read(paths[0]): row.where, row.data   # ("data/a.jsonl:7", {"prompt": ..., ...})

A plain reader rather than `datasets`, because a message must name the file, the line and the column.
"""

import contextlib
import csv
import difflib
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from slipway.errors import InputError

csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is less than one long document


class Row(NamedTuple):
    """One row as it stands in the file.

    where: its place for messages, as file:line or "file row N" (from 1).
    name: if given, it and not the content decides whether the row is held out.
    """

    where: str
    data: dict
    name: str | None = None


def suffix(path: Path | str) -> str:
    """The suffix that says the format: that before .gz, in lower case."""
    path = Path(path)
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def looks_like_path(source: str) -> bool:
    """Whether `source` can only mean a file or folder, so that it is never asked of the hub."""
    return source.startswith((".", "/", "~")) or suffix(source) in READERS or Path(source).exists()


def find(source: str) -> tuple[list[Path], list[str]]:
    """The data files of a file or folder by name, and the names of what else is in the folder.

    Raises InputError if there is none, naming what is near.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        inside = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
        found = [entry for entry in inside if entry.is_file() and suffix(entry) in READERS]
        if not found:
            names = ", ".join(entry.name for entry in inside[:8])
            holds = f"holds no data file, but {names}" if names else "is empty"
            raise InputError(f"the folder {source} {holds}", f"give {_KNOWN} files")
        return found, [entry.name for entry in inside if entry not in found]
    if path.is_symlink() and not path.exists():
        raise InputError(f"{source} is a link to {path.readlink()}, which does not exist", "mend the link")
    if not path.exists():
        raise InputError(f"{source}: no such file or folder{_near(path)}", "mend the path")
    if suffix(path) not in READERS:
        kind = f"the suffix {path.suffix}" if path.suffix else "no suffix"
        raise InputError(f"{source} has {kind}; read are {_KNOWN}", "convert the file, or rename it if it is one")
    return [path], []


def read(path: Path) -> Iterator[Row]:
    """Yields the rows of one file. InputError at the first that cannot be read, and if there is none."""
    empty = True
    with _reading(path):
        for row in READERS[suffix(path)](path):
            empty = False
            yield row
    if empty:
        raise InputError(f"{path} is empty: it holds no row", "fill it or leave it out")


def _near(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" (the folder {folder} does not exist)"
    names = [entry.name for entry in folder.iterdir()]
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"; similar names there: {', '.join(close)}" if close else ""


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is no complete gzip file ({error})", "compress it anew") from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error})", "check the file and its rights"
        ) from error


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text with its line end) of a UTF-8 file; a byte order mark is left out."""
    offset = 0
    with _open(path) as file:
        for number, raw in enumerate(file, 1):
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                at = offset + error.start
                wide = number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff")
                raise InputError(
                    f"{path}:{number}: not UTF-8 (byte 0x{raw[error.start]:02x} at offset {at} of the file"
                    f"{', which starts like UTF-16' if wide else ''})",
                    "save it as UTF-8, for example: iconv -f " + ("UTF-16" if wide else "ISO-8859-1") + " -t UTF-8",
                ) from error
            yield number, text.removeprefix("\ufeff") if number == 1 else text
            offset += len(raw)


def _jsonl(path: Path) -> Iterator[Row]:
    for number, line in _lines(path):
        if line.strip():
            try:
                data = json.loads(line)
            except json.JSONDecodeError as error:
                raise _bad_json(path, number, error) from error
            yield _object(f"{path}:{number}", data)


def _json(path: Path) -> Iterator[Row]:
    """A list of objects; objects one after the other; or one object that holds one list of objects."""
    text = "".join(line for _, line in _lines(path))
    start = _skip(text, 0)
    if text.startswith("[", start):
        yield from _elements(path, text, start)
    elif start < len(text):
        rows = _objects(path, text, start)
        first = next(rows)
        second = next(rows, None)
        if second is None:
            yield from _unwrap(path, first)
        else:
            yield from (first, second)
            yield from rows


def _elements(path: Path, text: str, at: int) -> Iterator[Row]:
    line, counted, at = 1, 0, _skip(text, at + 1)
    while not text.startswith("]", at):
        line, counted = line + text.count("\n", counted, at), at
        data, at = _decode(path, text, at)
        yield _object(f"{path}:{line}", data)
        at = _skip(text, at)
        if text.startswith(",", at):
            at = _skip(text, at + 1)
        elif not text.startswith("]", at):
            raise _bad_json(path, None, json.JSONDecodeError("Expecting ',' or ']'", text, at))
    rest = _skip(text, at + 1)
    if rest < len(text):
        raise _bad_json(path, None, json.JSONDecodeError("Extra data after the list", text, rest))


def _objects(path: Path, text: str, at: int) -> Iterator[Row]:
    line, counted = 1, 0
    while at < len(text):
        line, counted = line + text.count("\n", counted, at), at
        data, at = _decode(path, text, at)
        yield _object(f"{path}:{line}", data)
        at = _skip(text, at)


def _unwrap(path: Path, row: Row) -> Iterator[Row]:
    """The rows of {"data": [{...}, ...]}; an object whose list holds chat messages is itself a row."""

    def is_rows(value: object) -> bool:
        return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)

    lists = [name for name, value in row.data.items() if is_rows(value) and "role" not in value[0]]
    if len(lists) > 1:
        raise InputError(f"{path} holds {len(lists)} lists of rows: {', '.join(lists)}", "put one list in a file")
    if not lists:
        yield row
        return
    for number, data in enumerate(row.data[lists[0]], 1):
        yield Row(f"{path} {lists[0]}[{number - 1}]", data)


def _decode(path: Path, text: str, at: int) -> tuple[object, int]:
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise _bad_json(path, None, error) from error


def _skip(text: str, at: int) -> int:
    """The first place at or after `at` that is no JSON white space."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _bad_json(path: Path, line: int | None, error: json.JSONDecodeError) -> InputError:
    line = line or error.lineno
    return InputError(
        f"{path}:{line}: no valid JSON at column {error.colno} ({error.msg})", f"mend or delete line {line}"
    )


def _object(where: str, data: object) -> Row:
    if not isinstance(data, dict):
        shown = json.dumps(data)[:40]
        raise InputError(f"{where}: expected an object with columns, found {shown}", 'write {"text": ...} or the like')
    return Row(where, data)


def _csv(path: Path) -> Iterator[Row]:
    lines = (line for _, line in _lines(path))
    reader = csv.reader(lines, strict=True)
    header: list[str] | None = None
    start, behind = 1, 1  # the row's first line, and that behind it: a row may be many lines long
    try:
        for fields in reader:
            start, behind = behind, reader.line_num + 1
            if not fields:
                continue
            if header is None:
                header = _header(path, fields)
                continue
            if len(fields) != len(header):
                raise InputError(
                    f"{path}:{start}: {len(fields)} fields, but the header has {len(header)}: {', '.join(header)}",
                    'put "quotes" around fields that hold commas or line ends',
                )
            yield Row(f"{path}:{start}", dict(zip(header, fields, strict=True)))
    except csv.Error as error:
        raise InputError(f"{path}:{behind}: no valid CSV ({error})", "mend the quotes of this row") from error


def _header(path: Path, fields: list[str]) -> list[str]:
    twice = {name for name in fields if fields.count(name) > 1}
    if twice:
        raise InputError(f"{path}:1: the header names {', '.join(sorted(twice))} twice", "rename one of them")
    other = re.search(r"[;\t|]", fields[0])
    if len(fields) == 1 and other:
        raise InputError(
            f"{path}:1: the header is one column, {fields[0]!r}; {other[0]!r} seems to separate its fields",
            "write the file anew with commas between the fields",
        )
    return fields


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with _open(path) as file:
            # A gzip'd file cannot be sought in cheaply, and Parquet starts at its end: it is read whole.
            table = pq.ParquetFile(pa.BufferReader(file.read()) if path.suffix.lower() == ".gz" else path)
            number = 0
            for batch in table.iter_batches(batch_size=1000):
                for data in batch.to_pylist():
                    number += 1
                    yield Row(f"{path} row {number}", data)
    except pa.ArrowException as error:
        raise InputError(f"{path}: no valid Parquet ({error})", "write the file anew") from error


def _txt(path: Path) -> Iterator[Row]:
    text = "".join(line for _, line in _lines(path))
    if text.strip():
        yield Row(str(path), {"text": text})


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".json": _json,
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".parquet": _parquet,
    ".txt": _txt,
}
_KNOWN = ", ".join(READERS) + " (each also with .gz)"
