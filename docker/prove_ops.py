"""Loads each DeepSpeed op that the image promises, under both accelerators, and uses those that need no GPU.

    python docker/prove_ops.py       exit 1 with the op's name if one is missing, wrong, or would be compiled now

Ends in a table: op, accelerator, file. A compiler that is called ends it: none may be needed when a recipe runs.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ACCELERATORS = ("cuda", "cpu")
MIB = 2**20


def main() -> int:
    """Each accelerator in a process of its own: DeepSpeed chooses one for good."""
    for accelerator in ACCELERATORS:
        environ = os.environ | {"DS_ACCELERATOR": accelerator, "CXX": "no-compiler", "PYTORCH_NVCC": "no-compiler"}
        with tempfile.TemporaryDirectory() as folder:
            environ["TORCH_EXTENSIONS_DIR"] = folder
            done = subprocess.run([sys.executable, "-W", "ignore", __file__, accelerator], env=environ)
            if done.returncode or any(Path(folder).iterdir()):
                print(f"DeepSpeed's ops for {accelerator} are not as promised", file=sys.stderr)
                return 1
    return 0


def prove(accelerator: str) -> None:
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops

    for name in installed_ops:
        builder = next(b for b in builders(get_accelerator()) if b.name == name)
        module = builder.load()
        print(f"{name:<20} {accelerator:<5} {module.__file__}", flush=True)
    adam(torch, on_cpu=accelerator == "cpu")
    async_io(torch)


def builders(accelerator) -> list:
    names = ["FusedAdamBuilder", "CPUAdamBuilder", "AsyncIOBuilder", "PinMemoryBuilder", "ShareMemCommBuilder"]
    made = [accelerator.create_op_builder(name) for name in names]
    return [builder for builder in made if builder is not None]


def adam(torch, on_cpu: bool) -> None:
    """One step of each Adam equals torch's; 1,001 values, so that the vectorized part and the rest both run."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    generator = torch.Generator().manual_seed(1)
    value, gradient = torch.randn(2, 1001, generator=generator)
    for kind in (DeepSpeedCPUAdam, FusedAdam)[: 1 + on_cpu]:
        ours, theirs = (torch.nn.Parameter(value.clone()) for _ in range(2))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        kind([ours], lr=1e-2, weight_decay=0.1).step()
        torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1).step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def async_io(torch) -> None:
    """1 MiB written and read again, in the default temporary folder."""
    from deepspeed.accelerator import get_accelerator

    handle = get_accelerator().create_op_builder("AsyncIOBuilder").load().aio_handle(MIB, 4, False, False, 1)
    written, read = torch.randint(0, 256, (MIB,), dtype=torch.uint8), torch.zeros(MIB, dtype=torch.uint8)
    with tempfile.NamedTemporaryFile() as file:
        handle.sync_pwrite(written, file.name, 0)
        handle.sync_pread(read, file.name, 0)
    assert torch.equal(written, read), "async_io read other bytes than it had written"


if __name__ == "__main__":
    sys.exit(prove(sys.argv[1]) if sys.argv[1:] else main())
