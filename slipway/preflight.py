"""Everything about a run that can be known before it starts, checked in the order of what is cheapest to mend.

The launcher calls `check` before it starts a process; each rank calls it again (everything costly is cached by then).
"""

import os
from pathlib import Path
from typing import Any

from slipway import (
    arguments,
    attention,
    ds_config,
    encode,
    limits,
    memory,
    models,
    ops,
    output,
    resume,
    topology,
    universal,
)
from slipway.arguments import Asked, print_help
from slipway.errors import InputError
from slipway.plan import Plan
from slipway.tokenizers import last_id
from slipway.topology import World

__all__ = ["check", "print_help"]  # what scripts/launch.py asks of a recipe

# A run of the shipped recipes on the embedded data without a GPU is a demonstration: minutes, not days.
# What is typed on the command line stays as typed.
DEMONSTRATION = {
    "max_length": 512,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "learning_rate": 3e-4,
    "max_steps": 32,
    "logging_steps": 1,
    "held_out_rows": 24,
}


def check(argv: list[str], world: World) -> Plan:
    """Check the arguments of a LLaMA recipe for `world`. Raises InputError at the first thing that will not do."""
    asked = arguments.read(argv)
    limits.check(asked, world)
    notices = _demonstrate(asked, world)
    folder = check_output(asked)
    notices += universal.keep_global_batch(asked, world, resume.newest(folder, asked))
    precision = topology.precision(world, *_asked_precision(asked))
    _set_precision(asked, precision)
    config, ds_path = _read_ds_config(asked)
    if config is not None:
        notices += _check_ds_config(config, ds_path, asked, world)
        precision = ds_config.precision_of(config, precision)  # a file that says fp16 is followed, and said
        _set_precision(asked, precision)
    facts = ds_config.facts_of(config)
    _check_quantized(asked, facts, world)
    choice = attention.choose(
        asked.get("attn"), dtype=precision, packing=asked.get("packing"), device=attention.Device.current()
    )
    name, trusted = asked.get("model_name_or_path") or "smollm2-135m", asked.get("trust_remote_code")
    model = models.resolve(name, revision=asked.get("model_revision"), trust_remote_code=trusted)
    limits.check_length(asked, model)
    tokenizer = models.load_tokenizer(model, trust_remote_code=trusted)
    parameters = models.parameters(model.config)
    _check_memory(asked, parameters, config, precision, world, folder)
    data = _prepare(asked, model, tokenizer, world)
    values = {key: (asked.get(key), asked.origin(key)) for key in asked.defaults}
    resolved, origins = (
        ds_config.resolve(config, values, world.size, model.config.hidden_size, precision) if config else (None, {})
    )
    plan = Plan(
        asked=asked,
        world=world,
        ds_config=config,
        ds_path=ds_path,
        ds_facts=facts,
        ds_resolved=resolved,
        ds_origins=origins,
        precision=precision,
        attention=choice,
        model=model,
        parameters=parameters,
        tokenizer=tokenizer,
        data=data,
        data_lines=encode.describe(data.facts),
        output=folder,
        notices=notices,
    )
    if os.environ.get("RANK", "0") == "0":
        resume.find(plan)  # refused here, if it is: rank 0 looks again with checksums when the ranks have met
    return plan


def _set_precision(asked: Asked, precision: str) -> None:
    for key in ("bf16", "fp16"):
        asked.set(key, precision == key, asked.origin(key) if key in asked.values else "the hardware")


def _check_quantized(asked: Asked, facts: dict[str, Any], world: World) -> None:
    key = "load_in_4bit" if asked.get("load_in_4bit") else "load_in_8bit"
    if not asked.get(key):
        return
    if not world.on_gpu:
        raise InputError(
            f"{asked.origin(key)}: {key} needs a GPU, this machine has none",
            "RECIPE=lora trains the same adapter on unquantized weights",
        )
    if facts["zero_stage"] == 3:
        raise InputError(f"{asked.origin(key)}: ZeRO-3 cannot partition quantized weights", "ZeRO-2: RECIPE=qlora")


def _demonstrate(asked: Asked, world: World) -> list[str]:
    ours = asked.config and asked.config.resolve().is_relative_to(arguments.repository() / "recipes")
    if world.on_gpu or not ours or asked.get("dataset_name") != "docstrings":
        return []
    if asked.typed("num_train_epochs"):
        return []
    changed = {key: value for key, value in DEMONSTRATION.items() if not asked.typed(key)}
    for key, value in changed.items():
        asked.set(key, value, "demonstration on a CPU")
    steps = asked.get("max_steps")
    return [f"no GPU, embedded data: a demonstration of {steps} steps of {asked.get('max_length')}-token blocks"]


