"""What a checkpoint must not hold, and where it must not begin: half of itself, a full disk, numbers that are none."""

import shutil

import pytest
from harness import FINETUNE, ROOT, SAVING, Running, launch, newest, record, torchrun


def test_a_mutant_that_writes_the_manifest_first_is_seen(tmp_path):
    script, out = ROOT / "tests" / "mutant.py", tmp_path / "run"
    config = FINETUNE.parent / "zero2.yaml"
    done = torchrun(script, "--config", config, *SAVING, "--output_dir", out, MUTANT="manifest first")
    assert done.returncode != 0
    with pytest.raises(AssertionError, match="rng_state_1"):
        newest(out)


@pytest.mark.parametrize(("on_full_disk", "code"), [("go_on", 0), ("stop", 2)])
def test_a_full_disk_leaves_the_last_good_checkpoint(on_full_disk, code, small_disk, tmp_path):
    disk = small_disk(20)  # room for two checkpoints of tiny-llama
    out = disk / "run"
    flags = ["--save_total_limit", 1, "--on_full_disk", on_full_disk, "--output_dir", out]
    with Running(tmp_path / "log", *SAVING, *flags, recipe="zero2", forked=True) as run:
        run.until(lambda: (out / "checkpoint-32/manifest.json").exists() and not (out / "checkpoint-16").exists())
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 4 * 2**20))
        assert run.code(run.family()) == code, run.err[-3000:]
    assert newest(out)[0].step == 32
    error = "error: " if code else ""
    assert run.err.count(f"{error}step 48 is not saved, there is no room") == 1, run.err
    assert "the last checkpoint is that of step 32" in run.err
    assert "Traceback" not in run.err
    assert record(out)["status"] == ("finished" if code == 0 else "stopped")


@pytest.mark.parametrize("recipe", ["ddp", "zero2"])
def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(recipe, tmp_path):
    flags = ["--learning_rate", 1e30, "--save_steps", 1, "--save_total_limit", 99, "--output_dir", tmp_path / "run"]
    done = launch(*SAVING, *flags, recipe=recipe)
    assert done.returncode == 2, done.stderr[-3000:]
    assert done.stderr.count("error: ") == 1 and "gave no finite number, and was not saved" in done.stderr
    assert "a row of it starts: " in done.stderr
    last = record(tmp_path / "run")["history"][-1]
    assert last["event"] == "stop" and last["step"] >= 1
    assert not (tmp_path / "run" / f"checkpoint-{last['step']}").exists()
