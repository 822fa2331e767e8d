"""Which checkpoint an export is asked for, whether it is whole, and where its weights lie.

found = export_source.find("outputs/zero3")        # a run's folder, a checkpoint's, or DeepSpeed's own below it
source = found.weights(fp32=True)                  # Stored (safetensors) or Partitions (DeepSpeed's files)
"""

import contextlib
import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from slipway import manifest, partitions, record, weights
from slipway.errors import InputError
from slipway.partitions import Partitions, Spec


class Stored:
    """Weights in safetensors, with the same surface as Partitions. Raises InputError where a file is broken."""

    def __init__(self, files: list[Path]):
        self._files = files
        self.aliases: dict[str, str] = {}  # safetensors know no ties
        self.tensors: dict[str, Spec] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            weights.check_file(file)
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    tensor = opened.get_tensor(name)  # mapped: nothing is read
                    self.tensors[name] = Spec(tuple(tensor.shape), tensor.dtype)
                    self._file_of[name] = file

    @property
    def has_fp32(self) -> bool:
        return not any(spec.dtype in (torch.bfloat16, torch.float16) for spec in self.tensors.values())

    @property
    def hollow(self) -> list[str]:
        """The names of tensors that hold nothing, as saving under ZeRO-3 without gathering leaves them."""
        return [name for name, spec in self.tensors.items() if math.prod(spec.shape) == 0]

    def files(self) -> list[Path]:
        return self._files

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str], torch.Tensor]]:
        """A function that reads a tensor by its name."""
        with contextlib.ExitStack() as stack:
            files: dict[Path, Any] = {}

            def read(name: str) -> torch.Tensor:
                file = self._file_of[name]
                if file not in files:
                    files[file] = stack.enter_context(safe_open(file, framework="pt"))
                return files[file].get_tensor(name)

            yield read
            files.clear()


@dataclass
class Found:
    """A checkpoint. deepspeed: DeepSpeed's own folder in it; files: what its manifest says of each, if it has one.

    also: other folders where its config and tokenizer may lie. notes: what was chosen, a line each.
    """

    folder: Path
    deepspeed: Path | None = None
    files: dict[str, dict[str, Any]] | None = None
    also: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_adapter(self) -> bool:
        return (self.folder / "adapter_config.json").is_file()

    def weights(self, fp32: bool, trust_pickle: bool = False) -> Stored | Partitions:
        """Where to read from: safetensors; DeepSpeed's files where there are none, or where the `fp32` copy that is
        wanted is only there."""
        stored = self._stored()
        if stored and stored.hollow and self.deepspeed:
            self.notes.append(f"{len(stored.hollow)} tensors in its safetensors are empty: read from DeepSpeed's files")
            stored = None
        if stored and not (fp32 and self.deepspeed and not stored.has_fp32):
            return stored
        if self.deepspeed is None:
            weights.weight_files(self.folder)  # which says what is there instead
            raise InputError(
                f"{self.folder} holds weights in no format that is read here; found: {weights.listing(self.folder)}",
                "give a checkpoint with safetensors, or one of DeepSpeed",
            )
        return Partitions(self.deepspeed, trust_pickle)

    def _stored(self) -> Stored | None:
        if not weights.has_weights(self.folder):
            return None
        files = weights.weight_files(self.folder)
        return Stored(files) if all(file.suffix == ".safetensors" for file in files) else None

    def check(self, files: Iterable[Path]) -> None:
        """InputError unless the files that will be read are, byte by byte, what the manifest says."""
        if self.files is None:
            return
        names = [file.relative_to(self.folder).as_posix() for file in files]
        for name, now in manifest.digest(self.folder, names).items():
            if self.files.get(name) != now:
                why = "is not what was saved: its checksum differs" if name in self.files else "is not in its manifest"
                raise _incomplete(self.folder, f"{name} {why}")


