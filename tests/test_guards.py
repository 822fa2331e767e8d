"""Break what a run proves about itself and see the run stop; end it from outside and see nothing left running."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from harness import FINETUNE, ROOT, SMALL, launch, record, run, torchrun

ONE_STEP = [*SMALL, "--max_steps", 1, "--samples", 0, "--held_out_rows", 0]
CONFIG = FINETUNE.parent / "zero3.yaml"


@pytest.mark.parametrize(
    ("mutant", "recipe", "found"),
    [
        ("ds_config dropped", "zero3", "zero_stage: asked 3, got"),
        ("other stage", "zero3", "zero_stage: asked 3, got another"),
        ("other stage", "zero2", "zero_stage: asked 2, got 1 (rank 1)"),
        ("adapter forgotten", "lora", "trained: asked adapter, got all"),
        ("saved without gathering", "zero3", "empty"),
    ],
)
def test_a_broken_run_stops_itself(mutant, recipe, found, tmp_path):
    config = FINETUNE.parent / f"{recipe}.yaml"
    script = Path(__file__).with_name("mutant.py")
    out = tmp_path / "run"
    done = torchrun(script, "--config", config, *ONE_STEP, "--output_dir", out, MUTANT=mutant, STAGE="1")
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1, done.stderr[-3000:]
    assert found in done.stderr
    assert record(out)["status"] == "started"


def test_ranks_without_room_to_gather_answer_layer_by_layer_the_same(tmp_path):
    script, samples = Path(__file__).with_name("mutant.py"), []
    for mutant in ("nothing", "no room to gather"):
        flags = [*ONE_STEP, "--held_out_rows", 8, "--samples", 2, "--output_dir", tmp_path / mutant]
        done = torchrun(script, "--config", CONFIG, *flags, MUTANT=mutant)
        assert done.returncode == 0, done.stderr[-3000:]
        samples.append(record(tmp_path / mutant)["samples"])
    assert len(samples[0]) == 2
    assert samples[0] == samples[1]


def test_one_process_where_two_were_asked_is_an_error(tmp_path):
    done = torchrun(FINETUNE, "--config", CONFIG, *ONE_STEP, "--output_dir", tmp_path, nproc=1, SLIPWAY_WORLD_SIZE="2")
    assert done.returncode != 0
    assert "2 ranks were asked for (scripts/launch.py), 1 started" in done.stderr


def test_accelerates_single_process_on_a_cpu_is_named(tmp_path):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", 2]
    done = run(*launcher, FINETUNE, "--config", CONFIG, *ONE_STEP, "--output_dir", tmp_path)
    assert done.returncode != 0
    assert "2 ranks were asked for (accelerate launch --num_processes), 1 started" in done.stderr


TUTORIAL = [
    "--model_name_or_path", "tiny-llama", "--dataset_name", "docstrings", "--per_device_train_batch_size", 4,
    "--gradient_accumulation_steps", 8, "--learning_rate", "2e-5", "--num_train_epochs", 3,
    "--max_rows", 200, "--max_length", 128, "--max_steps", 2, "--samples", 1, "--sample_tokens", 4,
]  # fmt: skip


def test_the_tutorials_command_runs_under_torchrun(tmp_path):
    done = torchrun(FINETUNE, *TUTORIAL, "--output_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    content = record(tmp_path / "run")
    assert content["got"]["world_size"] == 2
    assert content["got"]["engine"] == "DistributedDataParallel"
    assert content["got"]["gradient_accumulation_steps"] == 8


def test_the_tutorials_command_runs_under_accelerate_launch_with_a_ds_config(tmp_path):
    launcher = [
        sys.executable, "-m", "accelerate.commands.launch", "--num_processes", 2, "--num_machines", 1,
        "--use_deepspeed", "--deepspeed_config_file", ROOT / "ds_configs" / "zero2.json",
    ]  # fmt: skip
    done = run(*launcher, FINETUNE, *TUTORIAL, "--output_dir", tmp_path / "run", DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    got = record(tmp_path / "run")["got"]
    assert (got["world_size"], got["engine"], got["zero_stage"]) == (2, "DeepSpeedEngine", 2)


def test_the_key_of_accelerates_yaml_that_leaves_no_room_for_the_ds_config_is_named(tmp_path):
    section = {"deepspeed_config_file": str(ROOT / "ds_configs" / "zero2.json"), "zero_stage": 3}
    yaml = {"distributed_type": "DEEPSPEED", "num_processes": 2, "num_machines": 1, "deepspeed_config": section}
    (tmp_path / "accelerate.yaml").write_text(json.dumps(yaml))
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", tmp_path / "accelerate.yaml"]
    done = run(*launcher, FINETUNE, *TUTORIAL, "--output_dir", tmp_path / "run", DS_ACCELERATOR="cpu")
    assert done.returncode != 0
    assert "zero_stage cannot stand beside deepspeed_config_file" in done.stderr
    assert f"what counts is in {section['deepspeed_config_file']}" in done.stderr
    assert not (tmp_path / "run").exists()


def test_ctrl_c_ends_all_ranks_with_130(tmp_path):
    config = FINETUNE.parent / "ddp.yaml"
    flags = [*SMALL, "--max_steps", 100000, "--output_dir", tmp_path / "run"]
    words = [sys.executable, ROOT / "scripts/launch.py", FINETUNE, "--config", config, *flags]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        process = subprocess.Popen([str(word) for word in words], stdout=out, stderr=err, start_new_session=True)
    deadline = time.time() + 150
    while "step 2/" not in (tmp_path / "out").read_text() and time.time() < deadline and process.poll() is None:
        time.sleep(0.2)
    ranks = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130, (tmp_path / "err").read_text()[-3000:]
    assert "stopped by SIGINT" in (tmp_path / "err").read_text()
    assert "Traceback" not in (tmp_path / "err").read_text()
    gone, alive = psutil.wait_procs(ranks, timeout=10)
    assert len(gone) >= 2
    assert not alive


def test_a_killed_rank_is_explained(tmp_path):
    config = FINETUNE.parent / "ddp.yaml"
    flags = [*SMALL, "--max_steps", 100000, "--output_dir", tmp_path / "run"]
    words = [sys.executable, ROOT / "scripts/launch.py", FINETUNE, "--config", config, *flags]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        process = subprocess.Popen([str(word) for word in words], stdout=out, stderr=err, start_new_session=True)
    deadline = time.time() + 150
    while "step 2/" not in (tmp_path / "out").read_text() and time.time() < deadline and process.poll() is None:
        time.sleep(0.2)
    ranks = [p for p in psutil.Process(process.pid).children() if str(FINETUNE) in p.cmdline()]
    ranks[1].kill()
    assert process.wait(90) == 1
    assert "was ended by SIGKILL" in (tmp_path / "err").read_text()
    assert "memory" in (tmp_path / "err").read_text()


def test_an_output_that_holds_a_run_is_kept(tmp_path):
    done = launch(*ONE_STEP, "--output_dir", tmp_path / "run", recipe="ddp")
    assert done.returncode == 0, done.stderr[-3000:]
    before = (tmp_path / "run" / "run.json").read_bytes()
    again = launch(*ONE_STEP, "--output_dir", tmp_path / "run", recipe="ddp")
    assert again.returncode == 2
    assert "holds a finished run" in again.stderr and "--overwrite true" in again.stderr
    assert (tmp_path / "run" / "run.json").read_bytes() == before
