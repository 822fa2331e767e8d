"""The BERT recipe's loop: the same losses however a batch is divided, and as a loop written by hand."""

import pytest
import torch
from harness import TRAIN, record, run_python, torchrun

SEED, ROWS, STEPS, BATCH, RATE = 3, 101, 30, 32, 1e-4
# 101 rows are three full steps and one of 5 rows an epoch: a window that is cut, and a batch that is filled up.
JOB = [
    "--max_rows", ROWS, "--max_steps", STEPS, "--num_train_epochs", 8, "--seed", SEED, "--learning_rate", RATE,
    "--num_hidden_layers", 1, "--dropout", 0, "--logging_steps", 1, "--report_to", "none",
]  # fmt: skip
LAYOUTS = {"1 x 32": (1, 32, 1), "2 x 16": (2, 16, 1), "2 x 4 x 4": (2, 4, 4)}  # ranks, rows at once, accumulation


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(layout) -> folder of the run; each layout runs once."""
    done = {}

    def once(layout):
        if layout not in done:
            ranks, batch, accumulation = LAYOUTS[layout]
            folder = tmp_path_factory.mktemp("bert") / "run"
            flags = ["--per_device_train_batch_size", batch, "--gradient_accumulation_steps", accumulation]
            words = [TRAIN, *JOB, *flags, "--output_dir", folder]
            result = run_python(*words) if ranks == 1 else torchrun(*words, nproc=ranks)
            assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
            assert f"{ranks} x CPU" in result.stdout
            done[layout] = folder
        return done[layout]

    return once


@pytest.fixture(scope="module")
def by_hand():
    """(losses, gradient norms, rates) of plain torch: each step's rows at once, in an order that the seed says."""
    from slipway import dummy

    rows = dummy.Embeddings(ROWS, SEED)
    torch.manual_seed(SEED)
    model = dummy.model(1, 0.0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    found = []
    for epoch in range(8):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(SEED + epoch))
        for part in order.split(BATCH):
            if len(found) == STEPS:
                return tuple(zip(*found, strict=True))
            step, warm = len(found), round(0.1 * STEPS)
            rate = RATE * (step / warm if step < warm else (STEPS - step) / (STEPS - warm))
            optimizer.param_groups[0]["lr"] = rate
            loss = model(inputs_embeds=rows.embeddings[part], labels=rows.labels[part]).loss
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append((loss.item(), norm.item(), rate))
    raise AssertionError("too few steps")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_a_loop_by_hand_however_the_batch_is_divided(layout, trained, by_hand):
    logged = record(trained(layout))["losses"]
    losses, norms, rates = by_hand
    assert [row["step"] for row in logged] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in logged] == pytest.approx(losses, rel=1e-5)
    assert [row["grad_norm"] for row in logged] == pytest.approx(norms, rel=1e-4)
    # What is logged after a step is the rate of the next one.
    assert [row["learning_rate"] for row in logged[:-1]] == pytest.approx(rates[1:], rel=1e-6)
    assert losses[-1] < 0.6 * losses[0]