def find(asked: str) -> Found:
    """The checkpoint that `asked` names, by its own folder, the run's, or DeepSpeed's below it. Raises InputError."""
    path = Path(asked).expanduser()
    if not path.is_dir():
        raise _no_folder(asked, path)
    path = path.absolute()
    if partitions.is_folder(path):
        return _checkpoint(path.parent, path)
    if (path / "latest").is_file() or not _numbered(path):
        return _checkpoint(path)
    return _of_run(path)


def _of_run(output: Path) -> Found:
    """The newest complete checkpoint in a run's folder; the model that it saved at its end, where that is newer."""
    run = record.read(output)
    ended = [event["step"] for event in (run or {}).get("history", []) if event["event"] == "finished"]
    if run and run["status"] == "finished" and not ended:  # BERT's record has no history, but its losses
        ended = [run["losses"][-1]["step"]]
    newest, lines = manifest.newest(output, checksums=False)
    if weights.has_weights(output) and ended and ended[-1] > (newest.step if newest else -1):
        return Found(output, notes=[f"{output}: the model that the run saved at its end, step {ended[-1]}"])
    if newest:
        found = _checkpoint(newest.path)
    elif run:
        raise InputError(f"{output} holds no complete checkpoint:\n  " + "\n  ".join(lines), "let the run save one")
    else:
        found = _checkpoint(_numbered(output)[0])
    found.notes += [*lines] if newest else []
    found.notes.append(f"{output}: its newest complete checkpoint is {found.folder.name}")
    return found


def _checkpoint(folder: Path, tag: Path | None = None) -> Found:
    files, also = None, []
    ours = (folder / record.FILE).exists() or (folder.parent / record.FILE).exists()
    if folder.name.startswith("checkpoint-") and (ours or (folder / manifest.MANIFEST).exists()):
        also.append(folder.parent)
        files = _manifest_of(folder)
    tag = tag or _tag(folder)
    if not (tag or weights.has_weights(folder)):
        raise InputError(
            f"CHECKPOINT={folder} is no checkpoint: it holds no weights and no folder of DeepSpeed's; "
            f"found: {weights.listing(folder)}",
            "give a checkpoint's folder, or the run's folder that holds it",
        )
    return Found(folder, tag, files, also)


def _manifest_of(folder: Path) -> dict[str, dict[str, Any]]:
    """What the manifest says of each file."""
    try:
        return manifest.read(folder, checksums=False).files
    except manifest.Damaged as why:
        raise _incomplete(folder, str(why)) from why


def _incomplete(folder: Path, why: str) -> InputError:
    others = [one.name for one in _numbered(folder.parent) if one != folder and (one / manifest.MANIFEST).exists()]
    fix = f"take another: {weights.shortened(others)}" if others else "copy it again; the run holds no other"
    return InputError(f"{folder} is no complete checkpoint: {why}", fix)


def _tag(folder: Path) -> Path | None:
    """DeepSpeed's folder in a checkpoint: the one that `latest` names, or the only one."""
    if (folder / "latest").is_file():
        name = (folder / "latest").read_text(encoding="utf-8", errors="replace").strip()
        if not name or "/" in name or not (folder / name).is_dir():
            raise _incomplete(folder, f"its file `latest` names {name!r}, which is not there")
        return folder / name
    tags = [inner for inner in folder.iterdir() if inner.is_dir() and partitions.is_folder(inner)]
    if len(tags) > 1:
        names = weights.shortened(sorted(tag.name for tag in tags))
        raise InputError(f"{folder} holds several of DeepSpeed's folders: {names}", "give the one that is meant")
    return tags[0] if tags else None


def _numbered(output: Path) -> list[Path]:
    return manifest.folders(output)


def _no_folder(asked: str, path: Path) -> InputError:
    if path.exists():
        return InputError(f"CHECKPOINT={asked} is a file", "give the folder of the checkpoint that it is in")
    near = path.parent
    names = [one.name for one in near.iterdir() if one.is_dir()] if near.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    similar = f"did you mean {', '.join(str(near / name) for name in close)}?" if close else "mend the path"
    return InputError(f"CHECKPOINT={asked}: no such folder", similar)
