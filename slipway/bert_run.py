"""What a BERT run keeps beside the weights: how far it is, what it got and cost, and whether a batch fits."""

import math
import time
from typing import Any

import torch

from slipway import memory, models, report, topology
from slipway.bert_preflight import BertPlan
from slipway.errors import InputError
from slipway.record import Record


class Progress:
    """How far a run is. Saved and loaded with each checkpoint: accelerator.register_for_checkpointing(progress)."""

    def __init__(self) -> None:
        self.epoch = 0
        self.step = 0  # optimizer steps since the start
        self.step_in_epoch = 0
        self.losses: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        self.best = float("inf")
        self.stale = 0  # epochs since the lowest held-out loss

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def made_step(self, norm: torch.Tensor, skipped: bool) -> None:
        """Count an optimizer step. Raises InputError where the gradients' norm, the same on all ranks, is not finite.

        skipped: fp16's loss scale was too high for this step, which is normal.
        """
        self.step, self.step_in_epoch = self.step + 1, self.step_in_epoch + 1
        if not skipped and not math.isfinite(norm):
            raise InputError(
                f"step {self.step}: the norm of the gradients is {float(norm)}; nothing of this step is saved",
                "a lower --learning_rate, more --warmup_steps, a smaller --max_grad_norm, or bf16 for fp16, in another "
                "OUTPUT; the checkpoints before it are good",
            )

    def evaluated(self, found: dict[str, float]) -> int:
        """Note an epoch's evaluation; the number of epochs since the lowest held-out loss."""
        self.evaluations.append({"epoch": self.epoch + 1, "step": self.step, **found})
        self.stale = 0 if found["loss"] < self.best else self.stale + 1
        self.best = min(self.best, found["loss"])
        return self.stale


def got(accelerator: Any, model: Any, plan: BertPlan) -> dict[str, Any]:
    """What this rank really runs, read back from the process group and the prepared model."""
    bare = accelerator.unwrap_model(model)
    trained = sum(parameter.numel() for parameter in bare.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in bare.parameters())
    words = bare.get_input_embeddings().weight
    rest = "all" if trained == total else "all but the table of words" if trained == total - words.numel() else "some"
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return {
        "world_size": ranks,
        "engine": type(model).__name__,
        "backend": torch.distributed.get_backend() if ranks > 1 else "none",
        "device": accelerator.device.type,
        "dtype": {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        "compiled": getattr(bare, "_compiled_call_impl", None) is not None,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "global_batch": plan.batch * accelerator.gradient_accumulation_steps * ranks,
        "parameters": total,
        "trained": rest,
    }


def rehearse(accelerator: Any, model: Any, plan: BertPlan) -> None:
    """Forward and backward of the longest rows there are, with Adam's memory held: does a batch of this size fit?

    Collective. Raises the error that find_executable_batch_size halves the batch on, and on all ranks at once: one
    rank that found out by itself, in the middle of a step, would leave the others waiting for it.
    """
    rows = sorted(plan.train_rows, key=lambda row: -len(row.get("input_ids", ())))[: plan.batch]
    failed = 0
    try:
        batch = {key: value.to(accelerator.device) for key, value in plan.collate(rows).items()}
        # The next batch, which is fetched ahead; two moments of Adam; the buckets that DDP gathers gradients in, once
        # more for what an allocator loses between blocks.
        held = [torch.zeros_like(one) for one in batch.values()]
        held += [torch.zeros_like(one) for one in model.parameters() for _ in range(4)]
        with accelerator.autocast():
            model(**batch).loss.backward()
        del held
    except RuntimeError as error:
        if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
            raise
        failed = 1
    model.zero_grad(set_to_none=True)
    if accelerator.reduce(torch.tensor(failed, device=accelerator.device), "sum").item():
        raise RuntimeError(f"{plan.batch} rows at once: out of memory. On every rank the batch is halved.")


class Clock:
    """Seconds of each optimizer step, without what is saved and evaluated between them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.first_step_at: float | None = None
        self.start()

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self.seconds.append(time.perf_counter() - self._started)
        self.first_step_at = self.first_step_at or time.time()


def cost(accelerator: Any, plan: BertPlan, clock: Clock) -> dict[str, Any]:
    """The "cost" part of run.json. Collective: each rank tells its peak memory."""
    seconds, first = clock.seconds, clock.first_step_at
    on_gpu = plan.world.on_gpu
    peak = torch.cuda.max_memory_allocated() if on_gpu else memory.peak_rss()
    peaks = accelerator.gather(torch.tensor([peak], device=accelerator.device)).tolist()
    rows = plan.windows(0).global_batch * len(seconds)
    return {
        "train_s": round(sum(seconds), 2),
        "total_s": round(time.time() - plan.began, 2),
        "launch_to_first_step_s": round(first - topology.launched_at(plan.began), 2) if first else None,
        "step_s": [round(one, 4) for one in seconds],
        "rows_per_s": round(rows / sum(seconds), 1) if seconds else None,
        "peak_gib_per_rank": [round(one / memory.GIB, 3) for one in peaks],
        "peak_is": "GPU memory allocated" if on_gpu else "resident host memory",
    }


def show_start(plan: BertPlan, facts: dict[str, Any]) -> None:
    """What runs, as read back: printed by rank 0."""
    name = plan.model.name if plan.model else f"a random BERT of {plan.args.num_hidden_layers} layers"
    source = plan.data.source if plan.data else "random embeddings around two means"
    rows = f"{len(plan.train_rows):,} rows to train on, {len(plan.held_out_rows):,} held out"
    ranks = facts["world_size"]
    how = f"{facts['engine']} over {facts['backend']}" if ranks > 1 else "one process"
    report.show_rows(
        [
            ("model", f"{name}, {report.count(facts['parameters'])} parameters"),
            ("data", f"{source}: {rows}, {len(plan.classes)} classes"),
            ("ranks", f"{ranks} x {facts['device'].upper()}, {how}, {facts['dtype']}"),
            (
                "batch",
                f"{plan.batch} rows x accumulation {plan.accumulation} x {topology.ranks(ranks)} = "
                f"{facts['global_batch']}, {plan.steps} optimizer steps",
            ),
            ("output", str(plan.output)),
            *(("note", notice) for notice in plan.notices),
        ]
    )


def finish(accelerator: Any, plan: BertPlan, run: Record, progress: Progress, clock: Clock) -> None:
    """Rank 0 writes what is left to write beside the saved weights, and prints how well the held-out rows are told.

    Collective.
    """
    spent = cost(accelerator, plan, clock)
    if not accelerator.is_main_process:
        return
    if plan.model:
        plan.tokenizer.save_pretrained(plan.output)
    models.let_others_read(plan.output)
    run.add(cost=spent, losses=progress.losses, evaluations=progress.evaluations)
    run.add(status="finished", output=str(plan.output))
    last = progress.evaluations[-1]
    told = f"loss {last['loss']:.3f}, accuracy {last['accuracy']:.3f}, macro-F1 {last['macro_f1']:.3f}"
    rows = [("held-out", f"{told} (always the largest class: accuracy {last['majority']:.3f})")]
    if spent["rows_per_s"]:
        seconds = f"training {spent['train_s']:.0f} s, whole run {spent['total_s']:.0f} s"
        rows.append(("speed", f"{spent['rows_per_s']:,.0f} rows/s; {seconds}"))
    report.show_rows([*rows, ("written", str(plan.output))])
