"""Checkpoints that are known to be whole: a manifest in each, the newest good one, and the removal of old ones.

    manifest.seal(folder, facts, files)              # last, when every rank has saved
    newest, passed_over = manifest.newest(output)    # a Checkpoint or None; a line for each that was passed over
    manifest.rotate(output, keep=2)

A checkpoint is OUTPUT/checkpoint-STEP as the Trainer writes it. It counts only with its manifest, which names every
file with size and sha256, is written after all of them have reached the disk, and appears by a rename.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway import memory

MANIFEST = "manifest.json"
_PART = f"{MANIFEST}.part"
_FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)")
_SET_ASIDE = re.compile(r"checkpoint-(\d+)\.incomplete(-\d+)?")
_THREADS = 8  # sha256 lets go of the interpreter, and a disk is faster with several readers


@dataclass(frozen=True)
class Checkpoint:
    """A complete one. facts: what its manifest tells besides the files: run_id, world_size, zero_stage, asked."""

    path: Path
    step: int
    facts: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @property
    def bytes(self) -> int:
        return sum(file["bytes"] for file in self.files.values())


class Damaged(Exception):
    """A folder that is no complete checkpoint; the text says why, for a person."""


def folder_of(output: Path, step: int) -> Path:
    """Where the Trainer saves at `step`."""
    return output / f"checkpoint-{step}"


def folders(output: Path) -> list[Path]:
    """All checkpoint folders of a run, complete or not, newest step first."""
    found = [path for path in output.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step, reverse=True)


def _step(folder: Path) -> int:
    return int((_NAME.fullmatch(folder.name) or _SET_ASIDE.fullmatch(folder.name))[1])


def listing(folder: Path) -> list[str]:
    """Every file below a checkpoint's folder but its manifest, by relative name, the largest first."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name not in (MANIFEST, _PART)]
    found.sort(key=lambda path: (-path.stat().st_size, path))
    return [path.relative_to(folder).as_posix() for path in found]


def digest(folder: Path, names: Iterable[str], to_disk: bool = False) -> dict[str, dict[str, Any]]:
    """Size and sha256 of the named files. `to_disk`: see each to the disk first, where a power cut spares it."""

    def one(name: str) -> dict[str, Any]:
        with (folder / name).open("rb") as file:
            if to_disk:
                os.fsync(file.fileno())
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
            return {"bytes": file.tell(), "sha256": checksum}

    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def seal(folder: Path, facts: dict[str, Any], files: dict[str, dict[str, Any]]) -> Checkpoint:
    """Write the manifest of a checkpoint whose files are all on the disk: from the rename on it counts."""
    for inner in {folder, *((folder / name).parent for name in files)}:
        _sync(inner)
    content = {"format": _FORMAT, "step": _step(folder), **facts, "files": files}
    with (folder / _PART).open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    (folder / _PART).replace(folder / MANIFEST)
    _sync(folder)
    _sync(folder.parent)
    return Checkpoint(folder, _step(folder), facts, files)


def _sync(folder: Path) -> None:
    """See the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(folder: Path, checksums: bool = True) -> Checkpoint:
    """The checkpoint in `folder`; raises Damaged unless its manifest is there and every file it names is as it says.

    Without `checksums` only the sizes are compared, which takes no time.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        step, files = content.pop("step"), content.pop("files")
    except FileNotFoundError:
        raise Damaged("it has no manifest: the run ended while it was being saved") from None
    except (OSError, ValueError, KeyError) as error:
        raise Damaged(f"its manifest cannot be read ({error!r})") from error
    if content.pop("format", None) != _FORMAT or step != _step(folder):
        raise Damaged(f"its manifest is of step {step}, or of another version of slipway")
    for name, file in files.items():
        if not (folder / name).is_file():
            raise Damaged(f"{name} is missing")
        size = (folder / name).stat().st_size
        if size != file["bytes"]:
            raise Damaged(f"{name} has {size:,} bytes, its manifest says {file['bytes']:,}")
    for name, found in digest(folder, files).items() if checksums else ():
        if found != files[name]:
            raise Damaged(f"{name} is not what was saved: its checksum differs")
    return Checkpoint(folder, step, content, files)


def newest(output: Path, run_id: str | None = None, checksums: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint of the run (None: there is none), and a line for each newer one passed over.

    `run_id`: only those of that run, where one is given; an overwritten run may have left others. Deletes nothing.
    """
    passed_over = []
    for folder in folders(output):
        try:
            found = read(folder, checksums)
            if run_id and found.facts.get("run_id") != run_id:
                raise Damaged("it is an earlier run's, which was overwritten")
            return found, passed_over
        except Damaged as why:
            passed_over.append(f"{folder.name} is passed over: {why}")
    return None, passed_over


def set_aside(folder: Path) -> None:
    """Make way for a new save of the same step: what an ended run left half-written is renamed, not written into."""
    if not folder.exists():
        return
    target, number = folder.with_name(f"{folder.name}.incomplete"), 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}.incomplete-{number}")
    folder.rename(target)


def rotate(output: Path, keep: int | None, run_id: str | None = None) -> None:
    """Remove what is older than the newest `keep` complete checkpoints of the run (None: all are kept).

    Complete is judged by manifest and sizes. Fewer than `keep` complete ones: nothing is removed.
    """
    complete = []
    for folder in folders(output) if keep else ():
        try:
            found = read(folder, checksums=False)
        except Damaged:
            continue
        if run_id is None or found.facts.get("run_id") == run_id:
            complete.append(found)
    if not keep or len(complete) < keep:
        return
    oldest = complete[keep - 1].step
    left = [path for path in output.glob("checkpoint-*") if _SET_ASIDE.fullmatch(path.name)]
    for folder in [*folders(output), *left]:
        if _step(folder) < oldest:
            # The manifest goes first: a removal that is cut short leaves nothing that looks complete.
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)


def make_room(output: Path, size: int, keep: int | None, run_id: str | None = None) -> str:
    """Why the disk has no room for one more checkpoint, and which is the last; empty if it has.

    Where it would not fit, the oldest goes if another is left. size: bytes of one, by estimate, until one is there.
    """
    last, _ = newest(output, run_id, checksums=False)
    need = last.bytes if last else size
    if memory.free_disk(output) < need and keep:
        rotate(output, max(1, keep - 1), run_id)
    free = memory.free_disk(output)
    if free >= need:
        return ""
    there = f"the last checkpoint is that of step {last.step}" if last else "there is no checkpoint"
    gib = memory.GIB
    return f"there is no room: about {need / gib:.3f} GiB are needed, {free / gib:.3f} are free; {there}"
