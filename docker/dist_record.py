"""Keeps a package's RECORD true where the build adds, changes or leaves out files of it.

RECORD lists a package's files with hash and size; `make verify`, pip and uv read it. A file that is not as RECORD says
is then damage, and never something that this build did on purpose.
"""

import base64
import csv
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def update(record: Path, files: Iterable[Path]) -> None:
    """Brings the rows of `files` up to date: hash and size of one that is there, no row for one that is gone.

    `record` is site-packages/NAME.dist-info/RECORD, and rows are paths relative to its site-packages.
    """
    root = record.parent.parent
    names = {os.path.relpath(file, root): file for file in files}
    with record.open(newline="") as opened:
        rows = [row for row in csv.reader(opened) if row[0] not in names]
    rows += [row(name, file.read_bytes()) for name, file in names.items() if file.exists()]
    with record.open("w", newline="") as opened:
        csv.writer(opened, lineterminator="\n").writerows(sorted(rows))


def row(name: str, content: bytes) -> list[str]:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return [name, f"sha256={digest}", str(len(content))]
