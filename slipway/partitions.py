"""The weights in a DeepSpeed checkpoint, put together out of the ranks' parts one tensor at a time.

    source = partitions.Partitions(Path("outputs/zero3/checkpoint-24/global_step24"))
    source.tensors["model.norm.weight"]                # shape, and dtype that the model was trained in
    with source.opened() as read:
        weight = read("model.norm.weight")             # the fp32 master copy

How the parts lie, from DeepSpeed 0.19 (utils/zero_to_fp32.py; runtime/zero/stage_1_and_2.py and stage3.py). ZeRO 1, 2:
a group's parameters, each flat and perhaps padded, stand one after the other; each rank holds a cut of that line.
ZeRO 3: each parameter is cut into as many pieces as there are ranks, the last padded; a rank's pieces stand one after
the other. DeepSpeed's own converter does the same, but for ZeRO 1 and 2 with all of the model in memory at once.
"""

import contextlib
import math
import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipway import pickles
from slipway.errors import InputError
from slipway.weights import shortened

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_AGAIN = "copy the whole checkpoint again, or take another one"


@dataclass(frozen=True)
class Spec:
    """A tensor that can be read: its shape, and the dtype that the run's own saved model has it in."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Piece:
    """Elements [start, stop) of a flat tensor: that of `key` in `file`."""

    file: Path
    key: Hashable
    start: int
    stop: int


class Partitions:
    """A folder such as global_step24. tensors: by name, tied ones once; aliases: the other names of tied ones.

    has_fp32: whether the fp32 master weights are there. firsts: rank 0's files, of the optimizer and of the model.

    Raises InputError where a rank's file is missing or broken, and for models that are divided otherwise than by ZeRO.
    """

    def __init__(self, folder: Path, trust_pickle: bool = False):
        self.folder, self._trust = folder, trust_pickle
        self.tensors: dict[str, Spec] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        optimizer, model = _by_rank(folder, _OPTIMIZER), _by_rank(folder, _MODEL)
        if not model:
            raise InputError(f"{folder} holds no *_model_states.pt: rank 0's part is missing", _AGAIN)
        first = self._load(model[min(model)])
        if not isinstance(first, dict) or not isinstance(first.get("module"), dict):
            raise InputError(f"{model[min(model)]} is no model file of DeepSpeed: it has no module", _AGAIN)
        self._module = first["module"]
        self.aliases: dict[str, str] = dict(first.get("shared_params") or {})
        self.has_fp32 = bool(optimizer)
        self.firsts = [files[min(files)] for files in (optimizer, model) if files]  # of the optimizer, of the model
        if optimizer:
            self._add_trained(optimizer, [dict(group) for group in first["param_shapes"]])
            self._add_frozen(model, first)
        self._add_stored(model[min(model)])
        del self._module

    def trained(self) -> list[str]:
        """Names of the parameters that were trained, whose moments are there too."""
        return [name for name, pieces in self._pieces.items() if pieces[0].key[0] == "fp32"]

    def files(self) -> list[Path]:
        """The files that are read from."""
        return sorted({piece.file for pieces in self._pieces.values() for piece in pieces})

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[..., torch.Tensor]]:
        """A function that reads a tensor by its name; with "exp_avg" or "exp_avg_sq" besides, Adam's moment of it.

        On leaving, the files' mapped pages are let go of.
        """
        files: dict[Path, dict[Hashable, torch.Tensor]] = {}

        def part(piece: _Piece, kind: str) -> torch.Tensor:
            if piece.file not in files:
                files[piece.file] = _flats(self._load(piece.file))
            return files[piece.file][kind or piece.key[0], piece.key[1]][piece.start : piece.stop]

        def read(name: str, kind: str = "") -> torch.Tensor:
            shape = self.tensors[name].shape
            return torch.cat([part(piece, kind) for piece in self._pieces[name]])[: math.prod(shape)].view(shape)

        try:
            yield read
        finally:
            files.clear()

    def _load(self, file: Path) -> Any:
        return pickles.load(file, self._trust)

    def _add(self, name: str, shape: tuple[int, ...], pieces: list[_Piece]) -> None:
        trained_in = self._module.get(name)
        self.tensors[name] = Spec(tuple(shape), torch.float32 if trained_in is None else trained_in.dtype)
        self._pieces[name] = pieces

    def _add_trained(self, files: dict[int, Path], groups: list[dict[str, Any]]) -> None:
        """The trained parameters: their fp32 copies lie in the optimizer's files."""
        states = {rank: self._load(file).get("optimizer_state_dict") or {} for rank, file in sorted(files.items())}
        first = next(iter(states.values()))
        if "zero_stage" not in first:
            raise InputError(f"{files[min(files)]} is no optimizer file of ZeRO", "give a checkpoint of ZeRO 1, 2 or 3")
        count = first["partition_count"]
        world = max(count) if isinstance(count, list) else count
        _all_there(files, world)
        flats = {rank: [flat.numel() for flat in _fp32(state)] for rank, state in states.items()}
        if len({len(sizes) for sizes in flats.values()}) > 1:
            raise InputError(f"{self.folder}: the ranks' files are not of one save", _AGAIN)
        if int(first["zero_stage"]) == 3:
            self._cut_by_parameter(files, groups, flats[0], world)
        else:
            paddings = first.get("param_alignment_paddings") or [None] * len(groups)
            for number, (shapes, padding) in enumerate(zip(groups, paddings, strict=True)):
                line = [(files[rank], ("fp32", number), flats[rank][number]) for rank in range(world)]
                self._cut_by_rank(shapes, line, padding or [0] * len(shapes), 2 * world)

    def _cut_by_rank(self, shapes: dict[str, Any], line: list[tuple], padding: list[int], align: int) -> None:
        """ZeRO 1, 2: `line` is the ranks' cuts (file, key, length) of one group, in order."""
        at = 0
        for (name, shape), pad in zip(shapes.items(), padding, strict=True):
            self._add(name, shape, _span(line, at, at + math.prod(shape)))
            at += math.prod(shape) + pad
        # The line's end is padded for the ranks and for the collectives: to a multiple of twice the ranks.
        self._must_fit(*(math.ceil(n / align) for n in (at, sum(length for _, _, length in line))))

    def _cut_by_parameter(self, files: dict[int, Path], groups: list[dict], sizes: list[int], world: int) -> None:
        """ZeRO 3: sizes are those of a rank's flat tensors, which are alike on all ranks."""
        at = 0
        for name, shape in (item for group in groups for item in group.items()):
            share = math.ceil(math.prod(shape) / world)
            lines = [[(files[rank], ("fp32", g), size) for g, size in enumerate(sizes)] for rank in range(world)]
            self._add(name, shape, [piece for line in lines for piece in _span(line, at, at + share)])
            at += share
        self._must_fit(at, sum(sizes))

    def _must_fit(self, need: int, have: int) -> None:
        if need != have:
            raise InputError(f"{self.folder}: its parts do not add up to its parameters: the files are not of one save "
                             f"({need:,} and {have:,})", _AGAIN)  # fmt: skip

    def _add_frozen(self, files: dict[int, Path], first: dict[str, Any]) -> None:
        """Parameters that were not trained: in the model files, under ZeRO 3 cut by parameter too."""
        shapes = first.get("frozen_param_shapes") or {}
        divided = any(
            first["frozen_param_fragments"][name].numel() < math.prod(shape) for name, shape in shapes.items()
        )
        if divided:
            _all_there(files, first["dp_world_size"])
        for name, shape in shapes.items():
            share = first["frozen_param_fragments"][name].numel()
            ranks = sorted(files) if divided else [min(files)]
            self._add(name, shape, [_Piece(files[rank], ("frozen", name), 0, share) for rank in ranks])

    def _add_stored(self, file: Path) -> None:
        """What lies whole in a model file: buffers, what ZeRO 1 leaves frozen, all of a model that is not divided."""
        for name, tensor in self._module.items():
            if name not in self._pieces and name not in self.aliases and tensor.numel():
                self._add(name, tuple(tensor.shape), [_Piece(file, ("module", name), 0, tensor.numel())])


