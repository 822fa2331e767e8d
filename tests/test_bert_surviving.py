"""What becomes of a BERT run whose rank, launcher or disk fails, under the real launcher."""

import shutil
import signal
import sys

import pytest
from harness import ROOT, TRAIN, Running, launch_bert, record
from harness import run as run_command
from small_bert import write_model, write_texts

from slipway import manifest

STEPS = 400


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """14 steps an epoch of a model whose checkpoint has 4 MB."""
    top = tmp_path_factory.mktemp("job")
    model = write_model(top / "model", hidden_size=128, intermediate_size=256)
    texts = write_texts(top / "texts.csv", 120)
    words = ["--model", model, "--data", texts, "--per_device_train_batch_size", 4, "--learning_rate", 1e-3]
    return [*words, "--logging_steps", 1, "--num_train_epochs", 9999, "--report_to", "none", "--held_out", 0.05]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """The folder of a run that nothing stopped, with checkpoints at half its steps and at their end."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = launch_bert(*flags, "--save_steps", STEPS // 2, "--max_steps", STEPS, "--output_dir", out)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def at_step(run, step, times=1):
    return lambda: run.out.count(f"step {step}/") >= times


def test_a_rank_that_stands_still_is_found_by_its_missing_heartbeat(flags, tmp_path):
    out = tmp_path / "run"
    with Running(tmp_path / "log", *flags, "--heartbeat_seconds", 5, "--output_dir", out, forked=True) as run:
        run.until(at_step(run, 2))
        family = run.family()
        run.ranks()[1].suspend()
        assert run.code(family) == 1
    assert run.err.count("error: ") == 1, run.err
    assert "error: rank 1 gave no sign of life for 5 s (--heartbeat_seconds)" in run.err


def test_no_rank_outlives_a_killed_launcher(flags, tmp_path):
    with Running(tmp_path / "log", *flags, "--output_dir", tmp_path / "run") as run:
        run.until(at_step(run, 2))
        family = run.family()
        assert len(run.ranks()) == 2
        run.process.kill()
        assert run.code(family) == -signal.SIGKILL


def test_a_signal_ends_the_ranks_and_tells_where_the_run_goes_on(flags, tmp_path):
    out = tmp_path / "run"
    with Running(tmp_path / "log", *flags, "--save_steps", 5, "--output_dir", out) as run:
        run.until(at_step(run, 12))
        family = run.family()
        run.process.terminate()
        assert run.code(family) == 75, run.err
    step = manifest.newest(out)[0].step
    assert step >= 10
    said = f"stopped by SIGTERM; all ranks have ended; --resume auto goes on after step {step}"
    assert run.err.splitlines()[-1] == said and "Traceback" not in run.err
    asked = [TRAIN, *flags, "--save_steps", 5, "--resume", "auto", "--output_dir", out]
    plan = run_command(sys.executable, ROOT / "scripts/launch.py", "--resume_plan", *asked)
    assert plan.returncode == 0, plan.stderr[-3000:]
    assert f"goes on after step {step}, from {out}/checkpoint-{step}" in " ".join(plan.stdout.split())


def test_restarts_go_on_from_the_checkpoint_they_were_given_then_from_their_own(whole, flags, tmp_path):
    out = tmp_path / "run"
    saves = ["--resume", whole / "checkpoint-200", "--save_steps", 150]
    words = [*flags, "--max_steps", STEPS, *saves, "--output_dir", out]
    with Running(tmp_path / "log", *words, restarts=2, forked=True) as run:
        run.until(at_step(run, 202))
        run.ranks()[1].kill()
        run.until(at_step(run, 202, times=2))
        assert not list(out.glob("checkpoint-*"))
        run.until(at_step(run, 302))
        run.ranks()[0].kill()
        assert run.code([], timeout=250) == 0, run.err[-3000:]
    assert run.out.count("step 201/") == 2 and "step 200/" not in run.out
    assert run.out.count("step 301/") == 2 and run.out.count("step 300/") == 1
    assert record(out)["losses"] == record(whole)["losses"]
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_full_disk_leaves_the_last_good_checkpoint(flags, small_disk, tmp_path):
    disk = small_disk(24)
    out = disk / "run"
    saves = ["--save_steps", 100, "--save_total_limit", 1, "--max_steps", 250]
    with Running(tmp_path / "log", *flags, *saves, "--output_dir", out, forked=True) as run:
        run.until(at_step(run, 1))
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 7 * 2**20))  # the first needs 5 by estimate
        assert run.code(run.family()) == 0, run.err[-3000:]
    assert [folder.name for folder in manifest.folders(out)] == ["checkpoint-100"]
    assert manifest.newest(out)[0].step == 100
    assert "step 200 is not saved, there is no room: about 0.00" in run.err
    assert "the last checkpoint is that of step 100; training goes on" in run.err
    assert record(out)["status"] == "finished"
