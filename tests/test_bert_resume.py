"""A BERT run that was killed between any two steps ends, resumed, in the weights of one that was not: bit by bit."""

import pytest
from harness import forks, record
from small_bert import write_model, write_texts

STEPS = 9  # 3 an epoch, the last of it over 12 rows instead of 16, in 2 micro-batches of which one is cut
SAVED = (2, 4, 6, 8)


def kills():
    """(event, n): each step, before its checkpoint is begun and after; and in the midst of writing one."""
    yield from (("step", step) for step in range(1, STEPS + 1))
    yield from (("next", number) for number in range(2, 12, 3))
    yield from (("file", number) for number in (1, 8))
    yield from (("seal", number) for number in (1, 2, 4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("resume")
    write_model(top / "model")
    write_texts(top / "texts.csv", 49)  # 44 to train on
    return top


def flags(folder, output, *more):
    return [
        "--model", folder / "model", "--data", folder / "texts.csv", "--per_device_train_batch_size", 8,
        "--gradient_accumulation_steps", 2, "--num_train_epochs", 3, "--learning_rate", 1e-3, "--logging_steps", 1,
        "--save_steps", 2, "--save_total_limit", 9, "--output_dir", output, "--resume", "auto", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(folder):
    """{kill: (first part, second part)} and under None the run that was left alone."""
    jobs, names = [{"argv": flags(folder, folder / "whole")}], []
    for kill in kills():
        argv = flags(folder, folder / "-".join(map(str, kill)))
        names.append(kill)
        jobs += [{"argv": argv, "kill": kill}, {"argv": argv}]
    whole, *parts = forks(folder, jobs)
    return {None: whole} | {kill: (parts[2 * n], parts[2 * n + 1]) for n, kill in enumerate(names)}


@pytest.mark.parametrize("kill", [*kills()], ids=lambda kill: f"{kill[0]} {kill[1]}")
def test_killed_and_resumed_it_ends_in_the_same_weights(kill, runs, folder):
    assert runs[None][0] == [0], runs[None][1][-3000:]
    (killed, _), (resumed, said) = runs[kill]
    assert killed == [-9]
    assert resumed == [0], said[-3000:]
    output = folder / "-".join(map(str, kill))
    assert (output / "model.safetensors").read_bytes() == (folder / "whole" / "model.safetensors").read_bytes()
    whole, again = record(folder / "whole"), record(output)
    assert again["losses"] == whole["losses"]
    assert again["evaluations"] == whole["evaluations"]
    assert [row["step"] for row in whole["losses"]] == list(range(1, STEPS + 1))


def test_a_checkpoint_that_was_being_written_is_named_and_kept(runs, folder):
    said = " ".join(runs["seal", 1][1][1].split())
    assert "checkpoint-2 is passed over: it has no manifest: the run ended while it was being saved" in said
    assert (folder / "seal-1" / "checkpoint-2.incomplete" / "model.safetensors").exists()
    assert (folder / "seal-1" / "checkpoint-2" / "manifest.json").exists()
