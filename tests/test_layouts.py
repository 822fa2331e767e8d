"""A run goes on with other ranks, another ZeRO stage, offload on or off: real runs, held against one never stopped."""

import shutil
import sys

import pytest
from harness import FINETUNE, ROOT, SAVING, STEPS, check, ended_at, launch, record, refusal, run

from slipway import manifest, partitions, universal
from slipway.errors import InputError

pytestmark = pytest.mark.timeout(600)
# 1-dimensional weights do not decay, so their group of the optimizer is told from the other.
DECAYING = [*SAVING, "--weight_decay", 0.5, "--save_total_limit", 9]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two ranks under ZeRO-2 that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = launch(*DECAYING, "--output_dir", folder, recipe="zero2")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


def losses(folder):
    return [row["loss"] for row in record(folder)["losses"]]


def test_ranks_stage_and_offload_change_in_one_chain_and_the_losses_stay(whole, tmp_path):
    assert record(whole)["asked"]["data"]["sequences"] % 2  # two ranks need one more, one rank does not
    before, layouts = whole, [("zero3", 1, 16), ("zero2_offload", 2, 32)]
    for recipe, ranks, step in layouts:
        out = tmp_path / recipe
        ended_at(step, before, out)
        (out / f"checkpoint-{step}.universal/global_step{step}/zero").mkdir(parents=True)  # a start that was killed
        done = launch(*DECAYING, "--resume", "auto", "--output_dir", out, recipe=recipe, nproc=ranks, forked=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        got = record(out)["got"]
        stage, where = int(recipe[4]), "cpu" if "offload" in recipe else "none"
        assert (got["world_size"], got["zero_stage"], got["offload_optimizer"]) == (ranks, stage, where)
        assert f"going on after step {step}" in done.stdout
        start = [event for event in record(out)["history"] if event["event"] == "start"][-1]
        assert start["step"] == step and f"{ranks} rank" in start["conversion"].partition(" to ")[2]
        assert losses(out) == pytest.approx(losses(whole), rel=1e-5)
        assert ("stays 4: micro-batch 1 x accumulation 4 x 1 rank" in done.stdout) == (ranks == 1)
        assert not list(out.glob("*.universal"))
        before = out
    assert record(before)["held_out"]["after"]["loss"] == pytest.approx(
        record(whole)["held_out"]["after"]["loss"], rel=1e-5
    )
    # The optimizer came along too: its moments after the last step are those of the run that was never stopped.
    found = [partitions.Partitions(folder / f"checkpoint-{STEPS}/global_step{STEPS}") for folder in (before, whole)]
    with found[0].opened() as one, found[1].opened() as other:
        assert found[0].trained() == found[1].trained()
        for name in found[0].trained():
            for kind in ("", "exp_avg", "exp_avg_sq"):
                a, b = one(name, kind), other(name, kind)
                # As a whole: Adam moves an element whose gradient is rounding alone by the sign of that.
                assert (a - b).norm() < 1e-4 * b.norm(), (name, kind)


def test_an_adapter_goes_over_too(tmp_path):
    short = [*DECAYING, "--max_steps", 12, "--save_steps", 4]
    done = launch(*short, "--output_dir", tmp_path / "whole", recipe="lora", forked=True)
    assert done.returncode == 0, done.stderr[-4000:]
    ended_at(4, tmp_path / "whole", tmp_path / "run")
    words = [*short, "--resume", "auto", "--output_dir", tmp_path / "run"]
    done = launch(*words, recipe="lora_zero3", nproc=1, forked=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "going on after step 4" in done.stdout and record(tmp_path / "run")["got"]["trained"] == "adapter"
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_a_disk_that_fills_during_the_conversion_loses_nothing(whole, tmp_path, small_disk):
    disk = small_disk(64)
    ended_at(16, whole, disk / "run")
    found = manifest.read(disk / "run/checkpoint-16")
    plan = check(disk / "run", *DECAYING, "--resume", "auto", recipe="zero3")
    # As much as is asked for: what files take besides their content comes on top.
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - universal.size(found) - 2**14))
    with pytest.raises(InputError, match=r"checkpoint-16.universal cannot be written \(.*; checkpoint-16 is as it was"):
        universal.convert(found, plan)
    assert not universal.folder_of(found).exists()
    assert manifest.read(disk / "run/checkpoint-16") == found


