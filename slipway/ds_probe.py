"""Finds out which keys a ds_config may hold, by running DeepSpeed's own DeepSpeedConfig on probes.

DeepSpeed ignores unknown top-level keys, and documents no list of them. So its DeepSpeedConfig is given a
dictionary that notes which keys it is asked for, section by section; a pydantic model is read by its fields.
slipway.ds_schema runs this in a process of its own: `python -m slipway.ds_probe FILE`.
"""

import enum
import inspect
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops import adagrad, adam, lamb, lion
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BaseModel, ValidationError

from slipway.ds_schema import Node

# What DeepSpeed's code does not tell: keys whose default is None, and bounds that it checks late or never.
_COUNT = {"types": ["integer"], "ge": 1}
_DTYPE = {"types": ["string", "null"], "choices": ["fp16", "bf16", "fp32"]}
_TOLD = {
    "train_batch_size": _COUNT,
    "train_micro_batch_size_per_gpu": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "steps_per_print": {"types": ["integer", "null"], "ge": 1},
    "vocabulary_size": {"types": ["integer", "null"], "ge": 1},
    "gradient_clipping": {"types": ["number"], "ge": 0, "default": 1.0},
    "communication_data_type": _DTYPE,
    "seq_parallel_communication_data_type": _DTYPE,
    "log_level": {"types": ["string", "null"]},
    "fp16.loss_scale": {"types": ["number"], "ge": 0},
    "activation_checkpointing.number_checkpoints": {"types": ["integer", "null"], "ge": 1},
    "optimizer.type": {"types": ["string"]},
    "optimizer.params": {"types": ["object"], "open": True},
    "scheduler.type": {"types": ["string"]},
    "scheduler.params": {"types": ["object"], "open": True},
    # Read by deepspeed.initialize before there is a DeepSpeedConfig.
    "data_parallel_size": _COUNT,
}
# "type" decides whether DeepSpeed looks at the rest of these sections.
_SEEDS = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}}
_RATES = ("warmup_max_lr", "cycle_min_lr", "cycle_max_lr")  # no default, so no type to see
_TOLD_PARAMETERS = {
    "total_num_steps": _COUNT,
    "warmup_num_steps": _COUNT,
    "warmup_type": {"types": ["string"], "choices": ["log", "linear"], "default": "log"},
}
_PROBE = "__probe__"


