"""How much disk and memory a run needs, estimated before it starts.

Bytes a parameter, from the ZeRO paper (Rajbhandari et al., 2020, section 3.1): weights 2 or 4, gradients 2 or 4, and 12
for Adam in mixed precision (an fp32 copy of the weights and two moments), 8 in fp32.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipway.errors import InputError

GIB = 2**30


@dataclass(frozen=True)
class Size:
    """Parameters of a model, those that are trained, and the bytes of one weight."""

    parameters: int
    trainable: int
    weight_bytes: int

    @classmethod
    def of(cls, parameters: int, precision: str, adapter: bool) -> "Size":
        """Of a model that is trained whole, or by an adapter: a few per cent of its parameters at most."""
        return cls(parameters, parameters // 50 if adapter else parameters, 4 if precision == "fp32" else 2)

    @property
    def model(self) -> int:
        """Bytes of the saved weights (an adapter alone, if only that is trained)."""
        return self.trainable * self.weight_bytes

    @property
    def optimizer(self) -> int:
        """Bytes of Adam's state in memory and in a checkpoint, over all ranks."""
        return self.trainable * (12 if self.weight_bytes == 2 else 8)

    @property
    def checkpoint(self) -> int:
        """Bytes of one checkpoint: weights, optimizer state, and DeepSpeed's own copy of the weights."""
        return 2 * self.model + self.optimizer


def free_disk(folder: Path) -> int:
    """Free bytes for this user where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_disk(folder: Path, size: Size, checkpoints: int) -> int:
    """Bytes that the run will write to `folder`; InputError if they do not fit.

    `checkpoints` is how many stand there at once at most: one more than save_total_limit, as the new one is written
    before the oldest goes.
    """
    need = checkpoints * size.checkpoint + size.model
    free = free_disk(folder)
    if need > free:
        raise InputError(
            f"no room in {folder}: the run needs about {need / GIB:.1f} GiB "
            f"({checkpoints} checkpoints of {size.checkpoint / GIB:.1f} and the model), {free / GIB:.1f} GiB are free",
            "another OUTPUT, --save_total_limit 1, or --save_strategy no",
        )
    return need


def host_need(size: Size, offload_optimizer: bool, offload_param: bool, local_share: float) -> int:
    """Host memory in bytes that offloading takes on this node, which holds `local_share` of all ranks."""
    optimizer = size.optimizer + size.trainable * 4 if offload_optimizer else 0  # and gradients, in fp32
    return int(local_share * (optimizer + (size.parameters * size.weight_bytes if offload_param else 0)))


def host_total() -> int:
    """Bytes of host memory that this process may use: the machine's, or its container's if that has less."""
    have = psutil.virtual_memory().total
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroup v2, and of v1
        limit = Path("/sys/fs/cgroup") / name
        if limit.is_file() and (text := limit.read_text().strip()).isdigit():
            have = min(have, int(text))
    return have


def check_host(need: int) -> None:
    """InputError if offloading will not fit the host's memory (a process killed for memory says nothing but -9)."""
    have = host_total()
    if need > have:
        raise InputError(
            f"offloading needs about {need / GIB:.0f} GiB of host memory, {have / GIB:.0f} GiB are here",
            "more ranks on more nodes, RECIPE=zero3_nvme, RECIPE=lora, or a larger machine",
        )


def nvme_need(size: Size, sections: list[str], local_share: float) -> int:
    """Bytes that NVMe offload takes on this node's disk: Adam's state, fp32 weights and gradients; the weights."""
    optimizer = size.trainable * 16 if "offload_optimizer" in sections else 0
    return int(local_share * (optimizer + (size.parameters * size.weight_bytes if "offload_param" in sections else 0)))


def check_nvme(folder: Path, need: int) -> None:
    """InputError unless `folder` is there, can be written, and has room for `need` bytes."""
    fix = "name a folder on an NVMe disk: --nvme_path FOLDER"
    if not folder.is_dir():
        raise InputError(f"nvme_path {folder} {'is a file' if folder.exists() else 'does not exist'}", fix)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"nvme_path {folder} cannot be written by user {os.getuid()}", fix)
    if need > free_disk(folder):
        raise InputError(
            f"nvme_path {folder}: offloading needs about {need / GIB:.1f} GiB, {free_disk(folder) / GIB:.1f} are free",
            "name a folder on a larger disk",
        )


def peak_rss() -> int:
    """The most host memory this process has held, in bytes, mapped pages of files included.

    VmHWM of proc(5): ru_maxrss would also count the process that this one was started from.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def check_writable(folder: Path, what: str = "OUTPUT") -> None:
    """InputError unless files can be made in `folder`, which need not exist yet."""
    parent = folder
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise InputError(f"{what} {folder}: {parent} is a file", "name a folder")
    try:
        with tempfile.TemporaryFile(dir=parent):  # rights alone do not tell: root has them on a read-only disk too
            pass
    except OSError as error:
        raise InputError(
            f"{what} {folder}: {parent} cannot be written by user {os.getuid()} ({error.strerror})",
            "name another folder",
        ) from error