def is_folder(folder: Path) -> bool:
    """Whether this is the folder that DeepSpeed itself wrote, such as global_step24."""
    return bool(_by_rank(folder, _MODEL) or _by_rank(folder, _OPTIMIZER))


def _by_rank(folder: Path, pattern: re.Pattern) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for file in sorted(folder.glob("*_states.pt")):
        match = pattern.fullmatch(file.name)
        if match and int(match[2]):
            raise InputError(
                f"{file} is of a model that tensor or pipeline parallelism divides", "export is for ZeRO's partitions"
            )
        if file.name.startswith(("layer_", "expp_")):
            raise InputError(f"{file} is of experts that are divided among ranks", "export is for ZeRO's partitions")
        if match:
            found[int(match[1] or 0)] = file
    return found


def _all_there(files: dict[int, Path], world: int) -> None:
    """InputError unless there is one file of each rank."""
    known = next(iter(files.values()))
    missing = [known.name.replace(f"rank_{min(files)}_mp", f"rank_{r}_mp") for r in range(world) if r not in files]
    if missing:
        raise InputError(f"{known.parent}: {len(missing)} of {world} ranks' files are missing: {shortened(missing)}",
                         _AGAIN)  # fmt: skip
    if len(files) > world:
        raise InputError(
            f"{known.parent} holds {len(files)} files like {known.name}, but was saved by {world} ranks",
            "remove the files that an earlier save left",
        )


def _fp32(state: dict[str, Any]) -> list[torch.Tensor]:
    """The flat fp32 tensors of one rank, one a group."""
    return state.get("fp32_flat_groups") or state.get("single_partition_of_fp32_groups") or []


def _flats(content: dict[str, Any]) -> dict[Hashable, torch.Tensor]:
    """All tensors of one file, flat, by the keys of _Piece."""
    found: dict[Hashable, torch.Tensor] = {}
    state = content.get("optimizer_state_dict") or {}
    for number, flat in enumerate(_fp32(state)):
        found["fp32", number] = flat
    moments = (state.get("optimizer_state_dict") or state.get("base_optimizer_state") or {}).get("state", {})
    for number, values in moments.items():
        found |= {(kind, number): values[kind] for kind in ("exp_avg", "exp_avg_sq") if kind in values}
    for kind, key in (("frozen", "frozen_param_fragments"), ("module", "module")):
        found |= {(kind, name): tensor.flatten() for name, tensor in (content.get(key) or {}).items()}
    return found


def _span(line: list[tuple[Path, Hashable, int]], start: int, stop: int) -> list[_Piece]:
    """The pieces of [start, stop) of tensors (file, key, length) that stand one after the other."""
    pieces, begin = [], 0
    for file, key, length in line:
        low, high = max(start, begin), min(stop, begin + length)
        if low < high:
            pieces.append(_Piece(file, key, low - begin, high - begin))
        begin += length
    return pieces
