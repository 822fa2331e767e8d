"""What the BERT loop shows of Accelerate, each on real ranks; and that each of its lines is needed."""

import pytest
import torch
from harness import forks, record
from small_bert import write_model, write_texts

from slipway import manifest

# 97 texts: 90 to train on, which are 5 steps of 16 and one of 10; 7 held out, for 2 ranks of 2 rows at once.
ROWS, EPOCHS, SIXTH = 97, 2, 6
SKIP = "batches = accelerator.skip_first_batches(loader, done) if done else loader"
ONE_RANK = "if progress.evaluated(found) >= 0 and accelerator.process_index == 1:"
PATIENT = "if progress.evaluated(found) >= (args.patience or math.inf):"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("features")
    write_model(top / "model")
    write_texts(top / "texts.csv", ROWS)
    return top


def job(folder, name, *more, ranks=2, batch=4, accumulation=2, dropout=0, **keys):
    argv = [
        "--model", folder / "model", "--data", folder / "texts.csv", "--num_train_epochs", EPOCHS,
        "--per_device_train_batch_size", batch, "--gradient_accumulation_steps", accumulation,
        "--per_device_eval_batch_size", 2, "--held_out", 0.07, "--learning_rate", 3e-3, "--logging_steps", 1,
        "--report_to", "none", "--output_dir", folder / name,
    ]  # fmt: skip
    argv += ["--dropout", dropout] if dropout is not None else []
    return {"argv": [*argv, *more], "ranks": ranks, **keys}


# Name: what is put in the place of what in train.py. The tests below that compare two runs have to see each of them.
MUTANTS = {
    "loss not divided": ("window.share(losses, micro)", "losses.mean()"),
    "divided as if every window were full": (
        "window.share(losses, micro)",
        "losses.mean() / plan.accumulation / accelerator.num_processes",
    ),
    "scheduler steps each micro-batch": (
        "if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:",
        "if True:",
    ),
    "scheduler steps once for each rank": ("step_scheduler_with_optimizer=False", "step_scheduler_with_optimizer=True"),
    "gather for gather_for_metrics": ("accelerator.gather_for_metrics(", "accelerator.gather("),
    "not clipped": ("accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)", "torch.ones(())"),
    "order is not shuffled anew": ("loader.set_epoch(progress.epoch)", "loader.set_epoch(0)"),
}
SAVING = ["--save_steps", 2, "--resume", "auto"]
AT_5 = ["step", 5]
RESUMED = {
    "resumed": None,
    "resumed without skip_first_batches": (SKIP, "batches = loader"),
    "resumed with the loader on dropout's generator": (
        "DataLoader(plan.train_rows, plan.batch, shuffle=True, generator=torch.Generator(), **usual)",
        "DataLoader(plan.train_rows, plan.batch, shuffle=True, **usual)",
    ),
    "resumed without its progress": ("accelerator.register_for_checkpointing(progress)", "pass"),
}


def jobs(folder):
    """Name -> job, in three groups, each of which a test waits for as a whole."""
    one = {"ranks": 1, "batch": 16, "accumulation": 1}
    plain = {
        "two ranks": job(folder, "two ranks"),
        "one rank": job(folder, "one rank", **one),
        "workers": job(folder, "workers", "--dataloader_num_workers", 2),
        "bf16": job(folder, "bf16", "--mixed_precision", "bf16"),
        "compiled": job(folder, "compiled", "--torch_compile_backend", "aot_eager", **one),
        "patient": job(folder, "patient", "--patience", 1, "--num_train_epochs", 6, "--learning_rate", 3.0),
        "rank 1 stops": job(folder, "rank 1 stops", change=[(PATIENT, ONE_RANK)]),
        "diverges": job(folder, "diverges", "--learning_rate", 1e30, "--save_steps", 1, "--save_total_limit", 99),
        "tracked": job(folder, "tracked", "--report_to", "tensorboard"),
    }
    mutants = {name: job(folder, name, change=[change]) for name, change in MUTANTS.items()}
    resumed = {"dropout": job(folder, "dropout", *SAVING, dropout=0.5)}
    for name, change in RESUMED.items():
        again = job(folder, name, *SAVING, dropout=0.5, change=[change] if change else None)
        resumed |= {f"{name}: killed": again | {"kill": AT_5}, name: again}
    return [plain, mutants, resumed]


