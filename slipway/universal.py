"""Going on with other ranks, another ZeRO stage, offload on or off: by DeepSpeed's universal checkpoint.

    notices = universal.keep_global_batch(asked, world, checkpoint)   # in preflight: accumulation follows the ranks
    folder = universal.convert(checkpoint, plan)                      # on rank 0: OUTPUT/checkpoint-N.universal
    callbacks = universal.loading(args, folder)                       # on all ranks

The format (DeepSpeed 0.19, checkpoint/ds_to_universal.py): a folder for each trained parameter, with its fp32 value
and Adam's two moments whole. DeepSpeed's own converter writes the pieces, then the whole, for one kind of ZeRO to go on
with; this one reads one tensor at a time, and what it writes loads under ZeRO 1, 2 and 3.
"""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from slipway import manifest, memory, partitions, pickles, topology
from slipway.arguments import Asked
from slipway.errors import InputError

if TYPE_CHECKING:
    from slipway.plan import Plan

STATES = ("fp32", "exp_avg", "exp_avg_sq")
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
# What may be otherwise than it was: nothing that decides a loss.
_LAYOUT = {"world_size", "zero_stage", "offload_optimizer", "offload_param", "ds_config", *_BATCH}
# Parts of a ds_config that say how a model is divided and moved, and not what is computed.
_DIVIDES = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
            "aio", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "checkpoint"}  # fmt: skip

_WEIGHTS = {"module", "optimizer", "frozen_param_fragments"}  # in a file of model states: read from elsewhere


def bridges(before: dict[str, Any], now: dict[str, Any], different: set[str]) -> bool:
    """Whether a run with `different` facts goes on: the same in all but layout, and both under ZeRO (by conversion), or
    both without DeepSpeed, where every checkpoint is whole."""
    moved = {facts[key] for facts in (before, now) for key in ("offload_optimizer", "offload_param")}
    stages = before["zero_stage"], now["zero_stage"]
    by_batch = now["arguments"]["train_sampling_strategy"] not in ("random", "sequential")
    return (
        different <= _LAYOUT
        and not (by_batch and different & {"world_size", *_BATCH})  # such an order of rows depends on each rank's batch
        and (min(stages) >= 1 or before["ds_config"] is now["ds_config"] is None)
        and "nvme" not in moved
        and _computes(before["ds_config"]) == _computes(now["ds_config"])
        and global_batch(before) == global_batch(now)
    )


def _computes(ds_config: dict[str, Any] | None) -> dict[str, Any]:
    config = ds_config or {}
    rounded = {key: value for key, value in config.get("zero_optimization", {}).items() if "quantized" in key}
    return rounded | {key: value for key, value in config.items() if key not in _DIVIDES}


def global_batch(facts: dict[str, Any]) -> int:
    """Sequences of an optimizer step, of a run's identity."""
    micro, steps = (facts["arguments"][key] for key in _BATCH)
    return micro * steps * facts["world_size"]


