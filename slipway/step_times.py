"""What one rank of `make scaling` does: `python -m slipway.step_times JOB FILE`, as one process or under torchrun.

A BERT classifier from a config is trained, and each step is clocked. Two kinds of steps alternate, so that a machine
that slows down slows both:

- as people train: DDP's all-reduce runs while backward still computes;
- split: forward and backward under no_sync, then, after a barrier, an all-reduce of buckets as large as DDP's.

What all-reduce costs a step is the difference of the two backwards: what backward does not hide of it, and waiting for
slower ranks. All-reduce alone would count what costs nothing; it is kept beside, as it tells how fast the link is.
One process has no DDP, as under Accelerate. On a GPU the device is waited for at the end of each part.
"""

import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway import attached

attached.attach()

import torch  # noqa: E402
from torch import distributed  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, Dataset, DistributedSampler  # noqa: E402

from slipway import topology  # noqa: E402
from slipway.errors import InputError, stop_on_bad_input  # noqa: E402
from slipway.verify_rank import join  # noqa: E402

WARM_UP = 3  # rounds that are not counted: DDP makes its buckets anew, allocators and caches fill
VOCABULARY = 30522  # BERT's
TIMEOUT_S = 600  # a slow dataset lets the other ranks wait


@dataclass(frozen=True)
class Job:
    """What each rank trains, a `batch` of rows of `length` tokens a step. `dataset`: FILE.py:NAME, else random ids."""

    layers: int
    width: int
    length: int
    batch: int
    steps: int
    num_workers: int
    dataset: str | None = None

    @property
    def other_batch(self) -> int:
        """Another number of rows, whose time tells how much of a step does not grow with the batch."""
        return 1 if self.batch > 1 else 2


class RandomRows(Dataset):
    """Random token ids, and labels 0 and 1 in turn."""

    def __init__(self, rows: int, length: int):
        self.rows, self.length = rows, length

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        made = torch.Generator().manual_seed(row)
        return {"input_ids": torch.randint(VOCABULARY, (self.length,), generator=made), "labels": row % 2}


def dataset_of(name: str) -> Dataset:
    """What NAME() in FILE.py gives: rows are dicts that BERT takes. Raises InputError where there is none."""
    file, _, inside = name.rpartition(":")
    if not Path(file).is_file():
        raise InputError(f"--dataset {name}: no file {file or name}", "--dataset FILE.py:NAME, such as my_data.py:Rows")
    spec = importlib.util.spec_from_file_location("scaling_dataset", file)
    module = sys.modules["scaling_dataset"] = importlib.util.module_from_spec(spec)  # a worker finds its class by name
    spec.loader.exec_module(module)
    if not hasattr(module, inside):
        raise InputError(f"--dataset {name}: {file} has no {inside}", "name a class or function of that file")
    made = getattr(module, inside)()
    row = made[0] if hasattr(made, "__getitem__") and hasattr(made, "__len__") and len(made) else None
    if not isinstance(row, dict) or "labels" not in row or not {"input_ids", "inputs_embeds"} & set(row):
        raise InputError(
            f"--dataset {name}: rows are no dicts of labels and input_ids or inputs_embeds",
            "return such a dict from __getitem__, and the number of rows from __len__",
        )
    return made