@pytest.fixture(scope="module")
def runs(folder):
    """runs(name) -> (exit statuses, output); the group of that job runs once."""
    done = {}

    def once(name):
        if name not in done:
            [group] = [group for group in jobs(folder) if name in group]
            done.update(zip(group, forks(folder, [*group.values()]), strict=True))
        return done[name]

    return once


def finished(runs, folder, name):
    codes, said = runs(name)
    assert set(codes) == {0}, said[-3000:]
    content = record(folder / name)
    assert content["status"] == "finished"
    return content


def alike(one, other):
    assert [row["step"] for row in one["losses"]] == [row["step"] for row in other["losses"]]
    for key in ("loss", "grad_norm", "learning_rate"):
        assert [row[key] for row in one["losses"]] == pytest.approx([row[key] for row in other["losses"]], rel=1e-4)
    for row, match in zip(one["evaluations"], other["evaluations"], strict=True):
        assert row == pytest.approx(match, rel=1e-4)


def test_two_ranks_with_uneven_rows_do_what_one_does(runs, folder):
    one, two = finished(runs, folder, "one rank"), finished(runs, folder, "two ranks")
    alike(two, one)
    assert len(one["losses"]) == EPOCHS * SIXTH
    assert [row["rows"] for row in two["evaluations"]] == [7, 7]
    assert two["evaluations"][-1]["accuracy"] > 0.8


@pytest.mark.parametrize("name", MUTANTS)
def test_that_test_fails_without_one_of_the_lines(name, runs, folder):
    right, wrong = finished(runs, folder, "one rank"), finished(runs, folder, name)
    with pytest.raises(AssertionError):
        alike(wrong, right)


