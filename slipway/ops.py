"""DeepSpeed's compiled CPU ops, built once before ranks start, so that no rank waits for another's compiler.

torch marks a build in progress with a file named `lock` and waits for it without end, also when the compiler was killed
long ago. Here one process builds, under a lock that the system drops with the process.
"""

import os
import sys
from importlib import metadata
from pathlib import Path

from filelock import FileLock

from slipway import cache
from slipway.errors import InputError

SHM = "deepspeed_shm_comm"  # collectives between CPU ranks of one machine
ADAM = "cpu_adam"  # the optimizer of offloaded state


def prepare(offload: bool) -> None:
    """Build what CPU ranks under DeepSpeed load; returns at once where it is built. Sets TORCH_EXTENSIONS_DIR.

    Raises InputError if an op cannot be built, with the compiler's last lines.
    """
    # With the variable set, torch makes no folder of its own for each Python and torch.
    kind = f"py{sys.version_info.major}{sys.version_info.minor}-torch{metadata.version('torch')}"
    ours = cache.root() / "torch_extensions" / kind
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ours)))
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "slipway.lock"):
        missing = [name for name in (SHM, ADAM)[: 1 + offload] if not list(folder.glob(f"**/{name}/{name}.so"))]
        if not missing:
            return
        for stale in folder.glob("**/lock"):
            print(f"removed {stale}: its build was broken off", file=sys.stderr)
            stale.unlink()
        print(f"building {', '.join(missing)} for DeepSpeed, once: up to two minutes", file=sys.stderr, flush=True)
        for name in missing:
            _build(name)


def _build(name: str) -> None:
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

    try:
        {SHM: ShareMemCommBuilder, ADAM: CPUAdamBuilder}[name]().load(verbose=False)
    except (RuntimeError, OSError, ImportError) as error:
        last = "\n  ".join(str(error).strip().splitlines()[-3:])
        raise InputError(
            f"DeepSpeed's {name} cannot be built: {last}", "install a C++ compiler (g++), then try again"
        ) from error