class Clock:
    """lap() is the seconds since the last lap, once the device has done what it was given."""

    def __init__(self, device: str):
        self.device, self.last = device, 0.0
        self.lap()

    def lap(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        before, self.last = self.last, time.perf_counter()
        return self.last - before


class Training:
    """The model, its data and optimizer on this rank, and the two kinds of steps; times in seconds."""

    def __init__(self, job: Job, world: topology.World, device: str):
        torch.manual_seed(0)
        self.device, self.clock = device, Clock(device)
        rows = rows_of(job, world.size)
        self.model = bert(job).to(device).train()
        if "inputs_embeds" in rows[0]:  # the table is not used then, and DDP would wait for its gradient
            self.model.get_input_embeddings().requires_grad_(False)
        # BERT's buffers are constants: to send them before each forward would be noise between the two kinds of steps.
        self.parallel = DistributedDataParallel(self.model, broadcast_buffers=False) if world.size > 1 else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.batches = batches(rows, job, world, device)
        self.precision = topology.precision(world, None, None, "scaling")
        self.scaler = torch.amp.GradScaler(device, enabled=self.precision == "fp16")
        self.buckets: list[torch.Tensor] = []

    def forward_backward(self, batch: dict[str, torch.Tensor]) -> float:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        with torch.autocast(self.device, dtype=dtype, enabled=dtype is not None):
            loss = self.parallel(**batch).loss
        self.scaler.scale(loss).backward()
        return self.clock.lap()

    def plain(self) -> dict[str, float]:
        """A step as people train; `step` has a clock of its own, that the parts are held against."""
        self.clock.lap()
        began = time.perf_counter()
        batch = next(self.batches)
        times = {"data": self.clock.lap(), "forward_backward": self.forward_backward(batch)}
        self.scaler.step(self.optimizer)
        self.scaler.update()
        times["optimizer"] = self.clock.lap()
        self.optimizer.zero_grad(set_to_none=True)
        times["other"] = self.clock.lap()
        return times | {"step": time.perf_counter() - began}

    def split(self, rows: int) -> dict[str, float]:
        """Forward and backward of a batch of `rows` that no rank waits for another in, then all-reduce alone."""
        batch = {key: torch.cat([value, value])[:rows] for key, value in next(self.batches).items()}
        with self.parallel.no_sync() if self.parallel is not self.model else contextlib.nullcontext():
            self.clock.lap()
            times = {"forward_backward": self.forward_backward(batch)}
        self.optimizer.zero_grad(set_to_none=True)
        return times | {"all_reduce": self.all_reduce()}

    def all_reduce(self) -> float:
        if self.parallel is self.model:
            return 0.0
        if not self.buckets:
            sizes = self.parallel._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")
            self.buckets = [torch.zeros(int(size) // 4, device=self.device) for size in sizes]
        distributed.barrier()
        self.clock.lap()
        for work in [distributed.all_reduce(bucket, async_op=True) for bucket in self.buckets]:
            work.wait()
        return self.clock.lap()


def bert(job: Job) -> torch.nn.Module:
    """A classifier of two labels with random weights, in fp32."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=job.width,
            intermediate_size=4 * job.width,
            num_hidden_layers=job.layers,
            num_attention_heads=max(1, job.width // 64),
            max_position_embeddings=max(512, job.length),
            num_labels=2,
        )
    )


def rows_of(job: Job, ranks: int) -> Dataset:
    """The rows to train on. Raises InputError for fewer than a step takes."""
    if not job.dataset:
        return RandomRows(3 * (WARM_UP + job.steps) * job.batch * ranks, job.length)
    rows = dataset_of(job.dataset)
    if len(rows) < job.batch * ranks:
        need = f"{ranks} ranks x --batch {job.batch}"
        raise InputError(f"--dataset {job.dataset} has {len(rows)} rows, a step takes {need}", "a smaller --batch")
    return rows


def batches(rows: Dataset, job: Job, world: topology.World, device: str) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's batches on its device, without end."""
    sampler = DistributedSampler(rows, world.size, int(os.environ["RANK"]), shuffle=False, drop_last=True)
    workers = {"num_workers": job.num_workers, "persistent_workers": job.num_workers > 0}
    loader = DataLoader(rows, job.batch, sampler=sampler, drop_last=True, pin_memory=device == "cuda", **workers)
    while True:
        for batch in loader:
            yield {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def measure(job: Job, world: topology.World, device: str) -> dict[str, Any]:
    """Times of this rank's counted steps, a dict each, and what it ran on."""
    training = Training(job, world, device)
    plain, split, other = [], [], []
    for number in range(WARM_UP + job.steps):
        plain.append(training.plain())
        # DDP has its final buckets from the third step on; all ranks are at the same one.
        split.append(training.split(job.batch) if number >= WARM_UP else {})
    for _ in range(WARM_UP + job.steps):
        other.append(training.split(job.other_batch))
    return {
        "plain": plain[WARM_UP:],
        "split": split[WARM_UP:],
        "other_batch": other[WARM_UP:],
        "gradient_bytes": sum(bucket.nbytes for bucket in training.buckets),
        "parameters": sum(weight.numel() for weight in training.model.parameters()),
        "precision": training.precision,
        "threads": torch.get_num_threads(),
        "card": torch.cuda.get_device_name() if device == "cuda" else "CPU",
    }


def main(job_text: str, file: str) -> None:
    from slipway import report

    report.quiet()
    job = Job(**json.loads(job_text))
    world = topology.current()
    device = join(TIMEOUT_S) if world.size > 1 else "cuda" if world.on_gpu else "cpu"
    found: list[Any] = [measure(job, world, device)]
    if world.size > 1:
        here, found = found[0], [None] * world.size
        distributed.all_gather_object(found, here)
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps(found), encoding="utf-8")
    if world.size > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    with stop_on_bad_input():
        main(*sys.argv[1:])
