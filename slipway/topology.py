"""The machine a run is launched on: its GPUs, how many ranks, and what CPU ranks need to run the real engine."""

import contextlib
import functools
import io
import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from slipway.errors import InputError

CPU_RANKS = 2  # without a GPU a run takes two CPU ranks, so that sharding and collectives are real

# Dense peak in TFLOP/s with fp32 accumulation, (bf16, fp16), from NVIDIA's data sheets; cards without bf16: None.
# The first name that a card's name contains counts, so longer names stand first.
PEAKS = {
    "H200": (989, 989),
    "H100 PCIe": (756, 756),
    "H100 NVL": (835, 835),
    "H100": (989, 989),
    "A100": (312, 312),
    "L40S": (362, 362),
    "L4": (121, 121),
    "A10": (125, 125),
    "A6000": (155, 155),
    "RTX 4090": (165, 165),
    "RTX 3090": (71, 71),
    "V100": (None, 125),
    "T4": (None, 65),
}


@dataclass(frozen=True)
class World:
    """The ranks of a run: how many in all, on this node, and on what."""

    size: int
    local_size: int
    accelerator: str  # "cuda" or "cpu"
    gpus: int

    @property
    def on_gpu(self) -> bool:
        return self.accelerator == "cuda"


def ranks(number: int, kind: str = "") -> str:
    """`1 rank`, `2 CPU ranks`."""
    return f"{number} {kind}{' ' if kind else ''}rank{'s' * (number != 1)}"


def plan(nproc: int | None) -> World:
    """The world that the launcher will start on this one machine: a rank per GPU, or two CPU ranks.

    Raises InputError if `nproc` is below 1 or above the number of GPUs.
    """
    gpus = _count_gpus()
    if nproc is not None and nproc < 1:
        raise InputError(f"NPROC={nproc}: a run needs at least one rank", "leave NPROC out for a rank per GPU")
    if gpus and nproc is not None and nproc > gpus:
        raise InputError(f"NPROC={nproc}, but this machine shows {gpus} GPU(s)", f"NPROC={gpus} or less")
    size = nproc or gpus or CPU_RANKS
    return World(size, size, "cuda" if gpus else "cpu", gpus)


def forget_outer_ranks() -> None:
    """In the launcher: drop what a job manager says of one process, or the launcher would take itself for a rank.

    Raises InputError if it says that there are more: each of them would train a model of its own.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if size != "1":
        raise InputError(
            f"WORLD_SIZE={size} is set: this is one of several processes, and this command starts the ranks of one "
            "machine",
            "`unset WORLD_SIZE` if it is left over; on several machines start torchrun on each (--nnodes, --node_rank)",
        )


def current(deepspeed: bool = True) -> World:
    """The world this rank was started in, by torchrun, accelerate launch, or plain python (then one rank).

    deepspeed: one rank has to look like a group of one, as DeepSpeed wants it.
    Raises InputError if plain python was used on a machine with several GPUs, or if the launcher that was asked for
    another number of ranks started this one.
    """
    gpus = _count_gpus()
    if "RANK" not in os.environ:
        if gpus > 1:
            raise InputError(
                f"started without a launcher: one process on a machine with {gpus} GPUs",
                f"start it by make, or `torchrun --nproc_per_node {gpus} {sys.argv[0]} ...`",
            )
        if deepspeed:  # it looks for these, and would otherwise ask for MPI
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
            os.environ.setdefault("MASTER_PORT", "0")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    _compare_with_launcher(size)
    return World(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)), "cuda" if gpus else "cpu", gpus)


def _compare_with_launcher(size: int) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one process and says nothing; so look what was asked."""
    asked, by = os.environ.get("SLIPWAY_WORLD_SIZE"), "scripts/launch.py"
    if not asked and "ACCELERATE_MIXED_PRECISION" in os.environ:  # set by every way of `accelerate launch`
        asked, by = _asked_of_accelerate(psutil.Process().parent().cmdline())
    if asked and int(asked) != size:
        raise InputError(
            f"{asked} ranks were asked for ({by}), {size} started",
            f"start it by make with NPROC={asked}, by torchrun --nproc_per_node {asked}, or by accelerate launch "
            f"--multi_gpu --num_processes {asked} (on a CPU too): it starts one process else",
        )


