"""Export as a user does, and read what came of it."""

import shutil
import subprocess
import sys
from pathlib import Path

import export as script
import torch
from harness import ROOT, run
from safetensors.torch import load_file


def make(checkpoint: Path, output: Path, *flags: object) -> dict[str, torch.Tensor]:
    """scripts/export.py in this process: the exported folder's tensors, by name."""
    script.main(["--checkpoint", str(checkpoint), "--output", str(output), *map(str, flags)])
    return read(output)


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an exported folder, by name."""
    return {
        name: tensor for file in sorted(folder.glob("*model*.safetensors")) for name, tensor in load_file(file).items()
    }


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Asserts the same names, dtypes and bits."""
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def foreign(run_folder: Path, to: Path) -> Path:
    """A run's checkpoint as if another tool had written it, and had not gathered the weights."""
    names = ("model*.safetensors", "manifest.json", "run.json")
    return Path(shutil.copytree(run_folder / "checkpoint-20", to / "elsewhere", ignore=shutil.ignore_patterns(*names)))


def exported(other: Path, case: str, output: Path, *flags: object) -> subprocess.CompletedProcess:
    """scripts/export.py, started, on a checkpoint of another_tool.py."""
    words = ["--config_from", other / ("large_config" if case.startswith("large") else "config"), *flags]
    return run(sys.executable, ROOT / "scripts/export.py", "--checkpoint", other / case, "--output", output, *words)