def describe(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What is converted into what."""
    return f"from {_layout(before)} to {_layout(now)}"


def _layout(facts: dict[str, Any]) -> str:
    ranks = topology.ranks(facts["world_size"])
    parts = {"offload_optimizer": "optimizer", "offload_param": "parameters"}
    moved = [f"{what} on {facts[key]}" for key, what in parts.items() if facts[key] != "none"]
    if not facts["ds_config"]:
        return ranks
    return f"{ranks} under ZeRO-{facts['zero_stage']}" + (f" ({', '.join(moved)})" if moved else "")


def keep_global_batch(asked: Asked, world: topology.World, found: manifest.Checkpoint | None) -> list[str]:
    """On other ranks than the checkpoint's: micro-batch and accumulation that make the same global batch, and a line
    that says so. Raises InputError, with the arithmetic, where there are none."""
    was = found.facts["asked"] if found else None
    if not was or was["world_size"] == world.size:
        return []
    whole, micro = global_batch(was), asked.get(_BATCH[0])
    if whole == micro * asked.get(_BATCH[1]) * world.size:
        return []
    made = " x ".join(str(number) for number in (*(was["arguments"][key] for key in _BATCH), was["world_size"]))
    if whole % world.size:
        raise InputError(
            f"{found.path} was made with a global batch of {whole} (micro-batch x accumulation x ranks: {made}), "
            f"which {world.size} ranks cannot share: {whole} / {world.size} = {whole / world.size:.2f}",
            f"NPROC={max(n for n in range(1, world.size) if whole % n == 0)}, or another number that divides {whole}",
        )
    share = whole // world.size
    micro = max(size for size in range(1, min(micro, share) + 1) if share % size == 0)
    for key, value in zip(_BATCH, (micro, share // micro), strict=True):
        asked.set(key, value, "the global batch of the checkpoint")
    ranks = topology.ranks(world.size)
    return [f"the global batch stays {whole}: micro-batch {micro} x accumulation {share // micro} x {ranks}"]


def folder_of(checkpoint: manifest.Checkpoint) -> Path:
    """Where a checkpoint is converted to."""
    return checkpoint.path.with_name(f"{checkpoint.path.name}.universal")


def remove(output: Path) -> None:
    """What earlier starts converted: each is for one start."""
    for folder in output.glob("checkpoint-*.universal"):
        shutil.rmtree(folder)


def size(checkpoint: manifest.Checkpoint) -> int:
    """Bytes that the converted one takes, at most: moments and values are all that the ranks' optimizer files hold. 0:
    there is nothing to convert, the checkpoint is not divided."""
    return sum(file["bytes"] for name, file in checkpoint.files.items() if name.endswith("_optim_states.pt"))


def check_room(checkpoint: manifest.Checkpoint) -> None:
    """Raises InputError where the disk has no room for the conversion."""
    need, free = size(checkpoint), memory.free_disk(checkpoint.path.parent)
    if free < need:
        raise InputError(
            f"{checkpoint.path.name} has to be converted for this run, which takes {need / memory.GIB:.3f} GiB more in "
            f"{checkpoint.path.parent} for the time of the start; {free / memory.GIB:.3f} are free",
            "free some, or start it with the ranks and the recipe that it was saved by",
        )


def convert(checkpoint: manifest.Checkpoint, plan: "Plan") -> Path | None:
    """Writes what the Trainer and DeepSpeed go on from on the plan's ranks and stage. None: without DeepSpeed, nothing.

    The checkpoint's own pickles are run, as DeepSpeed does: it is the run's, and its manifest matches.
    """
    if not plan.ds_config:
        return None
    check_room(checkpoint)
    into = folder_of(checkpoint)
    try:
        _write(checkpoint, plan, into)
    except (OSError, RuntimeError) as error:  # torch.save tells a full disk as a RuntimeError
        shutil.rmtree(into, ignore_errors=True)
        raise InputError(
            f"{into} cannot be written ({str(error).splitlines()[0]}); {checkpoint.path.name} is as it was",
            f"free some room in {into.parent}, then the same again",
        ) from error
    return into


def _write(checkpoint: manifest.Checkpoint, plan: "Plan", into: Path) -> None:
    tag = f"global_step{checkpoint.step}"
    zero = into / tag / "zero"
    zero.mkdir(parents=True)
    source = partitions.Partitions(checkpoint.path / tag)
    optimizer, model = (pickles.load_all(file) for file in source.firsts)
    state = optimizer["optimizer_state_dict"]
    inner = state.get("optimizer_state_dict") or state["base_optimizer_state"]  # of ZeRO 3, of 1 and 2
    step = next(iter(inner["state"].values()))["step"]
    with source.opened() as read:
        for name in source.trained():
            (zero / name).mkdir()
            for kind in STATES:
                torch.save({"param": read(name, kind)}, zero / name / f"{kind}.pt")
            torch.save(step, zero / name / "step.pt")
    groups = [group | {"params": []} for group in inner["param_groups"]]
    same = {key: state[key] for key in ("loss_scaler", "dynamic_loss_scale", "overflow") if key in state}
    both = {"param_groups": groups, "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups}}
    torch.save(same | both | {"ds_version": model["ds_version"]}, zero / "optimizer_state.pt")
    facts = {key: value for key, value in model.items() if key not in _WEIGHTS}
    facts |= {"module": {}, "dp_world_size": plan.world.size}
    ranks = [f"zero_pp_rank_{rank}_" for rank in range(plan.world.size)] if plan.ds_facts["zero_stage"] == 3 else [""]
    for rank in ranks:
        torch.save(facts, into / tag / f"{rank}mp_rank_00_model_states.pt")
    (into / "latest_universal").write_text(tag)
    _copy_the_trainers(checkpoint.path, into, plan.world.size)


def _copy_the_trainers(path: Path, into: Path, world: int) -> None:
    """Its state, its schedule, and the random states of ranks that there were and are."""
    for file in ("trainer_state.json", "scheduler.pt"):
        if (path / file).exists():
            shutil.copyfile(path / file, into / file)
    one = path / "rng_state.pth"
    for rank in range(world):
        states = one if rank == 0 and one.exists() else path / f"rng_state_{rank}.pth"
        if states.exists():
            shutil.copyfile(states, into / ("rng_state.pth" if world == 1 else f"rng_state_{rank}.pth"))


def loading(args: Any, folder: Path | None) -> list["_Loaded"]:
    """Has DeepSpeed read the universal format, and gives the callback that is to follow; nothing without a folder."""
    if folder is None:
        return []
    args.hf_deepspeed_config.config["checkpoint"] = {"load_universal": True}
    return [_Loaded(folder)]


class _Loaded(TrainerCallback):
    """Mends what DeepSpeed loads amiss, and removes the folder once all ranks have read it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        inner = kwargs["optimizer"].optimizer.optimizer
        saved = torch.load(next(self.folder.glob("*/zero/optimizer_state.pt")), weights_only=False)["param_groups"]
        for group, was in zip(inner.param_groups, saved, strict=True):
            group["weight_decay"] = was["weight_decay"]  # ZeRO 3 gives all groups that of the first
        tensors = type(inner).__module__.startswith("torch.optim")
        for values in inner.state.values():  # torch counts in a tensor, DeepSpeed's optimizers in a number
            values["step"] = torch.tensor(float(values["step"])) if tensors else int(values["step"])
        if torch.distributed.get_world_size() > 1:
            torch.distributed.barrier(group=topology.cpu_group())
        if os.environ["RANK"] == "0":
            shutil.rmtree(self.folder)
