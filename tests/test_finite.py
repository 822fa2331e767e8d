"""Numbers that go bad end a run: a real one whose weights are spoiled, and what counts as a jump and as a minimum."""

import math
from types import SimpleNamespace

import pytest
import torch
from harness import FINETUNE, ROOT, SAVING, record, torchrun

from slipway import finite


def test_a_loss_that_jumps_ends_the_run_before_it_is_saved(tmp_path):
    out, config = tmp_path / "run", FINETUNE.parent / "ddp.yaml"
    flags = ["--save_steps", 1, "--save_total_limit", 99, "--logging_steps", 7, "--output_dir", out]
    done = torchrun(ROOT / "tests/mutant.py", "--config", config, *SAVING, *flags, MUTANT="weights spoiled")
    assert done.returncode != 0
    assert "error: step 9 made the loss jump, and was not saved:\n  rank " in done.stderr, done.stderr[-3000:]
    assert "of the 8 steps before it; a row of it starts: " in done.stderr
    assert (out / "checkpoint-8/manifest.json").exists() and not (out / "checkpoint-9").exists()
    last = record(out)["history"][-1]
    assert (last["event"], last["step"]) == ("stop", 9) and "the loss is " in last["cause"]


@pytest.mark.parametrize(
    ("recent", "loss", "jumps"),
    [
        ([2.0] * 20, 25.0, True),
        ([2.0] * 20, 19.0, False),  # not ten times as much
        ([0.05] * 20, 9.0, False),  # a hard row after easy ones: no worse than guessing among 50,000 tokens
        ([0.0] * 20, 11.0, True),
        ([2.0] * 4, 25.0, False),  # too few to know what is usual
        ([2.0] * 15 + [30.0] * 5, 25.0, True),  # the median is not led astray
    ],
)
def test_a_jump_is_ten_times_the_usual_and_worse_than_guessing(recent, loss, jumps):
    assert bool(finite.jump(recent, loss, 50_000)) == jumps


def test_the_loss_scale_of_deepspeed_and_of_torch_is_seen_to_fall():
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    scaler = DynamicLossScaler(2.0**16, 2.0, 1000, 1.0, 1, False, dtype=torch.float16)
    engine = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))
    trainer = SimpleNamespace(is_deepspeed_enabled=True, model_wrapped=engine)
    assert finite.lowest_scale(trainer) is None
    scaler.cur_scale = 1.0
    assert finite.lowest_scale(trainer) == 1
    engine.optimizer.loss_scaler = LossScaler(1.0)  # a fixed one may be what it likes
    assert finite.lowest_scale(trainer) is None

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    trainer = SimpleNamespace(is_deepspeed_enabled=False, accelerator=SimpleNamespace(scaler=scaler))
    assert finite.lowest_scale(trainer) is None
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert finite.lowest_scale(trainer) == 1
    trainer.accelerator.scaler = None
    assert finite.lowest_scale(trainer) is None
