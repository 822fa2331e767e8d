"""A ds_config against the arguments of the run: who contradicts whom, said before a model is loaded.

Hugging Face compares numbers too, but only after the model is built, and it says nothing about schedulers,
optimizers and missing keys, where the JSON wins in silence.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipway.ds_resolve import Arguments, Fill, asked, origin, plain, precision_of
from slipway.ds_schema import at, default_of, params_of

# DeepSpeed's schedulers that with warmup_type "linear" follow the curve of one of Hugging Face's.
SAME_CURVE = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}

# Under offload accelerate swaps any optimizer for DeepSpeedCPUAdam: only these stay what was asked for.
OFFLOADED_AS_ASKED = ("adamw_torch", "adamw_torch_fused")
# With zero_force_ds_cpu_optimizer false nothing is swapped, but these names have no CPU kernels at all.
NEEDS_GPU = ("8bit", "4bit", "bnb", "paged", "lion", "ademamix")


@dataclass
class _Found:
    where: str
    errors: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def add(self, text: str, error: bool) -> None:
        (self.errors if error else self.notices).append(f"{self.where}: {text}")


def conflicts(
    config: dict[str, Any],
    where: str | Path,
    args: Arguments,
    world_size: int,
    num_training_steps: int | None = None,
) -> tuple[list[str], list[str]]:
    """(errors, notices): a line each, with both values and the origin of each. `config` has passed `check`.

    Numbers that differ are errors, because Hugging Face would stop the run. What the JSON overrides is an
    error if it was typed on the command line, a notice if it came from a recipe or a default. What is not in
    `args` is not compared.
    """
    found = _Found(str(where))
    fills = asked(args, world_size, num_training_steps)
    _compare_batch(config, found, fills, world_size)
    _compare_numbers(config, found, fills)
    _compare_missing(config, found, fills, args)
    _compare_precision(config, found, args)
    _compare_scheduler(config, found, args)
    _compare_optimizer(config, found, args)
    _warn(config, found)
    return found.errors, found.notices


def _typed(args: Arguments, *names: str) -> bool:
    return any(name in args and args[name][1].startswith("command line") for name in names)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _compare_batch(config: dict[str, Any], found: _Found, fills: dict[str, Fill], world_size: int) -> None:
    total = config.get("train_batch_size")
    sizes = {
        "train_micro_batch_size_per_gpu": config.get("train_micro_batch_size_per_gpu", "auto"),
        "gradient_accumulation_steps": config.get("gradient_accumulation_steps", 1),
    }
    for key, size in sizes.items():
        if size == "auto":
            sizes[key] = fills[key].value if key in fills else None
    if not isinstance(total, int | float) or None in sizes.values():
        return
    right = math.prod(sizes.values()) * world_size
    if total != right:
        factors = " x ".join(f"{size} ({key})" for key, size in sizes.items())
        ranks = "rank" if world_size == 1 else "ranks"
        found.add(
            f'train_batch_size is {total}, but {factors} x {world_size} ({ranks}) = {right}; write {right} or "auto"',
            error=True,
        )


def _compare_numbers(config: dict[str, Any], found: _Found, fills: dict[str, Fill]) -> None:
    for key, fill in fills.items():
        mine = at(config, key)
        if key in ("train_batch_size", "scheduler.params.warmup_min_lr") or mine in (
            None,
            "auto",
            fill.value,
        ):
            continue
        values = mine if isinstance(mine, list) else [mine]
        flags = " ".join(f"--{name} {_text(value)}" for name, value in zip(fill.names, values, strict=False))
        found.add(f'{key} is {_text(mine)}, but {fill.origin}; write "auto", or pass {flags}', error=True)


def _compare_missing(config: dict[str, Any], found: _Found, fills: dict[str, Fill], args: Arguments) -> None:
    """A key that is not there is filled in by no one: DeepSpeed takes its own default, not the argument."""
    defaults = {"gradient_accumulation_steps": 1, "gradient_clipping": default_of("gradient_clipping")}
    for section in ("optimizer", "scheduler"):
        params = params_of(section, at(config, f"{section}.type", ""))
        for name, node in params.get("keys", {}).items():
            defaults[f"{section}.params.{name}"] = node.get("default")
    for key, default in defaults.items():
        if key not in fills or at(config, key) is not None or default in (None, fills[key].value):
            continue
        # Hugging Face does compare the steps that accelerate writes, after the model is built.
        refused = key == "gradient_accumulation_steps"
        found.add(
            f"{key} is missing, which means {_text(default)}, but {fills[key].origin};"
            f' write "{key.rpartition(".")[2]}": "auto"',
            error=refused or _typed(args, *fills[key].names),
        )


def _compare_precision(config: dict[str, Any], found: _Found, args: Arguments) -> None:
    if not {"bf16", "fp16"} <= args.keys():
        return
    on = [name for name in ("bf16", "fp16") if args[name][0]]
    wanted = on[0] if on else "fp32"
    got = precision_of(config, wanted)
    if got == wanted:
        return
    key = f"{wanted}.enabled is false" if got == "fp32" else f"{got}.enabled is true"
    typed = _typed(args, "bf16", "fp16")
    verb, advice = ("contradicts", '; write "auto", or drop the flag') if typed else ("overrides", "")
    found.add(f"{key}, which {verb} {origin(args, *(on or ('bf16', 'fp16')))}{advice}", error=typed)


def _compare_scheduler(config: dict[str, Any], found: _Found, args: Arguments) -> None:
    kind = at(config, "scheduler.type")
    if kind is None:
        return
    if "lr_scheduler_type" in args and SAME_CURVE.get(kind) != plain(args["lr_scheduler_type"][0]):
        flat = ": the rate will not decay" if kind == "WarmupLR" else ""
        typed = _typed(args, "lr_scheduler_type")
        advice = "; drop the scheduler from the file, or the flag" if typed else ""
        found.add(f"the scheduler {kind} overrides {origin(args, 'lr_scheduler_type')}{flat}{advice}", error=typed)
    if kind in SAME_CURVE and at(config, "scheduler.params.warmup_type", "log") == "log":
        found.add(
            f'the scheduler {kind} warms up by a logarithm; "warmup_type": "linear" is Hugging Face\'s way',
            error=False,
        )


def _compare_optimizer(config: dict[str, Any], found: _Found, args: Arguments) -> None:
    if "optim" not in args:
        return
    name, asked_for = str(plain(args["optim"][0])), origin(args, "optim")
    kind = at(config, "optimizer.type")
    if kind is not None:
        if kind.lower() not in ("adam", "adamw") or name not in OFFLOADED_AS_ASKED:
            found.add(f"the optimizer {kind} overrides {asked_for}", error=_typed(args, "optim"))
    elif at(config, "zero_optimization.offload_optimizer.device", "none") != "none":
        forced = config.get("zero_force_ds_cpu_optimizer", True)
        if name not in OFFLOADED_AS_ASKED if forced else any(part in name for part in NEEDS_GPU):
            fate = "it would turn into DeepSpeed's CPU Adam, or fail" if forced else "it has no CPU version"
            found.add(
                f"offload_optimizer cannot use {asked_for}: {fate}; take adamw_torch, or no offload",
                error=True,
            )


def _warn(config: dict[str, Any], found: _Found) -> None:
    zero = config["zero_optimization"]
    if zero["stage"] in (1, 2) and zero.get("overlap_comm") and zero.get("contiguous_gradients", True):
        found.add(
            "overlap_comm with contiguous_gradients has given NaN gradients on GPUs (DeepSpeed#7188);"
            " overlap_comm false is safe",
            error=False,
        )
    gather = "gather_16bit_weights_on_model_save"
    if zero["stage"] == 3 and not (zero.get(gather) or zero.get(f"stage3_{gather}")):
        found.add(f"without stage3_{gather} a save holds shards only, to be merged afterwards", error=False)
