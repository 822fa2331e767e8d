"""What all tests share: which marks run on this machine, and an environment apart from hub and caller."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import image
import image_engine
import pytest
from harness import SECRET, SMALL, launch, torchrun

from slipway.errors import InputError

ROOT = Path(__file__).resolve().parent.parent

# No test may depend on a hub, nor wait for one.
os.environ["HF_HUB_OFFLINE"] = "1"
# As report.quiet() has it: torch would start compiling processes in each process that a test starts.
os.environ.setdefault("TORCH_WARM_POOL", "0")
# Prepared models and data are kept between test runs, apart from the user's own.
os.environ.setdefault("SLIPWAY_CACHE", str(ROOT / "build" / "test-cache"))
# Else each process that a test starts would compile this project anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell's background jobs ignore Ctrl-C, and what they start does too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# `make test` hands its own variables down; a `make` that a test starts must not see them.
for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"):
    os.environ.pop(name, None)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """small_disk(mib) -> the folder of a new file system of that size."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def of(mib: int) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
        mounted = subprocess.run(words, capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"a small file system needs root: {mounted.stderr.strip()}")
        return folder

    yield of
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", folder], check=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, with the reason; asks the machine only if a test needs to know."""
    for mark, why_not in (("image", no_docker), ("gpu", no_gpu)):
        marked = [item for item in items if item.get_closest_marker(mark)]
        reason = why_not() if marked else ""
        for item in marked if reason else []:
            item.add_marker(pytest.mark.skip(reason=reason))


def no_docker() -> str:
    """Why no image can be built or run here; empty if one can."""
    try:
        client = image_engine.client()
    except InputError as error:
        return error.message
    done = subprocess.run([client, "image", "inspect", image.TAG], capture_output=True)
    return f"no image {image.TAG}: make image" if done.returncode else ""


def no_gpu() -> str:
    """Why nothing can be run on a GPU here; empty if it can."""
    import torch  # here: it takes seconds, and only tests with the mark need it

    return "" if torch.cuda.is_available() else "no CUDA GPU"


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """trained(recipe) -> (folder, completed process); each recipe runs once, and saves its last step."""
    done = {}

    def once(recipe):
        if recipe not in done:
            folder = tmp_path_factory.mktemp(recipe) / "run"
            flags = ["--train_sampling_strategy", "sequential", "--save_strategy", "steps", "--save_steps", 20]
            result = launch(*SMALL, *flags, "--output_dir", folder, recipe=recipe, HF_TOKEN=SECRET)
            done[recipe] = (folder, result)
        folder, result = done[recipe]
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
        return folder, result

    return once


@pytest.fixture(scope="session")
def other(tmp_path_factory):
    """The folder that another_tool.py filled, with configs: config/, large_config/, untied/."""
    import another_tool  # here: it imports deepspeed, which takes seconds

    folder = tmp_path_factory.mktemp("other")
    done = torchrun(ROOT / "tests/another_tool.py", folder, DS_ACCELERATOR="cpu", timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    for name, kind in (("config", {}), ("large_config", {"large": True}), ("untied", {"tied": False})):
        config = another_tool.config(**kind)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder / name)
    return folder
