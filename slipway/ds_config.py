"""Reads a DeepSpeed JSON and checks it without DeepSpeed, which ignores misspelled top-level keys in silence.

    config = ds_config.load("zero3")       # ours by name, or a path; InputError with file, line and column
    ds_config.check(config, "zero3.json")  # InputError with every unknown key, wrong type and impossible pair
    errors, notices = ds_config.conflicts(config, "zero3.json", args, world_size)

`conflicts` (slipway.ds_conflicts) and `resolve` (slipway.ds_resolve) hold it against the run's arguments.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipway.ds_conflicts import conflicts
from slipway.ds_resolve import precision_of, resolve
from slipway.ds_schema import HF_FILLS, Node, at, params_of, schema
from slipway.errors import InputError, nearest

__all__ = [
    "check",
    "check_accelerate_keys",
    "conflicts",
    "facts_of",
    "find",
    "find_problems",
    "load",
    "nvme_folders",
    "precision_of",
    "resolve",
    "set_nvme_path",
]

FOLDER = Path(__file__).resolve().parent.parent / "ds_configs"
HAS_CPU_VERSION = ("adam", "adamw", "adagrad", "lion")
OFFLOADS = ("offload_optimizer", "offload_param")


def find(name: str | Path) -> Path:
    """The file that `name` means: a path, or one of ours: "zero3", "zero3.json" or "ds_configs/zero3.json".

    Raises InputError that lists the JSON files there are.
    """
    path = Path(name).expanduser()
    for candidate in (path, FOLDER / path, FOLDER / f"{path}.json", FOLDER.parent / path):
        if candidate.is_file():
            return candidate
    ours = ", ".join(sorted(file.stem for file in FOLDER.glob("*.json")))
    folder = path if path.is_dir() else path.parent
    there = ", ".join(sorted(file.name for file in folder.glob("*.json"))) if folder.is_dir() else ""
    found = "is a folder" if path.is_dir() else "does not exist"
    raise InputError(
        f"ds_config {name} {found}", f"ours: {ours}" + (f"; JSON files in {folder}: {there}" if there else "")
    )


def load(name: str | Path) -> dict[str, Any]:
    """The config in the file that `find` finds.

    Raises InputError if it is empty, no UTF-8, no JSON, no object, or has a key twice.
    """
    path = find(name)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise InputError(
            f"{path}:{line}: byte {error.object[error.start]:#04x} is not UTF-8", "save it as UTF-8"
        ) from error
    if not text.strip():
        raise InputError(f"{path} is empty", "copy one of ds_configs/")
    try:
        config = json.loads(text, object_pairs_hook=lambda pairs: _once_each(pairs, path, text))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}:{error.lineno}:{error.colno}: no valid JSON ({error.msg})",
            "JSON has no comments, no comma after a last entry, and double quotes only",
        ) from error
    except RecursionError:
        raise InputError(f"{path} is nested too deep to be a ds_config", "copy one of ds_configs/") from None
    if not isinstance(config, dict):
        raise InputError(f"{path} holds {_describe(config)}, expected an object", "copy one of ds_configs/")
    return config


def _once_each(pairs: list[tuple[str, Any]], path: Path, text: str) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            quoted = re.compile(re.escape(json.dumps(key)) + r"\s*:")
            lines = [str(number) for number, line in enumerate(text.splitlines(), 1) if quoted.search(line)]
            raise InputError(
                f'{path}: key "{key}" stands twice in one object (it is on lines {", ".join(lines)})',
                "keep one of them; the last one would win in silence",
            )
    return dict(pairs)


def check(config: dict[str, Any], where: str | Path) -> None:
    """Raise one InputError with every problem of the config; `where` is what its message calls the file."""
    problems = find_problems(config, where)
    if problems:
        raise InputError("\n  ".join(problems), f"correct {where}")


def find_problems(config: dict[str, Any], where: str | Path = "ds_config") -> list[str]:
    """A line for each key that DeepSpeed would ignore, refuse late or misread, and each impossible pair."""
    problems = list(_lint(config, schema(), ())) or list(_rules(config))
    return [f"{where}: {problem}" for problem in problems]


def _lint(section: dict[str, Any], node: Node, path: tuple[str, ...]) -> Iterator[str]:
    for key, value in section.items():
        child, here = node["keys"].get(key), (*path, key)
        if child is None:
            yield f"key {'.'.join(here)} is unknown to DeepSpeed{_where_to(key, node)}"
        elif here[1:] == ("params",) and isinstance(value, dict):
            yield from _value(value, params_of(path[0], str(section.get("type"))), here)
        else:
            yield from _value(value, child, here)


def _where_to(key: str, node: Node) -> str:
    """The place where this key would be right, else the nearest key here."""
    places = [".".join(path) for path in _places(key, schema(), ())]
    return f", it belongs at {places[0]}" if len(places) == 1 else nearest(key, node["keys"])


def _places(key: str, node: Node, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, child in node.get("keys", {}).items():
        if name == key:
            yield (*path, name)
        yield from _places(key, child, (*path, name))


def _value(value: Any, node: Node, path: tuple[str, ...]) -> Iterator[str]:
    key = f"key {'.'.join(path)}"
    if "removed" in node:
        yield f"{key}: {node['removed']}"
    elif "deprecated" in node:
        new = node["deprecated"]
        yield f"{key} is deprecated; write {_example(new)} instead"
    elif value == "auto":
        if ".".join(path) not in HF_FILLS and node.get("default") != "auto":
            default = f" (DeepSpeed's default is {json.dumps(node['default'])})" if "default" in node else ""
            yield f'{key}: "auto", but Hugging Face fills in nothing here; write a value or drop it{default}'
    elif not _is_a(value, node["types"]):
        yield f"{key}: expected {_expected(node, path)}, found {_describe(value)}"
    elif isinstance(value, dict):
        yield from () if node.get("open") or "keys" not in node else _lint(value, node, path)
    elif "choices" in node and value is not None and value not in node["choices"]:
        near = nearest(value, node["choices"]) if isinstance(value, str) else ""
        yield f"{key}: expected {_expected(node, path)}, found {_describe(value)}{near}"
    elif isinstance(value, int | float) and not _within(value, node):
        yield f"{key}: expected {_expected(node, path)}, found {_describe(value)}"


def _example(key: str) -> str:
    return f'"{key}": {{"device": "cpu"}}' if key in OFFLOADS else key


def _is_a(value: Any, types: list[str]) -> bool:
    if isinstance(value, bool):
        found = {"boolean"}
    elif isinstance(value, int | float):  # JSON has no integer with an exponent: 2e8 is read as 200000000.0
        found = {"number", "integer"} if float(value).is_integer() else {"number"}
    else:
        found = {{dict: "object", list: "list", str: "string", type(None): "null"}[type(value)]}
    return "any" in types or not found.isdisjoint(types)


def _within(value: float, node: Node) -> bool:
    low = value >= node.get("ge", value) and ("gt" not in node or value > node["gt"])
    return low and value <= node.get("le", value) and ("lt" not in node or value < node["lt"])


def _expected(node: Node, path: tuple[str, ...]) -> str:
    if "choices" in node:
        kind = "one of " + ", ".join(json.dumps(choice) for choice in node["choices"])
    else:
        kind = " or ".join(node["types"]).replace("boolean", "true or false")
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = " and ".join(f"{sign} {node[name]}" for name, sign in signs.items() if name in node)
    return " ".join(filter(None, (kind, limits))) + (' or "auto"' if ".".join(path) in HF_FILLS else "")


def _describe(value: Any) -> str:
    names = {dict: "an object", list: "a list", type(None): "null"}
    if type(value) in names:
        return names[type(value)]
    kind = {bool: "boolean", int: "integer", float: "number", str: "string"}[type(value)]
    return f"{kind} {json.dumps(value)}"


def _rules(config: dict[str, Any]) -> Iterator[str]:
    """What no single key tells. Runs on a config whose keys and types are right."""
    zero = config.get("zero_optimization")
    if zero is None:
        yield "section zero_optimization is missing, and accelerate refuses a ds_config without it"
    elif "stage" not in zero:
        yield "key zero_optimization.stage is missing: DeepSpeed would take 0 and shard nothing"
    else:
        yield from _offload_rules(config, zero)
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & config.keys():
        yield 'there is neither train_batch_size nor train_micro_batch_size_per_gpu; write "auto"'
    if at(config, "fp16.enabled") is True and at(config, "bf16.enabled") is True:
        yield "fp16.enabled and bf16.enabled are both true; keep one"
    for section in ("optimizer", "scheduler"):
        known = schema()[f"{section}s"]
        kind = at(config, f"{section}.type")
        if section in config and kind is None:
            yield f"key {section}.type is missing"
        elif kind and kind not in known and not (section == "optimizer" and kind.lower() in known):
            yield f'key {section}.type: neither DeepSpeed nor torch has "{kind}"{nearest(kind, known)}'
    if "max_grad_norm" in at(config, "optimizer.params", {}):
        yield "key optimizer.params.max_grad_norm: DeepSpeed takes gradient_clipping, at the top, instead"


def _offload_rules(config: dict[str, Any], zero: dict[str, Any]) -> Iterator[str]:
    stage = zero["stage"]
    for section in OFFLOADS:
        key, device = f"zero_optimization.{section}", facts_of(config)[section]
        needed = 3 if device == "nvme" or section == "offload_param" else 1
        if device != "none" and stage < needed:
            yield f"{key} to {device} needs stage {needed}, stage is {stage}"
        if device == "nvme" and not zero[section].get("nvme_path"):
            yield f'{key}: device "nvme" needs an nvme_path; write it, or pass --nvme_path FOLDER'
    if at(zero, "offload_optimizer.ratio", 1) < 1 and stage != 3:
        yield f"key zero_optimization.offload_optimizer.ratio below 1 needs stage 3, stage is {stage}"
    kind, forced = at(config, "optimizer.type"), config.get("zero_force_ds_cpu_optimizer", True)
    offloaded = facts_of(config)["offload_optimizer"] != "none"
    if kind and forced and offloaded and kind.lower() not in HAS_CPU_VERSION:
        yield (
            f'key optimizer.type: "{kind}" has no CPU version in DeepSpeed, which offload_optimizer needs;'
            " take AdamW, or drop offload_optimizer"
        )


def nvme_folders(config: dict[str, Any]) -> dict[str | None, list[str]]:
    """The offload sections whose device is "nvme", by their nvme_path."""
    folders: dict[str | None, list[str]] = {}
    for section in OFFLOADS:
        if facts_of(config)[section] == "nvme":
            folders.setdefault(config["zero_optimization"][section].get("nvme_path"), []).append(section)
    return folders


def set_nvme_path(config: dict[str, Any], path: str) -> None:
    """Write `path` into each offload section whose device is "nvme"; InputError if there is none."""
    sections = [section for some in nvme_folders(config).values() for section in some]
    if not sections:
        raise InputError(
            f"nvme_path {path} was given, but this ds_config offloads nothing to NVMe",
            "drop it, or take ds_configs/zero3_nvme.json",
        )
    for section in sections:
        config["zero_optimization"][section]["nvme_path"] = str(path)


def facts_of(config: dict[str, Any] | None) -> dict[str, Any]:
    """What a run is held to: zero_stage (0 to 3), offload_optimizer and offload_param (none, cpu or nvme)."""
    zero = (config or {}).get("zero_optimization", {})
    devices = {section: (zero.get(section) or {}).get("device", "none") for section in OFFLOADS}
    return {"zero_stage": zero.get("stage", 0), **devices}


# Keys of accelerate's YAML that its DeepSpeedPlugin refuses beside deepspeed_config_file, listing all nine.
YAML_KEYS = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
    "mixed_precision",
)


def check_accelerate_keys(given: str, path: str) -> None:
    """InputError naming the keys of accelerate's YAML that leave no room for its deepspeed_config_file `path`.

    `given` is what accelerate launch says it read: keys with commas between (ACCELERATE_CONFIG_DS_FIELDS).
    """
    wrong = [key for key in given.split(",") if key in YAML_KEYS]
    if wrong:
        raise InputError(
            f"accelerate's config file: {', '.join(wrong)} cannot stand beside deepspeed_config_file",
            f"take {'it' if len(wrong) == 1 else 'them'} out there; what counts is in {path}",
        )
