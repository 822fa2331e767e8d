"""What is claimed of the blocks of docs/from-the-tutorials.md.

A check gets what the block left, on each rank, in the block's own folder.
"""

import resource
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils.data import default_collate
from transformers import BertForSequenceClassification

Names = dict[str, Any]


def rate(optimizer: torch.optim.Optimizer) -> float:
    return optimizer.param_groups[0]["lr"]


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def loss_of(model: torch.nn.Module, rows: list[dict]) -> torch.Tensor:
    return model(**default_collate(rows)).loss


def mean_gradient(names: Names, rows: int) -> torch.Tensor:
    """Of the first `rows` rows at once, by the untrained model."""
    names["_start"].zero_grad()
    loss_of(names["_start"], names["rows"][:rows]).backward()
    return gradient(names["_start"])


def moved(names: Names) -> float:
    """How far the weights went in all."""
    pairs = zip(names["_model"].parameters(), names["_start"].parameters(), strict=True)
    return sum((a - b).square().sum().item() for a, b in pairs) ** 0.5


def steps_on(names: Names, factor: float, rows: int, steps: int) -> None:
    """Asserts the number of optimizer steps, and that the first had `factor` times the mean gradient of `rows`."""
    assert len(names["_taken"]) == steps, len(names["_taken"])
    first, expected = names["_taken"][0][0], mean_gradient(names, rows) * factor
    assert torch.allclose(first, expected, atol=1e-6), (first.norm(), expected.norm())


def learned(names: Names) -> None:
    with torch.no_grad():
        before, after = (loss_of(names[which], names["rows"]).item() for which in ("_start", "_model"))
    assert after < before - 1e-3, (before, after)


def steps_right(names: Names) -> None:
    steps_on(names, 1, 16, 3)
    learned(names)


def steps_clipped(names: Names) -> None:
    assert len(names["_taken"]) == 3
    assert all(gradient.norm() <= 1.0001 for gradient, _ in names["_taken"])
    learned(names)


def steps_astray(names: Names) -> None:
    steps_on(names, 1 / 4, 4, 3)
    assert gradient(names["_model"]).norm() > 0  # of the last micro-batch: no step took it


def no_steps(names: Names) -> None:
    assert not names["_taken"] and moved(names) == 0


def scaler_wrong(names: Names) -> None:
    assert 0 < moved(names) < 10 * 0.1 / 65536 * 1.001, moved(names)


def scaler_right(names: Names) -> None:
    assert moved(names) > 0.01, moved(names)
    learned(names)


def rates(names: Names) -> list[float]:
    return [round(rate / 1e-3, 6) for _, rate in names["_taken"]]


def linear(names: Names) -> None:
    steps = names["steps"]
    assert rates(names) == [round(1 - step / steps, 6) for step in range(steps)]
    learned(names)


def decays_too_fast(names: Names) -> None:
    assert rates(names)[:2] == [round(6 / 9, 6), round(2 / 9, 6)] and rates(names)[2:] == [0] * 7, rates(names)


def decays_twice_as_fast(names: Names) -> None:
    assert rates(names) == [round(max(0, 1 - 2 * step / 15), 6) for step in range(15)]
    assert rates(names)[7] > 0 and rates(names)[8:] == [0] * 7


def of_all_ranks(value: Any) -> list[Any]:
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def rows_seen(names: Names) -> tuple[int, int]:
    """Rows that a rank saw, and different ones that all ranks saw together."""
    mine = [tuple(row) for batch in names["seen"] for row in batch.tolist()]
    return len(mine), len(set().union(*of_all_ranks(mine)))


def a_part_each(names: Names) -> None:
    assert rows_seen(names) == (12, 24), rows_seen(names)


def half_each(names: Names) -> None:
    assert rows_seen(names) == (20, 40), rows_seen(names)


def weights(names: Names) -> list[float]:
    """One number for the weights of each rank."""
    return of_all_ranks(sum(p.detach().double().sum().item() for p in names["_model"].parameters()))


def one_model(names: Names) -> None:
    assert len(weights(names)) == 2 and len(set(weights(names))) == 1
    assert moved(names) > 0


def one_process(names: Names) -> None:
    assert names["accelerator"].num_processes == 1 and len(names["loader"]) == 10 and len(names["_taken"]) == 10


def two_processes(names: Names) -> None:
    assert names["accelerator"].num_processes == 2 and len(names["loader"]) == 5 and len(names["_taken"]) == 5
    one_model(names)


def tokenizer_saved(names: Names) -> None:
    assert Path("out/tokenizer.json").exists() and Path("out/model.safetensors").exists()


def evaluated_twice(names: Names) -> None:
    assert sum("eval_loss" in line for line in names["trainer"].state.log_history) == 2


