"""What a run cost: time, speed, memory, and the share of the card's peak that was used."""

import time
from typing import Any

import torch

from slipway import memory, models, topology
from slipway.plan import Plan


def of_run(plan: Plan, trainer: Any, watch: Any, began: float) -> dict[str, Any]:
    """The "cost" part of run.json. Collective: every rank calls it, for each rank's peak memory.

    tokens_per_s counts all tokens that went through the model on all ranks, useful_tokens_per_s leaves padding out;
    both over the time spent in steps since the last start. mfu is model FLOP/s (PaLM's count, no recomputation) over
    the cards' dense peak.
    """
    train_s = sum(watch.step_seconds)
    peak = torch.cuda.max_memory_allocated() if plan.world.on_gpu else memory.peak_rss()
    peaks = [0.0] * plan.world.size
    if plan.world.size > 1:
        torch.distributed.all_gather_object(peaks, peak)
    else:
        peaks = [peak]
    useful = watch.useful_tokens / train_s if train_s else 0.0  # resumed after the last step
    card_peak = topology.peak_flops(plan.card, plan.precision) if plan.world.on_gpu else None
    flops = models.flops_per_token(trainer.accelerator.unwrap_model(trainer.model).config, plan.asked.get("max_length"))
    return {
        "train_s": round(train_s, 2),
        "total_s": round(time.time() - topology.launched_at(began), 2),
        "launch_to_first_step_s": round((watch.first_step_at or time.time()) - topology.launched_at(began), 2),
        "step_s": [round(seconds, 3) for seconds in watch.step_seconds],
        "tokens": watch.tokens,
        "useful_tokens": watch.useful_tokens,
        "tokens_per_s": round(max(watch.tokens, watch.useful_tokens) / train_s, 1) if train_s else 0.0,
        "useful_tokens_per_s": round(useful, 1),
        "peak_gib_per_rank": [round(bytes_ / memory.GIB, 3) for bytes_ in peaks],
        "peak_is": "GPU memory allocated" if plan.world.on_gpu else "resident host memory",
        "mfu": round(useful * flops / (card_peak * plan.world.size), 4) if card_peak else None,
        "card": plan.card,
    }
