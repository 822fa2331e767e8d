"""Start the real commands, as a user does, and read what they left."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FINETUNE = ROOT / "recipes" / "llama" / "finetune.py"
TRAIN = ROOT / "recipes" / "bert" / "train.py"
RECIPES = sorted(path.stem for path in FINETUNE.parent.glob("*.yaml"))


def run(*command: object, timeout: int = 280, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    """Run a command to its end with output as text; kills its whole session at the timeout."""
    words = [str(word) for word in command]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | env
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        raise AssertionError(f"not done after {timeout} s: {words}\n{out[-3000:]}\n{err[-3000:]}") from None
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def launch(
    *arguments: object, recipe: str = "zero3", nproc: int | None = None, **kwargs
) -> subprocess.CompletedProcess:
    """scripts/launch.py on a shipped recipe."""
    ranks = ["--nproc", nproc] if nproc else []
    config = FINETUNE.parent / f"{recipe}.yaml"
    return run(sys.executable, ROOT / "scripts/launch.py", *ranks, FINETUNE, "--config", config, *arguments, **kwargs)


def run_python(script: Path, *arguments: object, **kwargs) -> subprocess.CompletedProcess:
    """A recipe by plain python: one process."""
    return run(sys.executable, script, *arguments, **kwargs)


def torchrun(script: Path, *arguments: object, nproc: int = 2, **kwargs) -> subprocess.CompletedProcess:
    """torchrun itself, without our launcher."""
    return run(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        nproc,
        script,
        *arguments,
        **kwargs,
    )


def record(folder: Path) -> dict:
    """run.json of a run's folder."""
    return json.loads((folder / "run.json").read_text())


# A small run of tiny-llama on the embedded data: 20 steps, everything that changes a loss said here.
SMALL = [
    "--model_name_or_path", "tiny-llama", "--max_length", 256, "--max_steps", 20, "--learning_rate", 1e-2,
    "--gradient_accumulation_steps", 2, "--per_device_train_batch_size", 1, "--max_rows", 400,
    "--held_out_rows", 8, "--samples", 1, "--sample_tokens", 8, "--logging_steps", 1, "--save_strategy", "no",
]  # fmt: skip