def _asked_of_accelerate(words: list[str]) -> tuple[str | None, str]:
    """The number of processes on accelerate's command line, else in its config file, and where it stands; None where
    accelerate counts the GPUs itself."""
    flags = dict(itertools.pairwise(word for part in words for word in part.split("=", 1)))
    for flag in ("--num_processes", "--num-processes"):
        if flag in flags:
            return flags[flag], "accelerate launch --num_processes"
    from accelerate.commands.config.config_args import default_config_file

    given = flags.get("--config_file") or flags.get("--config-file")
    file = Path(given or default_config_file)
    if not file.is_file() or (not given and "--cpu" in words):  # accelerate too then leaves its default file alone
        return None, ""
    asked = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("num_processes")
    return (str(asked) if asked else None), f"num_processes in {file}"


def prepare_environment(world: World) -> None:
    """Set what ranks on a CPU need (inherited by the ranks if called in the launcher). Must come before imports of
    accelerate and deepspeed."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world.local_size)))
    if not world.on_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would guess, and warn
        # Its own launcher says this; without it each bucket of gradients starts `numactl` to count the sockets.
        os.environ.setdefault("LOCAL_SIZE", str(world.local_size))


def join(world: World, deepspeed: bool, timeout_s: int) -> None:
    """Join the process group with the backend that fits, before TrainingArguments do it wrongly.

    On a CPU, accelerate finds no backend under DeepSpeed and counts one process; given a PartialState with gloo (and
    accelerator_config use_configured_state) the real engine runs on all ranks.
    """
    if world.on_gpu:
        return  # TrainingArguments join with NCCL
    from datetime import timedelta

    from accelerate import PartialState

    _leave_stdout_to_python()
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed says on each rank that it has loaded an op
        if deepspeed:
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend="gloo", timeout=timedelta(seconds=timeout_s))
            _unlink_buffers()
        elif world.size > 1:
            PartialState(cpu=True, backend="gloo", timeout=timedelta(seconds=timeout_s))


def _unlink_buffers() -> None:
    """Takes the names of DeepSpeed's shared memory away, once all ranks have mapped it: 66 MiB a rank, which it leaves
    in /dev/shm however a run ends (csrc/cpu/comm/shm.cpp of DeepSpeed 0.19)."""
    import torch

    torch.distributed.barrier()
    env = os.environ
    run = f"{os.getuid()}_{env.get('MASTER_ADDR', '')}_{env.get('MASTER_PORT', '')}"
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{run}_{torch.distributed.get_rank()}").unlink(missing_ok=True)


@functools.cache
def cpu_group() -> "torch.distributed.ProcessGroup | None":  # noqa: F821  torch is imported where it is needed
    """The group for what ranks tell each other about files and signals: gloo, also where gradients go by NCCL.

    Collective at its first call.
    """
    import torch

    return torch.distributed.new_group(backend="gloo") if torch.distributed.get_backend() != "gloo" else None


def _leave_stdout_to_python() -> None:
    """What Python prints goes on; what compiled code prints goes nowhere: gloo says a line for each rank and group."""
    if sys.stdout.fileno() != 1:  # done before
        return
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding=sys.stdout.encoding)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def precision(world: World, bf16: bool | None, fp16: bool | None, origin: str) -> str:
    """ "bf16", "fp16" or "fp32": what was asked, else what the hardware does best.

    Raises InputError if bf16 was asked on a card that has none, fp16 on a CPU, or both were.
    """
    import torch

    if bf16 and fp16:
        raise InputError(f"{origin}: bf16 and fp16 are both on", "leave one out, or both: the hardware then decides")
    if not world.on_gpu:
        if fp16:
            raise InputError(f"{origin}: fp16 training needs a GPU, this machine has none", "leave fp16 out")
        return "bf16" if bf16 else "fp32"
    card, has_bf16 = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)[0] >= 8
    if bf16 and not has_bf16:
        raise InputError(f"{origin}: bf16 was asked, but {card} has none", "leave bf16 out, or --fp16 true")
    if bf16 is False and fp16 is False:
        return "fp32"
    return "bf16" if bf16 or (has_bf16 and not fp16) else "fp16"


def peak_flops(card: str, dtype: str) -> float | None:
    """A card's dense peak in FLOP/s for "bf16" or "fp16"; None where it is not known."""
    for name, (bf16, fp16) in PEAKS.items():
        if name in card:
            peak = {"bf16": bf16, "fp16": fp16}.get(dtype)
            return peak * 1e12 if peak else None
    return None


def launched_at(began: float) -> float:
    """When the launcher was started, in seconds of time.time(); `began` if there was none."""
    return float(os.environ.get("SLIPWAY_LAUNCHED_AT", began))


def _count_gpus() -> int:
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1"):  # accelerate launch --cpu
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
