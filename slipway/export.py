"""A checkpoint as plain safetensors: read one tensor at a time, written one shard at a time, complete or not there.

    export.run(export.Asked(checkpoint="outputs/zero3", output=Path("out"), dtype="bf16"))

Memory: one shard is held, and the pages of the checkpoint that it was read from, which the system can take back.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from slipway import export_config, export_source, hub, memory, merged, models, weights
from slipway.errors import InputError
from slipway.export_source import Found, Stored
from slipway.partitions import Partitions

Source = Stored | Partitions | merged.Merged
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Asked:
    """dtype: auto (as the run saves), or one of DTYPES. shard_bytes: the most that a file of weights holds.

    merge: an adapter is merged into its base.
    config_from: a model whose config and tokenizer go with the weights, where the checkpoint has none.
    """

    checkpoint: str
    output: Path
    dtype: str = "auto"
    shard_bytes: int = 5 * 10**9
    merge: bool = False
    config_from: str | None = None
    trust_pickle: bool = False


@dataclass
class Result:
    """What was written. dtypes: of the weights; source: what was read; notes: what was chosen, a line each."""

    tensors: int
    parameters: int
    bytes: int
    files: int
    dtypes: list[str]
    source: str
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Write:
    """One tensor to write: the name it is read by, its shape and its dtype in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def run(asked: Asked) -> Result:
    """Export what was asked; InputError, with nothing left behind, where that cannot be."""
    check_output(asked.output)
    found = export_source.find(asked.checkpoint)
    _refuse_without_effect(asked, found)
    source = found.weights(asked.dtype == "fp32", asked.trust_pickle)
    found.check(source.files())
    if not found.is_adapter:
        return _export(asked, found, source, export_config.find(found, asked.config_from))
    if not asked.merge:
        return _export(asked, found, source, None)
    with _merged(asked, found) as (source, config):
        return _export(asked, found, source, config)


def _export(asked: Asked, found: Found, source: Source, config: export_config.Config | None) -> Result:
    """`config`: None for an adapter that stays one."""
    writes = _writes(found, source, config, DTYPES.get(asked.dtype))
    total = sum(write.bytes for write in writes.values())
    check_room(asked.output, total)
    with written_whole(asked.output) as part:
        files = _write_shards(part, source, writes, asked.shard_bytes, config is None)
        if config is None:
            export_config.copy_adapter(found, part)
        else:
            config.write(part, _dtype(writes))
            weights.check_saved(part, config.config, config.model)
    if asked.dtype == "fp32" and any(source.tensors[write.name].dtype != torch.float32 for write in writes.values()):
        found.notes.append("fp32: the master weights" if source.has_fp32 else "fp32: widened, there is no fp32 copy")
    read = source.files()
    return Result(
        tensors=len(writes),
        parameters=sum(math.prod(write.shape) for write in writes.values()),
        bytes=total,
        files=files,
        dtypes=sorted({str(write.dtype).removeprefix("torch.") for write in writes.values()}),
        source=f"{read[0].parent} ({read[0].name}{f' and {len(read) - 1} more' if len(read) > 1 else ''})",
        notes=found.notes,
    )


def _refuse_without_effect(asked: Asked, found: Found) -> None:
    if asked.merge and not found.is_adapter:
        raise InputError(f"--merge: {found.folder} is no adapter but a whole model", "leave it out")
    if asked.config_from and found.is_adapter:
        raise InputError(
            f"--config_from has no effect on an adapter, which {found.folder} is",
            "leave it out; its base is named in adapter_config.json",
        )


@contextmanager
def _merged(asked: Asked, found: Found) -> Iterator[tuple[Source, export_config.Config]]:
    """An adapter in its base: one tensor at a time where it is plain LoRA, else in memory and by way of a folder."""
    model = models.resolve(str(found.folder))
    adapter = Stored(weights.weight_files(found.folder))
    if merged.plain(adapter) and model.base.kind != "adapter":
        folder = Path(model.base.path)
        if model.base.kind == "hub" and not folder.is_dir():
            folder = hub.download(model.base.path, model.base.revision)
        config = export_config.of_merged(folder, model)
        base = Stored(weights.weight_files(folder))
        yield merged.Merged(base, adapter, found.folder, config.model), config
        return
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    found.notes.append("this adapter is merged in memory: it is more than pairs of matrices on a whole base")
    with tempfile.TemporaryDirectory(prefix=f"{asked.output.name}.part-", dir=asked.output.parent) as folder:
        models.merge(found.folder, folder)
        whole = Found(Path(folder))
        yield whole.weights(fp32=False), export_config.find(whole, None)


def check_output(output: Path) -> None:
    """InputError where the folder to write is not free."""
    memory.check_writable(output)
    if output.is_dir() and any(output.iterdir()):
        raise InputError(f"OUTPUT {output} is not empty", "name another folder; nothing was changed")
    if output.is_mount():
        raise InputError(f"OUTPUT {output} is a mount point: it cannot appear as a whole", f"name {output}/model")