def check_output(asked: Asked) -> Path:
    """The folder of the run; InputError if it cannot be written or holds something that would be overwritten."""
    folder = output.choose(resume.output_of(asked) or asked.get("output_dir"), asked.recipe)
    asked.set("output_dir", str(folder), asked.origin("output_dir"))
    goes_on = bool(asked.get("overwrite")) or resume.can_go_on(folder, asked)
    output.check(folder, goes_on, f"; {resume.ways(folder)}")
    return folder


def _asked_precision(asked: Asked) -> tuple[bool | None, bool | None, str]:
    bf16 = asked.values.get("bf16")
    fp16 = asked.values.get("fp16")
    return bf16, fp16, asked.origin("bf16" if bf16 else "fp16")


def _read_ds_config(asked: Asked) -> tuple[dict[str, Any] | None, str | None]:
    """The ds_config of --deepspeed or of accelerate's launcher; two different ones are refused."""
    name, launcher = asked.get("deepspeed"), os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if name and launcher and Path(launcher).resolve() != arguments.relative(str(name), asked.config).resolve():
        raise InputError(
            f"two ds_configs: {name} ({asked.origin('deepspeed')}) and {launcher} (accelerate launch)",
            "name one",
        )
    if launcher:
        ds_config.check_accelerate_keys(os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", ""), launcher)
    elif not name and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise InputError(
            "accelerate launch asks for DeepSpeed and names no ds_config",
            "give --deepspeed_config_file FILE before the script (ds_configs/ has some), or --deepspeed FILE after it",
        )
    if launcher and not name:
        name = launcher
        asked.set("deepspeed", launcher, "accelerate launch --deepspeed_config_file")
    if not name:
        return None, None
    path = arguments.relative(str(name), asked.config)
    return ds_config.load(path), str(path)


def _check_ds_config(config: dict[str, Any], path: str, asked: Asked, world: World) -> list[str]:
    if asked.get("nvme_path"):
        ds_config.set_nvme_path(config, asked.get("nvme_path"))
    ds_config.check(config, path)
    values = {key: (asked.get(key), asked.origin(key)) for key in asked.defaults}
    errors, notices = ds_config.conflicts(config, path, values, world.size)
    if errors:
        raise InputError("\n  ".join(errors), f"change {path} or the argument; each value is wanted once")
    return notices


def _check_memory(
    asked: Asked, parameters: int, config: dict[str, Any] | None, precision: str, world: World, folder: Path
) -> None:
    facts = ds_config.facts_of(config)
    size = memory.Size.of(parameters, precision, bool(asked.get("use_peft")))
    if os.environ.get("RANK", "0") == "0":
        kept = asked.get("save_total_limit") or 3
        memory.check_disk(folder, size, 0 if asked.get("save_strategy") == "no" else kept + 1)
    share = world.local_size / world.size
    on_host = {key: facts[key] == "cpu" for key in ds_config.OFFLOADS}
    memory.check_host(memory.host_need(size, **on_host, local_share=share))
    for folder, sections in ds_config.nvme_folders(config or {}).items():
        memory.check_nvme(Path(folder), memory.nvme_need(size, sections, share))
        ops.check_async_io()


def _prepare(asked: Asked, model: models.Model, tokenizer: Any, world: World) -> encode.Prepared:
    data = encode.prepare(
        asked.get("dataset_name"),
        tokenizer,
        max_length=asked.get("max_length"),
        packing=asked.get("packing"),
        seed=asked.get("seed"),
        vocab_size=max(model.config.vocab_size, last_id(tokenizer) + 1),
        shape=asked.get("shape"),
        split=asked.get("dataset_train_split"),
        config=asked.get("dataset_config"),
        columns=asked.get("columns"),
        eval_source=asked.get("eval_data"),
        held_out_rows=asked.get("held_out_rows"),
        max_rows=asked.get("max_rows"),
        loss_on=asked.get("loss_on"),
    )
    micro = asked.get("per_device_train_batch_size")
    batch = micro * asked.get("gradient_accumulation_steps") * world.size
    if len(data.train) < batch:
        raise InputError(
            f"{asked.get('dataset_name')}: {data.facts['train_rows']} rows give {len(data.train)} sequences, "
            f"one global batch needs {batch} (micro-batch {micro} x accumulation "
            f"{asked.get('gradient_accumulation_steps')} x {topology.ranks(world.size)})",
            _for_few(len(data.train) // (micro * world.size)),
        )
    return data


def _for_few(steps: int) -> str:
    """What to do where the rows fill no global batch; `steps`: the accumulation steps that they do fill."""
    fitting = f"--gradient_accumulation_steps {steps}" if steps else "a smaller micro-batch or fewer ranks"
    return f"{fitting}, more rows, or --packing false"