class _Asked(dict):
    """A config section that notes which keys DeepSpeed asks it for, and with which default."""

    def __init__(self, filled: dict[str, Any]):
        super().__init__(filled)
        self.keys_asked: dict[str, Any] = {}
        self.read_whole = False

    def _note(self, key: str, default: Any = None) -> None:
        if self.keys_asked.get(key) is None:
            self.keys_asked[key] = default

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key, default)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._note(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def keys(self) -> Any:
        return self  # so that `in section.keys()` comes to __contains__

    def items(self) -> Any:
        self.read_whole = True
        return super().items()

    def __copy__(self) -> "_Asked":
        self.read_whole = True
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Asked":
        self.read_whole = True
        return self


def _run(path: tuple[str, ...], value: Any) -> Exception | None:
    """What DeepSpeedConfig raises on a config that holds `value` at `path`."""
    root: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    section = root
    for key in path[:-1]:
        section[key] = {}
        section = section[key]
    section[path[-1]] = value
    try:
        DeepSpeedConfig(root)
    except Exception as error:  # a section where it wants a number can fail in any way; the caller looks at which
        return error
    return None


def _explore(path: tuple[str, ...], default: Any) -> Node:
    """The node at `path`, whose key DeepSpeed asks for with this default."""
    dotted = ".".join(path)
    section = _Asked({_PROBE: 1, **_SEEDS.get(dotted, {})})
    error = _run(path, section)
    if isinstance(error, DeepSpeedConfigError) and all(
        isinstance(_run(path, value), DeepSpeedConfigError) for value in (True, 1, "", None, [])
    ):
        return {"types": ["any"], "removed": str(error)}
    if dotted in _TOLD:
        return _TOLD[dotted]
    if "enabled" in section.keys_asked:  # some sections are read further where they are switched on
        dict.__setitem__(section, "enabled", True)
        _run(path, section)
    if section.read_whole:
        return {"types": ["any" if default is None else "object"], "open": True}
    keys = _fields_of(error) if isinstance(error, ValidationError) else {}
    keys |= {key: _explore((*path, key), value) for key, value in section.keys_asked.items()}
    keys |= {key: {**keys.get(key, {}), **told} for key, told in _told_below(dotted).items()}
    return {"types": ["object"], "keys": keys} if keys else _by_value(default)


def _told_below(above: str) -> dict[str, Node]:
    return {key.rpartition(".")[2]: node for key, node in _TOLD.items() if key.rpartition(".")[0] == above}


def _by_value(value: Any) -> Node:
    """A leaf of the type of its default. None, "auto" and objects tell nothing."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list"}
    if type(value) not in kinds or value == "auto":
        return {"types": ["any"], **({"default": value} if value == "auto" else {})}
    return {"types": [kinds[type(value)]], "default": value}


def _fields_of(error: ValidationError) -> dict[str, Node]:
    """The keys of the section that a pydantic model refused a probe in."""
    models = [DeepSpeedConfigModel]
    for model in models:
        models += model.__subclasses__()
    node = _model(next(model for model in models if model.__name__ == error.title))
    for key in error.errors()[0]["loc"][:-1]:
        node = node["keys"][key]
    return node["keys"]


def _model(model: Any) -> Node:
    """The node of a pydantic model; a field with an alias goes by both names."""
    keys: dict[str, Node] = {}
    for name, field in model.model_fields.items():
        node = _annotation(field.annotation)
        for bound in field.metadata:
            limits = {key: getattr(bound, key, None) for key in ("ge", "gt", "le", "lt")}
            node.update({key: limit for key, limit in limits.items() if limit is not None})
        if isinstance(field.default, bool | int | float | str):
            node["default"] = getattr(field.default, "value", field.default)
        extra = field.json_schema_extra or {}
        if extra.get("deprecated"):
            new = extra.get("new_param", "")
            known = model.model_fields.get(new)
            node["deprecated"] = known.alias if known is not None and known.alias else new
        keys[name] = keys[field.alias or name] = node
    return {"types": ["object"], "keys": keys}


def _annotation(kind: Any) -> Node:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        parts = [_annotation(part) for part in typing.get_args(kind)]
        merged = {key: value for part in parts for key, value in part.items()}
        return {**merged, "types": [name for part in parts for name in part["types"]]}
    if origin is typing.Literal:
        return {"types": ["string"], "choices": list(typing.get_args(kind))}
    kind = origin or kind
    if not inspect.isclass(kind):
        return {"types": ["any"]}
    if issubclass(kind, BaseModel):
        return _model(kind)
    if issubclass(kind, enum.Enum):
        return {
            "types": ["integer" if issubclass(kind, int) else "string"],
            "choices": [one.value for one in kind],
        }
    if issubclass(kind, dict):
        return {"types": ["object"], "open": True}
    names = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}
    names |= {list: "list", tuple: "list", type(None): "null"}
    return {"types": [names.get(kind, "any")]}


def _parameters(*classes: Any, also: tuple[str, ...] = ()) -> Node:
    """The node of the params that these optimizers or schedulers take; the first default of a name counts."""
    keys: dict[str, Node] = {}
    for one in classes:
        for name, parameter in list(inspect.signature(one.__init__).parameters.items())[2:]:
            if parameter.kind is not parameter.VAR_KEYWORD and name not in keys:
                default = None if parameter.default is parameter.empty else parameter.default
                node = _by_value(list(default) if isinstance(default, tuple) else default)
                if name in _RATES or node["types"] == ["number"] or (default == 0 and type(default) is int):
                    node = {**node, "types": ["number", "list"]}  # a list: one value a parameter group
                keys[name] = {**node, **_TOLD_PARAMETERS.get(name, {})}
    keys.update({name: {"types": ["any"]} for name in also})
    return {"types": ["object"], "keys": keys}


def _optimizers() -> dict[str, Node]:
    found: dict[str, Node] = {name: {"types": ["object"], "open": True} for name in DEEPSPEED_OPTIMIZERS}
    popped = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")  # by the engine, before it builds an Adam
    found["adam"] = found["adamw"] = _parameters(adam.FusedAdam, adam.DeepSpeedCPUAdam, torch.optim.AdamW, also=popped)
    found["adagrad"] = _parameters(adagrad.DeepSpeedCPUAdagrad, torch.optim.Adagrad)
    found["lion"] = _parameters(lion.FusedLion, lion.DeepSpeedCPULion)
    found["lamb"] = _parameters(lamb.FusedLamb)
    return found | _torch_classes(torch.optim, torch.optim.Optimizer, found)


def _schedulers() -> dict[str, Node]:
    module = torch.optim.lr_scheduler
    found = {name: _parameters(getattr(lr_schedules, name)) for name in lr_schedules.VALID_LR_SCHEDULES}
    return found | _torch_classes(module, module.LRScheduler, found)


def _torch_classes(module: Any, base: Any, known: dict[str, Node]) -> dict[str, Node]:
    """DeepSpeed falls back on torch's own class of that name."""
    classes = [one for one in vars(module).values() if inspect.isclass(one) and issubclass(one, base)]
    return {one.__name__: _parameters(one) for one in classes if one is not base and one.__name__.lower() not in known}


def _build() -> Node:
    root = _Asked({"train_micro_batch_size_per_gpu": 1})
    DeepSpeedConfig(root)
    return {
        "types": ["object"],
        "keys": {key: _explore((key,), default) for key, default in root.keys_asked.items()} | _told_below(""),
        "optimizers": _optimizers(),
        "schedulers": _schedulers(),
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_build()), encoding="utf-8")
