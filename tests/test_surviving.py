"""Stop a run anywhere, go on, and end with the numbers of the run that was never stopped: real runs of two ranks."""

import os
import random
import signal
import time

import pytest
from harness import SAVING, STEPS, Running, check, ended_at, launch, newest, record, refusal

from slipway import manifest, resume

pytestmark = pytest.mark.timeout(900)  # a test starts up to five runs, each of which imports torch three times
ON = ["--resume", "auto"]
KILLS = int(os.environ.get("SLIPWAY_KILLS", "40"))  # `make soak`: 200
STOPS = int(os.environ.get("SLIPWAY_STOPS", "20"))
# Less to a step and fewer to a save, so that a kill costs little; a second, shuffled epoch begins between two saves.
KILLED_STEPS = 32
KILLED = [*SAVING, "--max_rows", 60, "--max_steps", KILLED_STEPS, "--save_steps", 8, "--gradient_accumulation_steps", 1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """whole(recipe, flags) -> the folder of a run that nothing stopped; each runs once."""
    done = {}

    def once(recipe, flags=SAVING):
        if (recipe, id(flags)) not in done:
            done[recipe, id(flags)] = out = tmp_path_factory.mktemp(recipe) / "run"
            result = launch(*flags, "--save_total_limit", 9, "--output_dir", out, recipe=recipe)
            assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
        return done[recipe, id(flags)]

    return once


def same_end(folder, run, steps=STEPS):
    """Asserts that two runs of `steps` steps ended alike, to the last bit: logged numbers, answers, saved weights."""
    one, other = record(folder), record(run)
    assert one["status"] == other["status"] == "finished"
    assert [row["step"] for row in one["losses"]] == list(range(1, steps + 1))
    for part in ("losses", "held_out", "samples", "proof"):
        assert one[part] == other[part], part
    for weights in run.glob("*.safetensors"):
        assert (folder / weights.name).read_bytes() == weights.read_bytes()


def go_on(folder, run, recipe, flags=SAVING, steps=STEPS):
    """Resumes to the end, and asserts that this is the uninterrupted run's end."""
    done = launch(*flags, *ON, "--output_dir", folder, recipe=recipe, forked=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    same_end(folder, run, steps)
    return done


def at_step(run, step):
    return lambda: f"step {step}/{STEPS}" in run.out


def test_a_resumed_run_ends_bit_for_bit_as_the_uninterrupted_one(whole, tmp_path):
    ended_at(16, whole("lora"), tmp_path / "run")
    done = go_on(tmp_path / "run", whole("lora"), "lora")
    assert "going on after step 16" in done.stdout
    assert "step 16/" not in done.stdout and "step 17/" in done.stdout
    events = [(event["event"], event["step"]) for event in record(tmp_path / "run")["history"]]
    assert all(event["seconds"] > 0 for event in record(tmp_path / "run")["history"] if event["event"] == "saved")
    saved = [("saved", step) for step in (32, 48)]
    assert events == [("start", 0), ("stop", None), ("start", 16), *saved, ("finished", STEPS)]
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-32", "checkpoint-48"}


def test_without_deepspeed_a_run_goes_on_with_other_ranks(whole, tmp_path):
    ended_at(16, whole("ddp"), tmp_path / "run")
    done = launch(*SAVING, *ON, "--output_dir", tmp_path / "run", recipe="ddp", nproc=1)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "resume: from 2 ranks to 1 rank" in done.stdout
    assert record(whole("ddp"))["asked"]["data"]["sequences"] == 123  # two ranks need one more, one rank does not
    ours, theirs = (record(folder)["losses"] for folder in (tmp_path / "run", whole("ddp")))
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-5)
    epoch = -(-123 // 4)  # steps: the tokens of each row once, and of one row without labels
    assert theirs[epoch - 1]["num_tokens"] == ours[epoch - 1]["num_tokens"] + 1


def test_the_newest_good_checkpoint_is_taken_and_the_reason_said(whole, tmp_path):
    ended_at(48, whole("zero2"), tmp_path / "run")
    (tmp_path / "run/checkpoint-48/manifest.json").unlink()
    shard = tmp_path / "run/checkpoint-32/global_step32/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(bytes(content))
    done = go_on(tmp_path / "run", whole("zero2"), "zero2")
    assert "checkpoint-48 is passed over: it has no manifest" in done.stdout
    assert f"checkpoint-32 is passed over: global_step32/{shard.name} is not what was saved" in done.stdout
    assert "going on after step 16" in done.stdout


def test_a_run_that_was_killed_after_its_last_step_takes_no_step_more(whole, tmp_path):
    ended_at(48, whole("zero3"), tmp_path / "run")
    done = go_on(tmp_path / "run", whole("zero3"), "zero3")
    assert "step 49" not in done.stdout


@pytest.mark.parametrize(
    ("recipe", "target", "number"),
    [("zero2", "launcher", signal.SIGTERM), ("zero3", "one rank", signal.SIGTERM), ("ddp", "launcher", signal.SIGINT)],
)
def test_a_signal_saves_the_step_and_the_run_goes_on_from_it(recipe, target, number, whole, tmp_path):
    out = tmp_path / "run"
    words = [*SAVING, "--output_dir", out]
    with Running(tmp_path / "log", *words, recipe=recipe, forked=recipe == "zero3") as run:
        run.until(at_step(run, 3))
        family = run.family()
        # Memory that DeepSpeed's ranks share has no name by now, so that nothing is left of it, however they end.
        shared = run.shared("deepspeed_allreduce_buffer")
        assert len(shared) == (0 if recipe == "ddp" else 2) and all(name.endswith("(deleted)") for name in shared)
        (run.process if target == "launcher" else run.ranks()[1]).send_signal(number)
        assert run.code(family) == 75, run.err[-3000:]
    found, passed_over = manifest.newest(out)
    assert not passed_over and 3 <= found.step < STEPS
    assert run.err.splitlines()[-1] == (
        f"stopped by {number.name}; all ranks have ended; --resume auto goes on after step {found.step}"
    )
    assert "Traceback" not in run.err
    content = record(out)
    last = content["history"][-1]
    assert (content["status"], last["event"], last["step"], last["cause"]) == (
        "stopped",
        "stop",
        found.step,
        number.name,
    )
    go_on(out, whole(recipe), recipe)


def test_sigusr1_by_flag_and_a_second_signal_ends_at_once(tmp_path):
    """With one rank stopped the others cannot agree on a step; what ends them is the second signal."""
    out = tmp_path / "run"
    with Running(tmp_path / "log", *SAVING, "--stop_on_sigusr1", "true", "--output_dir", out, recipe="ddp") as run:
        run.until(lambda: (out / "checkpoint-16/manifest.json").exists())
        family = run.family()
        run.ranks()[1].suspend()
        run.process.send_signal(signal.SIGUSR1)
        time.sleep(1.5)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGTERM)
        assert run.code(family, timeout=20) == 75, run.err[-3000:]
    assert manifest.newest(out)[0].step >= 16
    assert "stopped by SIGTERM; all ranks have ended; --resume auto goes on after step" in run.err


def test_a_rank_that_stands_still_is_found_by_its_missing_heartbeat(tmp_path):
    out = tmp_path / "run"
    with Running(tmp_path / "log", *SAVING, "--heartbeat_seconds", 5, "--output_dir", out, recipe="ddp") as run:
        run.until(at_step(run, 2))
        family = run.family()
        run.ranks()[1].suspend()
        assert run.code(family) == 1
    assert run.err.count("error: ") == 1, run.err
    assert "error: rank 1 gave no sign of life for 5 s" in run.err
    assert "rank 1 gave no sign of life" in record(out)["history"][-1]["cause"]


def test_restarts_go_on_by_themselves(whole, tmp_path):
    out = tmp_path / "run"
    words = [*SAVING, "--output_dir", out]
    with Running(tmp_path / "log", *words, recipe="zero2", restarts=1, forked=True) as run:
        run.until(lambda: (out / "checkpoint-16/manifest.json").exists())
        run.ranks()[1].kill()
        assert run.code([], timeout=250) == 0, run.err[-3000:]
    assert "going on after step 16" in run.out
    same_end(out, whole("zero2"))


def first_step(run):
    return lambda: f"/{KILLED_STEPS}  loss" in run.out


def after(seconds):
    at = time.monotonic() + seconds
    return lambda: time.monotonic() > at


def moment(name, out, chance):
    """A question that is answered yes when the moment has come: after some steps, in a save, or at its rename."""
    if name == "some step":
        return after(chance.uniform(0, 0.4))  # of steps, not so many that the run ends before the last kill
    if name == "saving":
        return lambda: any(not (folder / "manifest.json").exists() for folder in manifest.folders(out))
    before = set(out.glob("checkpoint-*/manifest.json"))
    return lambda: set(out.glob("checkpoint-*/manifest.json*")) - before


@pytest.mark.parametrize("seed", range(1, 1 - -KILLS // 4))
def test_killed_at_any_moment_a_run_goes_on_to_the_same_end(seed, whole, tmp_path):
    chance, out, recipe = random.Random(seed), tmp_path / "run", ("zero2", "zero3")[seed % 2]
    moments = chance.sample(["some step", "some step", "saving", "renaming"], 4)
    targets = chance.sample(["launcher", "rank 0", "rank 1", f"rank {chance.randrange(2)}"], 4)
    for number, (name, target) in enumerate(zip(moments, targets, strict=True)):
        words = [*KILLED, *ON, "--output_dir", out]
        with Running(tmp_path / f"log{number}", *words, recipe=recipe, forked=True) as run:
            run.until(first_step(run))
            family = run.family()
            victim = run.process if target == "launcher" else run.ranks()[int(target[-1])]
            run.until(moment(name, out, chance), look_s=0.005)
            victim.kill()
            code = run.code(family)
            assert code == (-9 if target == "launcher" else 1), (name, target, run.err[-3000:])
        if target != "launcher":
            assert run.err.count("error: ") == 1 and f"error: {target} was ended by SIGKILL" in run.err, run.err
            assert "Traceback" not in run.err and "failed (exitcode" not in run.err
        newest(out)
    go_on(out, whole(recipe, KILLED), recipe, KILLED, KILLED_STEPS)


@pytest.mark.parametrize("seed", range(1, 1 - -STOPS // 5))
def test_stopped_at_any_moment_a_run_has_saved_and_goes_on_to_the_same_end(seed, whole, tmp_path):
    chance, out, recipe, before = random.Random(seed), tmp_path / "run", ("zero2", "zero3")[seed % 2], 0
    for number in range(5):
        words = [*KILLED, *ON, "--output_dir", out]
        with Running(tmp_path / f"log{number}", *words, recipe=recipe, forked=True) as run:
            run.until(first_step(run))
            family = run.family()
            run.until(after(chance.uniform(0, 0.2)), look_s=0.005)
            (run.process if (seed + number) % 2 else chance.choice(run.ranks())).send_signal(signal.SIGTERM)
            assert run.code(family) == 75, run.err[-3000:]
        found, passed_over = newest(out)
        assert found.step > before and not passed_over
        before = found.step
        last = f"stopped by SIGTERM; all ranks have ended; --resume auto goes on after step {before}"
        assert run.err.splitlines()[-1] == last and "Traceback" not in run.err
    go_on(out, whole(recipe, KILLED), recipe, KILLED, KILLED_STEPS)


def test_the_same_command_again_says_that_the_run_is_unfinished_and_how_to_go_on(whole, tmp_path):
    ended_at(16, whole("zero2"), tmp_path / "run")
    done = launch(*SAVING, "--output_dir", tmp_path / "run", recipe="zero2")
    assert done.returncode == 2
    assert "holds an unfinished run" in done.stderr
    assert (
        "RESUME=auto (--resume auto) goes on with it: last good checkpoint: step 16 of 48; it was killed" in done.stderr
    )
    assert "--overwrite true" in done.stderr
    assert not (tmp_path / "run/checkpoint-32").exists()
    assert check(tmp_path / "run", "--resume_from_checkpoint", "true", recipe="zero2").output == tmp_path / "run"


def test_a_run_is_overwritten_or_gone_on_with(whole, tmp_path, monkeypatch):
    out = tmp_path / "run"
    ended_at(16, whole("zero2"), out)
    assert "a run is gone on with or overwritten" in refusal(out, "--overwrite", "true", *ON, recipe="zero2")
    # The launcher starts the same command again: from the new run's checkpoint, never from the overwritten one's.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("SLIPWAY_LAUNCHED_AT", str(time.time() + 1))
    plan = check(out, "--overwrite", "true", recipe="zero2")
    assert resume.find(plan).step == 0
    monkeypatch.setenv("SLIPWAY_LAUNCHED_AT", str(time.time() - 60))
    assert resume.find(plan).step == 16


def test_going_on_with_another_run_is_refused_and_each_difference_named(whole, tmp_path):
    ended_at(16, whole("zero2"), tmp_path / "run")
    other = ["--seed", 7, "--learning_rate", 0.5, "--max_rows", 151, "--packing", "false", "--logging_steps", 3]
    said = refusal(tmp_path / "run", *other, *ON, recipe="zero2")
    for line in ("seed: 42 then, 7 now", "learning_rate: 0.01 then, 0.5 now", "max_rows: 150 then, 151 now",
                 "packing: True then, False now", "data: "):  # fmt: skip
        assert f"\n  {line}" in said, line
    assert "logging_steps" not in said
    assert f"MODEL={tmp_path / 'run' / 'checkpoint-16'}" in said


def test_a_checkpoint_of_another_folder_is_not_read(whole, tmp_path):
    run = whole("zero2")
    said = refusal(tmp_path / "run", "--resume", run / "checkpoint-16", recipe="zero2")
    assert "a run goes on in its own folder" in said and f"MODEL={run / 'checkpoint-16'}" in said
    assert "holds a finished run" in refusal(run, *ON, recipe="zero2")
    ended_at(48, run, tmp_path / "other")
    said = refusal(tmp_path / "other", "--resume", tmp_path / "other/checkpoint-16", recipe="zero2")
    assert "checkpoint-48 is newer" in said
