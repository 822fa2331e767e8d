"""Compiles DeepSpeed's ops that ds_configs can reach, so that no recipe compiles anything when it runs.

    python docker/build_ops.py OUT       writes below OUT what belongs into site-packages

DeepSpeed's own set-up would compile for the CPU of the build machine, for one accelerator only, and skip in silence
what it cannot build. Here each op that is promised is compiled by DeepSpeed's own builder or the build stops; CPU code
is for any x86-64-v3 machine; and one installation serves GPUs and machines without one.
"""

import collections
import importlib
import importlib.metadata
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import deepspeed
import dist_record
import setuptools
import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils.cpp_extension import BuildExtension

ANY, CUDA, CPU = "any", "cuda", "cpu"  # the accelerator (DS_ACCELERATOR) under which an op is loaded
# Builder's module, class, accelerator. One file of async_io serves both: the CUDA builder's differs only in asking for
# libcuda, which a machine without a driver has not.
PROMISED = [
    ("cpu.comm", "ShareMemCommBuilder", CPU),
    ("pin_memory", "PinMemoryBuilder", ANY),
    ("cpu.async_io", "AsyncIOBuilder", ANY),
    ("fused_adam", "FusedAdamBuilder", CUDA),
    ("cpu.fused_adam", "FusedAdamBuilder", CPU),
    ("cpu.cpu_adam", "CPUAdamBuilder", ANY),
]
CPU_ARCH, SIMD = "-march=x86-64-v3", "-D__AVX256__"

# A module of this text stands where DeepSpeed looks for an op that each accelerator has its own build of.
CHOOSER = """from deepspeed.accelerator import get_accelerator as _accelerator

if _accelerator()._name == "cpu":
    from {package}.on_cpu.{name} import *
else:
    from {package}.on_cuda.{name} import *
"""
# DeepSpeed asks this module which ops are compiled, and for which accelerator.
INSTALLED = """from deepspeed.accelerator import get_accelerator as _accelerator

version = {version!r}
git_hash = git_branch = "unknown"
accelerator_name = _accelerator()._name
installed_ops = dict.fromkeys({ops!r}.get(accelerator_name, []), True)
torch_info = {torch_info!r}
"""


def main(out: Path) -> None:
    out = out.resolve()
    OpBuilder.cpu_arch, OpBuilder.simd_width = lambda self: CPU_ARCH, lambda self: SIMD
    os.chdir(Path(deepspeed.__file__).parent / "ops")  # builders name their sources from here
    all_ops = promised(ANY, CUDA, CPU)
    times = collections.Counter(builder.name for _, builder in all_ops)
    twins = [name for name, number in times.items() if number > 1]  # each accelerator has its own build
    package_out = out / "deepspeed"
    compile_all([extension(where, builder, builder.name in twins) for where, builder in all_ops], package_out)
    for where, builder in all_ops:
        if builder.name in twins and where == CUDA:
            package, _, name = builder.absolute_name().rpartition(".")
            folder = out / package.replace(".", "/")
            (folder / f"{name}.py").write_text(CHOOSER.format(package=package, name=name))
    (package_out / "git_version_info_installed.py").write_text(installed())
    made = [file for file in package_out.rglob("*") if file.is_file()]
    for file in package_out.rglob("*.py"):
        py_compile.compile(str(file), doraise=True)
    record(out, made)


def promised(*accelerators: str) -> list[tuple[str, OpBuilder]]:
    """(accelerator, builder) of each promised op of these accelerators."""
    found = []
    for module, name, where in PROMISED:
        if where in accelerators:
            builders = importlib.import_module(f"deepspeed.ops.op_builder.{module}")
            found.append((where, getattr(builders, name)()))
    return found


def extension(where: str, builder: OpBuilder, twin: bool) -> setuptools.Extension:
    """What setuptools compiles; in a folder on_cpu or on_cuda where the other accelerator has its own."""
    if not builder.is_compatible(verbose=True):
        raise SystemExit(f"DeepSpeed's {builder.name} is promised, but its builder says: {builder.error_log}")
    made = builder.builder()
    # The builders leave their linker flags out when they do not compile at run time.
    made.extra_link_args = [*made.extra_link_args, *builder.extra_ldflags(), "-fopenmp"]
    # They ask for what only a debugger reads, which takes as long as the code itself, and no user would load.
    made.extra_compile_args["cxx"].append("-g0")
    package, _, name = made.name.removeprefix("deepspeed.").rpartition(".")
    made.name = f"{package}.on_{where}.{name}" if twin else f"{package}.{name}"
    return made


def compile_all(extensions: list[setuptools.Extension], out: Path) -> None:
    """Compiles into OUT, and strips what only a debugger reads."""
    with tempfile.TemporaryDirectory() as folder:
        command = BuildExtension(setuptools.Distribution({"ext_modules": extensions}))
        command.build_lib, command.build_temp = str(out), folder
        command.ensure_finalized()
        command.run()
    for file in out.rglob("*.so"):
        subprocess.run(["strip", "--strip-debug", file], check=True)


def record(out: Path, made: list[Path]) -> None:
    """DeepSpeed's list of files with the ops in it, so that one that is missing later is noticed."""
    before = Path(importlib.metadata.distribution("deepspeed")._path) / "RECORD"
    after = out / before.parent.name / before.name
    after.parent.mkdir()
    shutil.copy(before, after)
    dist_record.update(after, made)


def installed() -> str:
    """The text of the module that says which ops are compiled."""
    ops = {name: [builder.name for _, builder in promised(ANY, name)] for name in (CUDA, CPU)}
    two = torch.__version__.split(".")[:2]
    nccl = ".".join(importlib.metadata.version("nvidia-nccl-cu12").split(".")[:2])
    torch_info = {
        "version": ".".join(two), "bf16_support": True, "cuda_version": torch.version.cuda, "nccl_version": nccl,
        "hip_version": "0.0",
    }  # fmt: skip
    return INSTALLED.format(version=importlib.metadata.version("deepspeed"), ops=ops, torch_info=torch_info)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
