"""What one rank of `make verify` does: `python -m slipway.verify_rank all-reduce|step FILE`.

Its place is in torchrun's variables; rank 0 writes what came out of it to FILE as JSON.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # 4 MiB and 256 MiB of fp32: enough that latency is a small part
STEPS = 3
# Rows of a global batch: any world of 1 to 8 ranks divides them, so the mean loss is the same for all of them.
ROWS, TOKENS = 840, 8


def join(timeout_s: int = 60) -> str:
    """The process group, by the backend of the device; "cuda" or "cpu"."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = {"cuda": "nccl", "cpu": "gloo"}[device]
    torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return device


def all_reduce(rank: int, world: int) -> dict[str, Any]:
    """Sum a tensor over all ranks; how far the sum is off, and the bus bandwidth in GB/s.

    Bus bandwidth is 2 (n - 1) / n times bytes / seconds, the formula of nccl-tests (doc/PERFORMANCE.md), which can be
    held against a link's rate whatever the number of ranks is.
    """
    import torch

    device = join()
    count, rounds = ELEMENTS[device], 5
    base = torch.arange(count, device=device, dtype=torch.float32) % 1024  # small whole numbers: sums are exact
    tensor = base * (rank + 1)
    torch.distributed.all_reduce(tensor)
    wrong = int((tensor != base * (world * (world + 1) // 2)).sum())
    _wait(device)
    began = time.perf_counter()
    for _ in range(rounds):
        torch.distributed.all_reduce(tensor.zero_())
    _wait(device)
    seconds = (time.perf_counter() - began) / rounds
    bandwidth = 2 * (world - 1) / world * count * 4 / seconds / 1e9
    return {"device": device, "ranks": world, "mib": count * 4 / 2**20, "wrong": wrong, "gb_per_s": bandwidth}


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def step(rank: int, world: int) -> dict[str, Any]:
    """Losses of STEPS steps of tiny-llama in fp32 under ds_configs/zero3.json, and the engine that made them."""
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from slipway import ds_config, embedded

    device = join()
    config = LlamaConfig.from_json_file(embedded.TINY_CONFIG)
    torch.manual_seed(20)
    model = LlamaForCausalLM(config)
    batch = torch.randint(config.vocab_size, (ROWS, TOKENS))[rank::world].to(device)
    arguments = {"per_device_train_batch_size": len(batch), "gradient_accumulation_steps": 1, "max_grad_norm": 1.0}
    values = {key: (value, "make verify") for key, value in arguments.items()}
    resolved, _ = ds_config.resolve(ds_config.load("zero3"), values, world, config.hidden_size, "fp32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=resolved)
    losses = []
    for _ in range(STEPS):
        loss = engine(input_ids=batch, labels=batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / world)
    stage = engine.zero_optimization_stage()
    return {"device": device, "ranks": world, "engine": type(engine).__name__, "stage": stage, "losses": losses}


def main(what: str, file: str) -> None:
    import torch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = {"all-reduce": all_reduce, "step": step}[what](rank, world)
    if rank == 0:
        part = Path(f"{file}.part")
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(file)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
