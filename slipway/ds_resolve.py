"""What DeepSpeed gets in the end: a ds_config with each "auto" filled in as Hugging Face and accelerate do.

Arguments are a mapping of Hugging Face's names to (value, origin), where origin is text for people, such as
"recipes/llama/zero3.yaml:7", "default", or "command line --learning_rate"; that last one counts as typed.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slipway.ds_schema import HF_FILLS, at, default_of, leaves

Arguments = Mapping[str, tuple[Any, str]]


class Fill(NamedTuple):
    """A value for an "auto": where it comes from, and the names of the arguments that give it."""

    value: Any
    origin: str
    names: tuple[str, ...] = ()


def resolve(
    config: dict[str, Any],
    args: Arguments,
    world_size: int,
    hidden_size: int,
    dtype: str,
    num_training_steps: int | None = None,
    where: str | Path = "ds_config",
) -> tuple[dict[str, Any], dict[str, str]]:
    """The config as DeepSpeed gets it, and the origin of each dotted key; `config` itself is not changed.

    dtype: "bf16", "fp16" or "fp32". A scheduler's step counts are None until num_training_steps is known.
    """
    resolved, origins = copy.deepcopy(config), {}
    fills = asked(args, world_size, num_training_steps)
    fills |= _from_hidden_size(hidden_size, config["zero_optimization"]["stage"])
    fills |= {f"{name}.enabled": Fill(dtype == name, f"dtype {dtype}") for name in ("bf16", "fp16")}
    for key, value in leaves(config):
        origins[key] = str(where)
        if value == "auto" and key in HF_FILLS:
            fill = fills.get(key) or _unfilled(key)
            origins[key] = fill.origin
            _put(resolved, key, fill.value)
    for key, fill in _added(config, dtype):
        origins[key] = fill.origin
        _put(resolved, key, fill.value)
    return resolved, origins


def asked(args: Arguments, world_size: int, num_training_steps: int | None = None) -> dict[str, Fill]:
    """What Hugging Face puts for "auto" at each dotted key, without the keys whose value is not known yet."""
    rows: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
        "train_micro_batch_size_per_gpu": (("per_device_train_batch_size",), _same),
        "gradient_accumulation_steps": (("gradient_accumulation_steps",), _same),
        "train_batch_size": (
            ("per_device_train_batch_size", "gradient_accumulation_steps"),
            lambda micro, accumulated: micro * accumulated * world_size,
        ),
        "gradient_clipping": (("max_grad_norm",), _same),
        "optimizer.params.lr": (("learning_rate",), _same),
        "optimizer.params.betas": (("adam_beta1", "adam_beta2"), lambda one, two: [one, two]),
        "optimizer.params.eps": (("adam_epsilon",), _same),
        "optimizer.params.weight_decay": (("weight_decay",), _same),
        "scheduler.params.warmup_min_lr": ((), lambda: 0),
        "scheduler.params.warmup_max_lr": (("learning_rate",), _same),
        "scheduler.params.warmup_num_steps": (
            ("warmup_steps", "max_steps"),
            lambda warmup, at_most: _warmup_steps(warmup, _steps(at_most, num_training_steps)),
        ),
        "scheduler.params.total_num_steps": (
            ("max_steps",),
            lambda at_most: _steps(at_most, num_training_steps),
        ),
    }
    found = {}
    for key, (names, value_of) in rows.items():
        if all(name in args for name in names):
            value = value_of(*(args[name][0] for name in names))
            if value is not None:
                found[key] = Fill(value, origin(args, *names) or "Hugging Face's default", names)
    return found


def origin(args: Arguments, *names: str) -> str:
    """`learning_rate=2e-05 (command line --learning_rate)`, for each of `names`."""
    return ", ".join(f"{name}={plain(args[name][0])} ({args[name][1]})" for name in names)


def plain(value: Any) -> Any:
    """The text of an enum of transformers, anything else as it is."""
    return getattr(value, "value", value)


def _same(value: Any) -> Any:
    return value


def _steps(max_steps: int, counted: int | None) -> int | None:
    return counted or (max_steps if max_steps > 0 else None)


def _warmup_steps(warmup: float, steps: int | None) -> int | None:
    """Below 1 it is a share of all steps; DeepSpeed refuses 0, so Hugging Face writes 1."""
    if 0 < warmup < 1:
        return None if steps is None else max(1, math.ceil(steps * warmup))
    return max(1, int(warmup))


def _from_hidden_size(hidden_size: int, stage: int) -> dict[str, Fill]:
    square = hidden_size * hidden_size
    sizes = {"reduce_bucket_size": square}
    if stage == 3:
        sizes["stage3_prefetch_bucket_size"] = int(0.9 * square)
        sizes["stage3_param_persistence_threshold"] = 10 * hidden_size
    return {f"zero_optimization.{key}": Fill(size, f"hidden_size {hidden_size}") for key, size in sizes.items()}


def _unfilled(key: str) -> Fill:
    """DeepSpeed drops an "auto" that no one filled in, as for stage 3's sizes at another stage."""
    default = default_of(key)
    return Fill(None, "counted when the data is read") if default is None else Fill(default, "DeepSpeed's default")


def _added(config: dict[str, Any], dtype: str) -> Iterator[tuple[str, Fill]]:
    """What accelerate and the Trainer write into a config by themselves."""
    yield "steps_per_print", Fill(None, "accelerate, so that DeepSpeed prints nothing")
    if "gradient_accumulation_steps" not in config:
        yield "gradient_accumulation_steps", Fill(1, "accelerate's default")
    if "optimizer" not in config:
        yield "zero_allow_untested_optimizer", Fill(True, "the Trainer, for its own optimizer")
    for name in ("bf16", "fp16"):
        if name not in config:
            yield f"{name}.enabled", Fill(dtype == name, f"dtype {dtype}")
            if name == dtype == "fp16":
                yield "fp16.auto_cast", Fill(True, "accelerate's default")


def _put(config: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[last] = value


def precision_of(config: dict[str, Any] | None, wanted: str) -> str:
    """The precision ("bf16", "fp16" or "fp32") that the config leaves a run that wants `wanted`."""
    switches = {name: at(config or {}, f"{name}.enabled") for name in ("bf16", "fp16")}
    on = [name for name, switch in switches.items() if switch is True]
    return on[0] if on else "fp32" if switches.get(wanted) is False else wanted