def test_a_resumed_run_is_the_whole_one_on_two_ranks_with_dropout(runs, folder):
    whole, again = finished(runs, folder, "dropout"), finished(runs, folder, "resumed")
    assert runs("resumed: killed")[0] == [-9, -9]
    assert again["asked"]["resumed_from"].endswith("checkpoint-4")
    assert again["losses"] == whole["losses"]
    assert (folder / "resumed" / "model.safetensors").read_bytes() == (
        folder / "dropout" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("name", [name for name, change in RESUMED.items() if change])
def test_that_test_fails_too(name, runs, folder):
    assert finished(runs, folder, name)["losses"] != finished(runs, folder, "dropout")["losses"]


def test_workers_change_nothing(runs, folder):
    assert finished(runs, folder, "workers")["losses"] == finished(runs, folder, "two ranks")["losses"]


def test_bf16_is_got_and_close(runs, folder):
    content = finished(runs, folder, "bf16")
    assert content["got"]["dtype"] == "bf16"
    losses, full = ([row["loss"] for row in run["losses"]] for run in (content, finished(runs, folder, "two ranks")))
    assert losses != full
    assert losses[:4] == pytest.approx(full[:4], rel=0.02)


def test_a_compiled_model_trains_the_same_and_is_saved_under_the_usual_names(runs, folder):
    content = finished(runs, folder, "compiled")
    assert content["got"]["compiled"]
    alike(content, finished(runs, folder, "one rank"))
    test_the_saved_model_tells_the_held_out_rows_as_the_run_said(runs, folder, "compiled")


def test_a_run_stops_on_all_ranks_where_the_held_out_loss_rises(runs, folder):
    losses = [row["loss"] for row in finished(runs, folder, "patient")["evaluations"]]
    assert 1 < len(losses) < 6
    assert losses[-1] >= min(losses[:-1])


def test_one_rank_is_enough_to_stop_all(runs, folder):
    assert len(finished(runs, folder, "rank 1 stops")["evaluations"]) == 1


def test_gradients_that_are_no_number_end_the_run_on_all_ranks_before_they_are_saved(runs, folder):
    codes, said = runs("diverges")
    assert codes == [2, 2], said[-3000:]
    assert said.count("error: ") == 1 and ": the norm of the gradients is nan; nothing of this step is saved" in said
    saved = manifest.newest(folder / "diverges")[0].step
    assert f"error: step {saved + 1}: " in said
    assert not (folder / "diverges" / "model.safetensors").exists()


def test_tensorboard_shows_what_run_json_holds(runs, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    content = finished(runs, folder, "tracked")
    shown = EventAccumulator(str(folder / "tracked" / "tensorboard" / "slipway-bert")).Reload()
    assert [one.value for one in shown.Scalars("loss")] == pytest.approx([row["loss"] for row in content["losses"]])
    assert [one.step for one in shown.Scalars("held_out_accuracy")] == [SIXTH, 2 * SIXTH]


@pytest.mark.parametrize("name", ["two ranks"])
def test_the_saved_model_tells_the_held_out_rows_as_the_run_said(runs, folder, name):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from slipway import labelled

    content = finished(runs, folder, name)
    data = labelled.prepare(str(folder / "texts.csv"), held_out=0.07)
    model = AutoModelForSequenceClassification.from_pretrained(folder / name).eval()
    words = AutoTokenizer.from_pretrained(folder / name)
    assert model.config.id2label == {0: "land", 1: "sea"}
    hits = 0
    for row in data.held_out:
        with torch.no_grad():
            hits += model(**words(row.text, return_tensors="pt")).logits.argmax().item() == row.label
    assert hits / len(data.held_out) == pytest.approx(content["evaluations"][-1]["accuracy"])


# Memory that is freed goes back at once, and Arrow reserves no GiB that it may never use: else neither run nor trial
# takes the same from one day to the next.
PLAIN_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20), "ARROW_DEFAULT_MEMORY_POOL": "system"}


def test_rows_that_do_not_fit_the_memory_of_one_rank_are_halved_on_all(folder):
    """8,192 rows take more than 850 MiB beside the model, 4,096 less than 600."""
    dummy = ["--num_hidden_layers", 1, "--max_rows", 16384, "--num_train_epochs", 1, "--report_to", "none"]
    argv = [*dummy, "--per_device_train_batch_size", 8192, "--output_dir", folder / "room"]
    [(codes, said)] = forks(folder, [{"argv": argv, "ranks": 2, "room": 725}], **PLAIN_MEMORY)
    assert codes == [0, 0], said[-3000:]
    assert "out of memory: 4096 rows at once, accumulated 2 times" in " ".join(said.split())
    got = record(folder / "room")["got"]
    assert (got["gradient_accumulation_steps"], got["global_batch"]) == (2, 16384)


# What a card too small says, on rank 1 alone.
SHORT = """model = plan.build_model().to(accelerator.device)
        def short(_, args, batch):
            if accelerator.process_index == 1 and len(batch["input_ids"]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
        model.register_forward_pre_hook(short, with_kwargs=True)"""


def test_rows_that_do_not_fit_one_rank_are_halved_on_all_and_the_optimizer_step_stays(folder):
    sixteen = {"batch": 16, "accumulation": 1}
    change = [("model = plan.build_model().to(accelerator.device)", SHORT)]
    whole, halved = job(folder, "fits", **sixteen), job(folder, "short", **sixteen, change=change)
    for codes, said in forks(folder, [whole, halved]):
        assert codes == [0, 0], said[-3000:]
    assert "out of memory" in said
    got = record(folder / "short")["got"]
    assert (got["gradient_accumulation_steps"], got["global_batch"]) == (4, 32)
    alike(record(folder / "short"), record(folder / "fits"))