def each_argument_is_gone(names: Names) -> None:
    for argument in ("overwrite_output_dir", "no_cuda", "logging_dir", "warmup_ratio"):
        try:
            names["TrainingArguments"]("out", **{argument: None})
        except TypeError as error:
            assert argument in str(error)
        else:
            raise AssertionError(f"{argument} is taken")


def arguments_taken(names: Names) -> None:
    assert names["args"].get_warmup_steps(100) == 10 and names["args"].device.type == "cpu"
    names["trainer"].train()
    assert list(Path("logs").glob("events.*"))


def decays_nothing(names: Names) -> None:
    assert type(names["optimizer"]) is torch.optim.AdamW
    assert (
        names["optimizer"].defaults["weight_decay"] == 0 != torch.optim.AdamW([torch.zeros(1)]).defaults["weight_decay"]
    )


def saved_empty(names: Names) -> None:
    torch.distributed.barrier()
    saved = load_file("out/model.safetensors")
    assert len(saved) == 41 and not any(tensor.numel() for tensor in saved.values())


def saved_whole(names: Names) -> None:
    torch.distributed.barrier()
    again = names["_start"]  # from_pretrained would divide the weights among the ranks
    with torch.no_grad():
        before = loss_of(again, names["rows"])
        again.load_state_dict(load_file("out/model.safetensors"))
        assert loss_of(again, names["rows"]) < before - 1e-3
    same_logits(names, again)


def same_logits(names: Names, again: torch.nn.Module) -> None:
    ids = torch.stack([row["input_ids"] for row in names["rows"]])
    names["model"].eval()  # DeepSpeed's engine returns nothing
    again.eval()
    with torch.no_grad():
        assert torch.allclose(names["model"](input_ids=ids).logits, again(input_ids=ids).logits, atol=1e-6)


def rank_0_left_alone(names: Names) -> None:
    alone = names["accelerator"].process_index == 0
    assert names["_error"].startswith("RuntimeError: ") if alone else not names["_error"], names["_error"]


def went_on_from_the_checkpoint(names: Names) -> None:
    assert names["accelerator"].num_processes == 2 and names["before"] == names["after"] != names["between"]


def saved_by_one(names: Names) -> None:
    torch.distributed.barrier()
    same_logits(names, BertForSequenceClassification.from_pretrained("out"))


def two_labels_too_many(names: Names) -> None:
    assert len(names["labels"]) == 40


def each_label_once(names: Names) -> None:
    assert names["labels"].sum() == sum(row["labels"] for row in names["rows"][:38]) and len(names["labels"]) == 38


def rate_stays(names: Names) -> None:
    assert names["rates"] == [0] + [1e-3] * 7, names["rates"]


def rate_follows_the_cosine(names: Names) -> None:
    cosine = 1e-3 * (1 + torch.cos(torch.arange(8) * torch.pi / 8)) / 2
    assert torch.allclose(torch.tensor(names["rates"]), cosine, atol=1e-8), names["rates"]


def one_step_of_all(names: Names) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert 1 < names["fits"] < 1024, names["fits"]
    print(
        "DEBUG",
        names["fits"],
        [(g.norm(), r) for g, r in names["_taken"]],
        names["accelerator"].gradient_accumulation_steps,
    )
    steps_on(names, 1, 1024, 1)


def half_precision_only_by_name(names: Names) -> None:
    accelerator = names["accelerator"] if "accelerator" in names else names["trainer"].accelerator
    assert accelerator.mixed_precision == "fp16" and accelerator.scaler is None
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def full_precision(names: Names) -> None:
    assert names["accelerator"].mixed_precision == "no"


def full_precision_in_trainer(names: Names) -> None:
    assert names["trainer"].accelerator.mixed_precision == "no" and moved(names) > 0


def all_texts(names: Names) -> None:
    assert sum(len(batch["input_ids"]) for batch in names["batches"]) == len(names["texts"])


def loads_the_same(names: Names) -> None:
    same_logits(names, names["again"])


def the_same_tensors(names: Names) -> None:
    model = names["_model"].state_dict()
    assert names["state"].keys() == model.keys()
    assert all(torch.equal(tensor, model[name]) for name, tensor in names["state"].items())


def has_a_loss(names: Names) -> None:
    assert names["out"].loss.item() > 0 and names["out"].logits.shape == (1, 2)


def last_labels(names: Names) -> set[int]:
    batch, pad = names["batch"], names["tokenizer"].pad_token_id
    ends = [max(i for i, label in enumerate(row) if label != -100) for row in batch["labels"].tolist()]
    assert (batch["labels"] != pad).all()
    return {row[end] for row, end in zip(batch["labels"].tolist(), ends, strict=True)}


def no_end_token(names: Names) -> None:
    assert names["tokenizer"].eos_token_id not in last_labels(names)


def ends_with_the_end_token(names: Names) -> None:
    assert last_labels(names) == {names["tokenizer"].eos_token_id}
    assert names["model"].get_input_embeddings().num_embeddings == len(names["tokenizer"])
