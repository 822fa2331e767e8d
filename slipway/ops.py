"""DeepSpeed's compiled CPU ops, built once before ranks start, so that no rank waits for another's compiler.

torch marks a build in progress with a file named `lock` and waits for it without end, also when the compiler was killed
long ago. Here one process builds, under a lock that the system drops with the process.
"""

import importlib.util
import os
import sys
import time
from importlib import metadata
from pathlib import Path

from filelock import FileLock

from slipway import cache
from slipway.errors import InputError

SHM = "deepspeed_shm_comm"  # collectives between CPU ranks of one machine
ADAM = "cpu_adam"  # the optimizer of offloaded state
PIN, AIO = "pin_memory", "async_io"  # reads and writes of NVMe offload; the second needs the first
_BUILDERS = {SHM: "ShareMemCommBuilder", ADAM: "CPUAdamBuilder", PIN: "PinMemoryBuilder", AIO: "AsyncIOBuilder"}
_LOCK_HELD_S = 30  # a lock with nothing to build is held while a library is loaded: a second


def prepare(offload: bool, nvme: bool = False) -> None:
    """Build what CPU ranks under DeepSpeed load; returns at once where it is built. Sets TORCH_EXTENSIONS_DIR.

    The image has them beside DeepSpeed's own modules. Raises InputError if an op cannot be built, with the compiler's
    last lines.
    """
    wanted = [SHM, *[ADAM] * (offload or nvme), *[PIN, AIO] * nvme]
    if prebuilt(*wanted):
        return
    # With the variable set, torch makes no folder of its own for each Python and torch.
    kind = f"py{sys.version_info.major}{sys.version_info.minor}-torch{metadata.version('torch')}"
    ours = cache.root() / "torch_extensions" / kind
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ours)))
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "slipway.lock"):
        missing = [name for name in wanted if not list(folder.glob(f"**/{name}/{name}.so"))]
        _remove_stale_locks(folder, building=bool(missing))
        if not missing:
            return
        print(f"building {', '.join(missing)} for DeepSpeed, once: a minute or two each", file=sys.stderr, flush=True)
        for name in missing:
            _build(name)


def check_async_io() -> None:
    """InputError unless DeepSpeed's async I/O, which NVMe offload runs on, is built or can be."""
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    if not prebuilt(AIO) and not AsyncIOBuilder().has_function("io_submit", ("aio",)):
        raise InputError(
            "NVMe offload needs libaio and its headers, which the compiler does not find here",
            "install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora), or take RECIPE=zero3_offload",
        )


def _remove_stale_locks(folder: Path, building: bool) -> None:
    """Removes the locks of broken-off builds and loads, for which torch would wait; waits for a run that loads now."""
    for lock in folder.glob("**/lock"):
        while not building and lock.exists() and time.time() - lock.stat().st_mtime < _LOCK_HELD_S:
            time.sleep(0.2)
        if lock.exists():
            print(f"removed {lock}: its build was broken off", file=sys.stderr)
            lock.unlink(missing_ok=True)


def prebuilt(*names: str) -> bool:
    """Whether these ops came compiled with DeepSpeed, as in the image; asked of files, for importing takes seconds."""
    (package,) = importlib.util.find_spec("deepspeed").submodule_search_locations
    return all(any(Path(package).glob(f"ops/*/{name}_op*.so")) for name in names)


def _build(name: str) -> None:
    from deepspeed.ops.op_builder import cpu

    try:
        getattr(cpu, _BUILDERS[name])().load(verbose=False)
    except (RuntimeError, OSError, ImportError) as error:
        last = "\n  ".join(str(error).strip().splitlines()[-3:])
        raise InputError(
            f"DeepSpeed's {name} cannot be built: {last}", "install a C++ compiler (g++), then try again"
        ) from error