def check_room(output: Path, need: int) -> None:
    """InputError where the disk has no room for `need` bytes of weights."""
    free = memory.free_disk(output)
    if need > free:
        gib = memory.GIB
        raise InputError(f"no room in {output}: the export takes {need / gib:.3f} GiB, {free / gib:.3f} are free",
                         "name a folder on a larger disk, or --dtype bf16")  # fmt: skip


@contextmanager
def written_whole(output: Path) -> Iterator[Path]:
    """A folder beside `output` to write to, which takes its name at the end; on an error it is removed."""
    output = output.expanduser().absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{output.name}.part-", dir=output.parent))
    try:
        yield part
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o777 & ~mask)
        weights.let_others_read(part)
        part.rename(output)
    except OSError as error:
        raise InputError(f"OUTPUT {output} cannot be written: {error}", "free some room, or name another") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _writes(
    found: Found, source: Source, config: export_config.Config | None, dtype: torch.dtype | None
) -> dict[str, _Write]:
    """What is to be written under which name, in the model's order. Raises InputError where it is not the model."""
    if config is None:
        names = _adapter_names(found, source)
    else:
        names = _names(source, config)
        if isinstance(source, Partitions) and weights.stored_otherwise(config.model, config.config):
            raise InputError(
                f"{source.folder}: a {config.config.model_type} names weights otherwise in files than in modules",
                "export a checkpoint that has its safetensors: stage3_gather_16bit_weights_on_model_save true",
            )
        if dtype and getattr(config.config, "quantization_config", None):
            raise InputError("--dtype is not for quantized weights", "leave it out: they are written as they are")
    writes = {}
    for name, read_by in names.items():
        spec = source.tensors[read_by]
        to = dtype if dtype and spec.dtype.is_floating_point else spec.dtype
        writes[name] = _Write(read_by, spec.shape, to)
    shapes = {name: write.shape for name, write in writes.items()}
    if config is not None:
        weights.check_tensors(found.folder, shapes, config.config, config.model)
    return writes


def _dtype(writes: dict[str, _Write]) -> torch.dtype:
    """The one that most of the weights have; a buffer may have another."""
    parameters: dict[torch.dtype, int] = {}
    for write in writes.values():
        if write.dtype.is_floating_point:
            parameters[write.dtype] = parameters.get(write.dtype, 0) + math.prod(write.shape)
    return max(parameters, key=parameters.__getitem__)


def _names(source: Source, config: export_config.Config) -> dict[str, str]:
    """Name in the file -> name it is read by. Of tied weights one is written; both where the config ties them not."""
    known, tied = list(config.model.state_dict()), config.tied
    groups: dict[str, list[str]] = {name: [name] for name in source.tensors}
    for alias, name in source.aliases.items():
        groups.setdefault(name, [name]).append(alias)
    names = {}
    for read_by, group in groups.items():
        own = [name for name in group if name in known and name not in tied]
        names |= dict.fromkeys(own or group[:1], read_by)
    twice = [name for name in names if tied.get(name) in names]
    with source.opened() as read:
        for name in twice:
            if torch.equal(read(names[name]), read(names[tied[name]])):
                del names[name]
    order = {name: place for place, name in enumerate(known)}
    return dict(sorted(names.items(), key=lambda item: order.get(item[0], len(order))))


def _adapter_names(found: Found, source: Stored | Partitions) -> dict[str, str]:
    """As peft saves them: without the adapter's own name, and what was not trained left out."""
    if isinstance(source, Stored):
        return {name: name for name in source.tensors}
    saved = weights.headers(weights.weight_files(found.folder))
    names = {name.replace(".default.", "."): name for name in source.tensors}
    missing = [name for name in saved if name not in names]
    if missing:
        raise InputError(f"{source.folder} has no fp32 copy of {weights.shortened(missing)}", "leave --dtype fp32 out")
    return {name: names[name] for name in saved}


def _write_shards(part: Path, source: Source, writes: dict[str, _Write], shard_bytes: int, adapter: bool) -> int:
    """Writes the files of weights, and an index where they are several; how many they are."""
    meta = {name: torch.empty(write.shape, dtype=write.dtype, device="meta") for name, write in writes.items()}
    pattern = "adapter_model{suffix}.safetensors" if adapter else "model{suffix}.safetensors"
    size = max(shard_bytes, 1 + sum(write.bytes for write in writes.values())) if adapter else shard_bytes
    split = split_torch_state_dict_into_shards(meta, filename_pattern=pattern, max_shard_size=size)
    for file, names in split.filename_to_tensors.items():
        with source.opened() as read:  # anew for each shard: the pages of the last one are let go of
            shard = {name: _cast(name, read(writes[name].name), writes[name].dtype) for name in names}
        save_file(shard, part / file, metadata={"format": "pt"})
        del shard
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (part / weights.INDEXES[0]).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(split.filename_to_tensors)


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.to(dtype).contiguous()
    if dtype == torch.float16 and tensor.dtype != dtype and not cast.isfinite().all() and tensor.isfinite().all():
        raise InputError(
            f"{name} holds {tensor.abs().max():.3g}, and fp16 ends at 65504",
            "--dtype bf16, which reaches as far as fp32",
        )
    return cast
