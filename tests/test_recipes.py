"""Every CPU recipe, found by glob, trains on two real ranks to the same losses as a loop written by hand."""

import math
import os

import pytest
import torch
from harness import NOT_HERE, RECIPES, SECRET, record

ADAPTERS = {"lora", "lora_zero3"}
WHOLE = [name for name in RECIPES if name not in ADAPTERS | set(NOT_HERE)]
GOT = {
    "ddp": ("DistributedDataParallel", 0, "none", "none"),
    "zero1": ("DeepSpeedEngine", 1, "none", "none"),
    "zero2": ("DeepSpeedEngine", 2, "none", "none"),
    "zero2_offload": ("DeepSpeedEngine", 2, "cpu", "none"),
    "zero3": ("DeepSpeedEngine", 3, "none", "none"),
    "zero3_offload": ("DeepSpeedEngine", 3, "cpu", "cpu"),
    "lora": ("DeepSpeedEngine", 2, "none", "none"),
    "lora_zero3": ("DeepSpeedEngine", 3, "none", "none"),
}


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.fixture(scope="session")
def by_hand(trained):
    """Losses of a single-process torch loop over the same sequences: effective batch 4, AdamW, cosine, clipping."""
    from slipway import encode, models

    asked = record(trained("ddp")[0])["asked"]["arguments"]
    model_ = models.resolve("tiny-llama")
    tokenizer = models.load_tokenizer(model_)
    data = encode.prepare(
        "docstrings", tokenizer, max_length=asked["max_length"], packing=True, seed=asked["seed"],
        vocab_size=len(tokenizer), held_out_rows=asked["held_out_rows"], max_rows=asked["max_rows"],
    ).train  # fmt: skip
    model = models.load(model_, tokenizer, dtype=torch.float32, attn="eager", zero3=False)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked["learning_rate"], weight_decay=0.0)
    steps, batch, losses = asked["max_steps"], 4, []
    warm = math.ceil(steps * asked["warmup_steps"])
    for step in range(steps):
        share = step / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))
        optimizer.param_groups[0]["lr"] = asked["learning_rate"] * share
        total, tokens = 0.0, 0
        for row in data.select(range(step * batch, (step + 1) * batch)):
            start = 0
            for length in row["seq_lengths"]:  # one by one: nothing can leak over a border that is not there
                ids = torch.tensor([row["input_ids"][start : start + length]])
                labels = torch.tensor(row["labels"][start + 1 : start + length])
                start += length
                if (labels != -100).any():
                    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
                    total = total + torch.nn.functional.cross_entropy(
                        logits, labels, ignore_index=-100, reduction="sum"
                    )
                    tokens += int((labels != -100).sum())
        optimizer.zero_grad()
        (total / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), asked["max_grad_norm"])
        optimizer.step()
        losses.append(total.item() / tokens)
    return losses


def test_every_recipe_is_known_here():
    assert set(GOT) | set(NOT_HERE) == set(RECIPES)


@pytest.mark.parametrize("recipe", WHOLE)
def test_all_recipes_train_to_the_losses_of_a_loop_by_hand(recipe, trained, by_hand):
    losses = [row["loss"] for row in record(trained(recipe)[0])["losses"]]
    assert len(losses) == 20
    assert losses == pytest.approx(by_hand, rel=1e-4)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("recipe", GOT)
def test_a_recipe_gets_what_its_name_says(recipe, trained):
    content = record(trained(recipe)[0])
    got = content["got"]
    assert (got["engine"], got["zero_stage"], got["offload_optimizer"], got["offload_param"]) == GOT[recipe]
    assert (got["world_size"], got["dtype"], got["device"]) == (2, "fp32", "cpu")
    assert got["trained"] == ("adapter" if recipe in ADAPTERS else "all")
    assert len(content["cost"]["peak_gib_per_rank"]) == 2
    assert content["status"] == "finished"


@pytest.mark.parametrize("recipe", GOT)
def test_the_saved_model_loads_in_plain_transformers_with_the_trainers_logits(recipe, trained):
    from transformers import AutoModelForCausalLM

    folder, _ = trained(recipe)
    proof = record(folder)["proof"]
    model = AutoModelForCausalLM.from_pretrained(folder)  # an adapter too: transformers loads its base by itself
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([proof["input_ids"]]), use_cache=False).logits[0, -1]
    assert logits[proof["tokens"]].tolist() == pytest.approx(proof["logits"], abs=1e-4)


@pytest.mark.parametrize("recipe", GOT)
def test_held_out_loss_is_measured_before_and_after(recipe, trained):
    held_out = record(trained(recipe)[0])["held_out"]
    assert held_out["after"]["loss"] < held_out["before"]["loss"]
    assert held_out["before"]["perplexity"] == pytest.approx(math.exp(held_out["before"]["loss"]))


def test_a_run_leaves_what_the_readme_lists(trained):
    folder, result = trained("zero3")
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "run.json",
                 "loss.png", "README.md"):  # fmt: skip
        assert (folder / name).stat().st_size > 0, name
    assert list(folder.glob("tensorboard/events*"))
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask(), "others cannot read the model"
    assert "[Gloo]" not in result.stdout
    for word in ("ZeRO stage 3", "held-out loss", "useful tokens/s", str(folder), "before", "after"):
        assert word in result.stdout, word
    assert len(result.stderr.splitlines()) < 10, "a wall of warnings:\n" + result.stderr


def test_logged_rates_equal_the_formula(trained):
    """accelerate#2124: with warm-up the first step must not run at the full rate."""
    content = record(trained("zero2")[0])
    rates = [row["learning_rate"] for row in content["losses"]]
    steps, top = 20, content["asked"]["arguments"]["learning_rate"]
    warm = math.ceil(steps * content["asked"]["arguments"]["warmup_steps"])
    expected = [top * (s / warm if s < warm else 0.5 * (1 + math.cos(math.pi * (s - warm) / (steps - warm))))
                for s in range(steps)]  # fmt: skip
    assert rates == pytest.approx(expected, rel=1e-6)


def test_no_file_and_no_line_holds_a_secret(trained):
    folder, result = trained("zero3")
    assert SECRET not in result.stdout + result.stderr
    for file in folder.rglob("*"):
        assert file.is_dir() or SECRET.encode() not in file.read_bytes(), file