def test_a_batch_that_the_ranks_cannot_share_is_refused_with_the_arithmetic(whole, tmp_path):
    ended_at(16, whole, tmp_path / "run")
    said = refusal(tmp_path / "run", *DECAYING, "--resume", "auto", recipe="zero2", nproc=3)
    assert "a global batch of 4 (micro-batch x accumulation x ranks: 1 x 2 x 2), which 3 ranks cannot share" in said
    assert "4 / 3 = 1.33" in said and "NPROC=2" in said


def test_what_is_no_layout_is_refused_beside_it(whole, tmp_path):
    ended_at(16, whole, tmp_path / "run")
    said = refusal(tmp_path / "run", *DECAYING, "--resume", "auto", "--learning_rate", 0.5, recipe="zero3", nproc=1)
    assert "\n  ds_config: zero_optimization.stage: 2 then, 3 now\n" in said
    assert "learning_rate: 0.01 then, 0.5 now" in said and "world_size: 2 then, 1 now" in said
    said = refusal(tmp_path / "run", *DECAYING, "--resume", "auto", recipe="ddp")
    assert "\n  ds_config: a config then, None now\n" in said
    assert "zero_stage: 2 then, 0 now" in said and "NPROC=2 and a recipe of ZeRO stage 2" in said


@pytest.mark.parametrize(("strategy", "goes_on"), [("sequential", True), ("group_by_length", False)])
def test_an_order_of_rows_that_depends_on_the_ranks_batch_is_not_gone_on_with(strategy, goes_on, whole):
    was = manifest.read(whole / "checkpoint-16").facts["asked"]
    was["arguments"]["train_sampling_strategy"] = strategy
    now = was | {"world_size": 1, "arguments": was["arguments"] | {"gradient_accumulation_steps": 4}}
    assert universal.bridges(was, now, {"world_size", "gradient_accumulation_steps"}) == goes_on
    assert universal.bridges(was, was | {"zero_stage": 3}, {"zero_stage"})


def test_a_disk_without_room_for_the_conversion_is_said_before_the_launch(whole, tmp_path, small_disk):
    disk = small_disk(64)
    ended_at(16, whole, disk / "run")
    need = universal.size(manifest.read(whole / "checkpoint-16"))
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - need + 2**16))
    # A run that saves no more needs no room but that.
    words = [*DECAYING, "--resume", "auto", "--save_strategy", "no"]
    assert "checkpoint-16 has to be converted for this run" in refusal(disk / "run", *words, recipe="zero3")
    shutil.move(disk / "run", tmp_path / "run")
    assert check(tmp_path / "run", *words, recipe="zero3").output == tmp_path / "run"


def test_the_plan_of_a_resume_says_what_it_takes_and_changes_nothing(whole, tmp_path):
    out = tmp_path / "run"
    ended_at(32, whole, out)
    shutil.copyfile(whole / "run.json", out / "run.json")  # with the seconds of its saves
    (out / "run.json").write_text((out / "run.json").read_text().replace('"finished"', '"started"'))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    one = [
        "after step 32 of 48",
        "stays 4: micro-batch 1 x accumulation 4 x 1 rank",
        "GiB more in",
        "GiB/s of the last",
    ]
    for ranks, words in {
        1: ["from 2 ranks under ZeRO-2 to 1 rank under ZeRO-3", *one],
        2: ["from 2 ranks under ZeRO-2 to 2 ranks under ZeRO-3"],
    }.items():
        asked = ["--config", FINETUNE.parent / "zero3.yaml", *DECAYING, "--resume", "auto", "--output_dir", out]
        done = run(sys.executable, ROOT / "scripts/launch.py", "--nproc", ranks, "--resume_plan", FINETUNE, *asked)
        assert done.returncode == 0, done.stderr[-3000:]
        said = " ".join(done.stdout.split())
        assert [word for word in words if word not in said] == []
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
