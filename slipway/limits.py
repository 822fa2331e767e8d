"""Arguments that a rank would refuse minutes later, or that would train nothing: numbers out of range, choices that
exclude each other or need what is not there. Each InputError says where the value came from.
"""

import math

from slipway import hub
from slipway.arguments import Asked
from slipway.errors import InputError
from slipway.models import Model
from slipway.topology import World

# name: (least, greatest), both allowed; None: no end. Left out are those that slipway.encode checks.
_COUNTS = dict.fromkeys(
    (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "save_total_limit",
        "sample_tokens",
        "ddp_timeout",
        "stop_seconds",
        "lora_r",
        "lora_alpha",
    ),
    (1, None),
)
_NOT_NEGATIVE = dict.fromkeys(
    (
        "samples",
        "warmup_steps",
        "max_grad_norm",
        "weight_decay",
        "dataloader_num_workers",
        "eval_delay",
        "heartbeat_seconds",
    ),
    (0, None),
)
_SEEDS = dict.fromkeys(("seed", "data_seed"), (0, 2**32 - 1))  # numpy takes 32 bits
_SHARES = dict.fromkeys(("lora_dropout", "label_smoothing_factor", "adam_beta1", "adam_beta2"), (0, 1))
RANGES: dict[str, tuple[int, int | None]] = _COUNTS | _NOT_NEGATIVE | _SEEDS | _SHARES
# More than 0: a share of all steps is written below 1.
POSITIVE = (
    "learning_rate",
    "num_train_epochs",
    "logging_steps",
    "save_steps",
    "eval_steps",
    "adam_epsilon",
    "neftune_noise_alpha",
)


def check(asked: Asked, world: World) -> None:
    """Raises InputError for the first argument that will not do."""
    _check_numbers(asked)
    _check_choices(asked, world)


def allowed(value: object, least: float | None, greatest: float | None, positive: bool = False) -> str:
    """What may be given where `value` will not do as a number; empty where it will, or is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    if not math.isfinite(value):
        return "a number"
    if (least is not None and value < least) or (greatest is not None and value > greatest):
        return f"at least {least}" if greatest is None else f"{least} to {greatest}"
    return "more than 0" if positive and value <= 0 else ""


def _check_numbers(asked: Asked) -> None:
    for key in asked.defaults:
        value = asked.get(key)
        if instead := allowed(value, *RANGES.get(key, (None, None)), key in POSITIVE):
            raise InputError(f"{asked.origin(key)}: {key} is {value}", f"give {instead}, or leave it out")
    if asked.get("max_length") is None:
        raise InputError(f"{asked.origin('max_length')}: max_length is empty", "give a number of tokens")
    steps = asked.get("max_steps")
    if steps != -1 and steps < 1:
        raise InputError(
            f"{asked.origin('max_steps')}: max_steps is {steps}", "give at least 1, or -1: --num_train_epochs decides"
        )


def _check_choices(asked: Asked, world: World) -> None:
    def refuse(key: str, why: str, fix: str) -> None:
        raise InputError(f"{asked.origin(key)}: {key} {asked.get(key)}: {why}", fix)

    if asked.get("merge") and not asked.get("use_peft"):
        refuse("merge", "no adapter is trained that could be merged", "RECIPE=lora, or leave it out")
    if asked.get("use_liger_kernel") and not world.on_gpu:
        refuse("use_liger_kernel", "its kernels need a GPU, this machine has none", "leave it out")
    for key in ("fsdp", "fsdp_config"):
        if asked.get(key):
            refuse(key, "no recipe trains under FSDP", "RECIPE=zero3 divides parameters among the ranks too")
    if asked.get("push_to_hub") and not (asked.get("hub_token") or hub.logged_in()):
        refuse("push_to_hub", "no token for the hub, or HF_HUB_OFFLINE is set", "`hf auth login`, or set HF_TOKEN")
    wanted = asked.get("report_to") or []
    there = _trackers() if wanted else []
    for name in [wanted] if isinstance(wanted, str) else wanted:
        if name not in there:
            refuse("report_to", f"{name} is unknown, or not installed", f"one of {', '.join(there)}")


def _trackers() -> list[str]:
    from transformers.integrations import get_available_reporting_integrations

    return sorted([*get_available_reporting_integrations(), "none", "all"])


def check_length(asked: Asked, model: Model) -> None:
    """Raises InputError for a max_length beyond the positions that the model was made for."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest and asked.get("max_length") > longest:
        raise InputError(
            f"{asked.origin('max_length')}: max_length {asked.get('max_length')} is more than the {longest} positions "
            f"of {model.name}",
            f"--max_length {longest} or less, or a model made for longer texts",
        )
