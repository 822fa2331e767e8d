"""Recipes in the image, as strictly as it is promised: unknown user, read-only root, no network, no compiler called."""

import json
import os
import random
import time
import uuid

import pytest
from containers import IMAGE, STRICT, docker, inside, shell, writable
from harness import record

from slipway import manifest

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]
SMALL = (
    "--max_length 128 --max_steps 4 --gradient_accumulation_steps 2 --max_rows 60 --held_out_rows 4 --samples 1 "
    "--sample_tokens 4 --logging_steps 1 --save_strategy no"
)
STOPS = int(os.environ.get("SLIPWAY_STOPS", "2"))
# Compilers that write down that they were called, before those of the image on PATH.
SPY = '#!/bin/sh\necho "$0 $*" >> /spy/called\nexit 1\n'


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A cache that the runs share: the model is unpacked once."""
    return writable(tmp_path_factory.mktemp("cache"), 12345, 0)


@pytest.fixture
def spies(tmp_path):
    folder = writable(tmp_path / "spies", 12345, 0)
    for name in ("gcc", "g++", "cc", "c++", "nvcc", "ninja", "cl", "clang", "clang++", "gcc-13", "g++-13"):
        (folder / name).write_text(SPY)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("recipe", ["zero3", "zero2_offload"])
def test_a_recipe_trains_offline_as_anyone_on_a_read_only_root(recipe, tmp_path, models, spies):
    out = writable(tmp_path / "out", 12345, 0)
    mounts = ("--volume", f"{out}:/slipway/outputs", "--volume", f"{models}:/cache", "--volume", f"{spies}:/spy")
    path = "/spy:/opt/venv/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin"
    flags = (*STRICT, *mounts, "--env", f"PATH={path}", "--env", "TORCH_EXTENSIONS_DIR=/usr/share/slipway/none")
    words = ("make", "finetune-llama", f"RECIPE={recipe}", "MODEL=tiny-llama", f"ARGS={SMALL}")
    done = inside(*words, flags=flags, timeout=800)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    assert not (spies / "called").exists(), (spies / "called").read_text()
    got = record(out / recipe)["got"]
    assert got["world_size"] == 2 and got["zero_stage"] == (3 if recipe == "zero3" else 2), got
    assert (out / recipe / "run.json").stat().st_uid == 12345


def test_the_spies_see_a_compiler_that_is_called(spies):
    line = "PATH=/spy:$PATH; if g++ --version; then exit 9; fi"  # the spy answers with a failure
    shell(line, flags=(*STRICT, "--volume", f"{spies}:/spy"))
    assert "g++ --version" in (spies / "called").read_text()


@pytest.mark.parametrize(("signal", "code"), [("TERM", 143), ("INT", 130)])
def test_a_training_ends_cleanly_when_it_is_told_to(signal, code, tmp_path, models):
    """`docker stop`, and Ctrl-C: all ranks end, nothing has to be killed, and the exit code says what it was."""
    name = f"slipway-train-{uuid.uuid4().hex[:8]}"
    mounts = ("--volume", f"{writable(tmp_path / 'out', 12345, 0)}:/slipway/outputs", "--volume", f"{models}:/cache")
    words = ("make", "finetune-llama", "MODEL=tiny-llama", f"ARGS={SMALL.replace('--max_steps 4', '--max_steps 4000')}")
    docker("run", "--detach", "--name", name, *STRICT, *mounts, IMAGE, *words)
    try:
        wait_for(name, "loss")
        start = time.monotonic()
        docker("kill", "--signal", signal, name)
        docker("wait", name, timeout=60)
        assert time.monotonic() - start < 45
        state = json.loads(docker("inspect", "--format", "{{json .State}}", name).stdout)
        said = docker("logs", name).stderr
        assert f"stopped by SIG{signal}; all ranks have ended" in said and f"Error {code}" in said, said[-2000:]
        assert state["ExitCode"] == code and not state["OOMKilled"], state
    finally:
        docker("rm", "--force", name)


def test_docker_stop_leaves_a_complete_checkpoint_and_the_code_to_requeue_on(tmp_path, models):
    """At some moment of a start's first steps, within the 10 s that Docker gives; the next start goes on."""
    chance, name = random.Random(1), f"slipway-stop-{uuid.uuid4().hex[:8]}"
    out = writable(tmp_path / "out", 12345, 0)
    mounts = ("--volume", f"{out}:/slipway/outputs", "--volume", f"{models}:/cache")
    saving = SMALL.replace("--max_steps 4", "--max_steps 4000").replace("--save_strategy no", "--save_steps 4000")
    config = ("--config", "recipes/llama/zero3.yaml", "--model_name_or_path", "tiny-llama", "--save_strategy", "steps")
    words = ("python", "scripts/launch.py", "recipes/llama/finetune.py", *config, *saving.split(), "--resume", "auto")
    docker("create", "--name", name, *STRICT, *mounts, IMAGE, *words)
    step = 0
    try:
        for _ in range(STOPS):
            docker("start", name)
            wait_for(name, f"step {step + 1}/4000")
            time.sleep(chance.uniform(0, 3))
            docker("stop", name)
            state = json.loads(docker("inspect", "--format", "{{json .State}}", name).stdout)
            said = docker("logs", name).stderr
            found, passed_over = manifest.newest(out / "zero3")
            assert found and found.step > step and not passed_over, said[-2000:]
            step = found.step
            assert state["ExitCode"] == 75, (state, said[-2000:])
            last = f"stopped by SIGTERM; all ranks have ended; --resume auto goes on after step {step}"
            assert said.splitlines()[-1] == last
    finally:
        docker("rm", "--force", name)


def wait_for(name: str, text: str) -> None:
    """Until the container prints `text` or ends."""
    for _ in range(240):
        logs = docker("logs", name)
        if text in logs.stdout + logs.stderr:
            return
        assert docker("inspect", "--format", "{{.State.Running}}", name).stdout.strip() == "true", logs.stderr[-3000:]
        time.sleep(1)
    raise AssertionError(f"no {text!r} within 4 minutes")
