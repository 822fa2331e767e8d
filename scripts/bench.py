"""Compare useful tokens/s of the default recipe with a plain padding Trainer and with a bare torch loop, in one run;
and clock how long a checkpoint lets the training stand still, and how long a resume takes to the first step.

    make bench
    python scripts/bench.py --model_name_or_path tiny-llama --steps 3     # a quick look at the table

Same model, rows, max_length and tokens per micro-batch in all three. Useful tokens are those of rows, not padding.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from slipway import manifest, memory, record, report, topology
from slipway.errors import InputError, stop_on_bad_input

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "zero3"
MICRO_BATCH = 4


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", default="smollm2-135m")
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each job, after one that is not")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.steps < 1:
        raise InputError(f"--steps {asked.steps}", "measure at least one step")
    report.quiet()
    if asked.job:
        result = JOBS[asked.job](asked)
        if os.environ.get("RANK", "0") == "0":
            asked.result.write_text(json.dumps(result))
        return
    world = topology.plan(None)
    with tempfile.TemporaryDirectory() as folder:
        results = {"recipe": recipe(asked, world, Path(folder))}
        results |= {job: _start(job, asked, world, folder) for job in JOBS}
        saved = saving(asked, world, Path(folder) / "saving")
    show(results, asked.steps, saved)


def recipe(asked: argparse.Namespace, world: topology.World, folder: Path) -> dict[str, float]:
    """The default recipe as a user starts it; its speed from run.json."""
    content = _recipe(asked, world, folder / "recipe", max_steps=asked.steps + 1)
    seconds, losses = content["cost"]["step_s"][1:], content["losses"]
    return {
        "useful": losses[-1]["num_tokens"] - losses[0]["num_tokens"],
        "slots": asked.steps * MICRO_BATCH * world.size * asked.max_length,
        "seconds": sum(seconds),
        "first_step": content["cost"]["launch_to_first_step_s"],
    }


def saving(asked: argparse.Namespace, world: topology.World, folder: Path) -> dict[str, float]:
    """Two steps of the recipe, each saved; then on from the first checkpoint, as after a kill."""
    flags = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    content = _recipe(asked, world, folder, **flags)
    stalls = [event["seconds"] for event in content["history"] if event["event"] == "saved"]
    first = manifest.read(manifest.folder_of(folder, 1), checksums=False)
    shutil.rmtree(manifest.folder_of(folder, 2))
    shutil.copyfile(first.path / record.FILE, folder / record.FILE)
    resumed = _recipe(asked, world, folder, **flags, resume="auto")
    return {
        "bytes": first.bytes,
        "stall": max(stalls),
        "first_step": content["cost"]["launch_to_first_step_s"],
        "resumed_first_step": resumed["cost"]["launch_to_first_step_s"],
    }


def _recipe(asked: argparse.Namespace, world: topology.World, output: Path, **more: object) -> dict[str, Any]:
    """The default recipe, started as a user does; its run.json."""
    flags = {
        "model_name_or_path": asked.model_name_or_path,
        "dataset_name": "docstrings",
        "output_dir": output,
        "max_length": asked.max_length,
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": "false",
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "held_out_rows": 0,
        "samples": 0,
        "report_to": "none",
        **more,
    }
    words = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
    script = ROOT / "recipes/llama/finetune.py"
    command = [sys.executable, ROOT / "scripts/launch.py", "--nproc", str(world.size), script]
    _run([*command, "--config", script.parent / f"{RECIPE}.yaml", *words])
    return record.read(output)


def padded(asked: argparse.Namespace) -> dict[str, float]:
    """transformers' own Trainer on the same rows and engine, padding each micro-batch to its longest row."""
    import torch
    from transformers import DataCollatorForSeq2Seq, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    world = topology.current()
    topology.join(world, deepspeed=True, timeout_s=1800)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            deepspeed=str(ROOT / f"ds_configs/{RECIPE}.json"),
            per_device_train_batch_size=MICRO_BATCH,
            learning_rate=2e-5,
            max_steps=asked.steps + 1,
            train_sampling_strategy="sequential",
            bf16=topology.precision(world, None, None, "") == "bf16",
            fp16=topology.precision(world, None, None, "") == "fp16",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            accelerator_config={"use_configured_state": not world.on_gpu},
        )
        model, tokenizer, data = _prepared(asked, packing=False)
        counted = {"useful": 0, "slots": 0, "seconds": 0.0}

        class Collate(DataCollatorForSeq2Seq):
            def __call__(self, rows: list[dict[str, Any]], return_tensors: str | None = None) -> Any:
                batch = super().__call__(rows, return_tensors)
                batches.append((int(batch["attention_mask"].sum()), batch["attention_mask"].numel()))
                return batch

        class Clock(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                self.start = time.perf_counter()

            def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
                if state.global_step > 1:
                    counted["seconds"] += time.perf_counter() - self.start

        batches: list[tuple[int, int]] = []
        collate = Collate(tokenizer, model=model)
        trainer = Trainer(model, args, collate, data, processing_class=tokenizer, callbacks=[Clock()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    for useful, slots in batches[1 : asked.steps + 1]:  # the loader reads one batch ahead
        counted["useful"], counted["slots"] = counted["useful"] + useful, counted["slots"] + slots
    totals = torch.tensor([counted["useful"], counted["slots"]], device=args.device)
    if world.size > 1:
        torch.distributed.all_reduce(totals)
    return counted | {"useful": int(totals[0]), "slots": int(totals[1])}


def bare(asked: argparse.Namespace) -> dict[str, float]:
    """One process, no engine: forward, backward, clip, AdamW on the batches that the recipe packs."""
    import torch
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    world = topology.plan(None)
    model, tokenizer, data = _prepared(asked, packing=True)
    device = "cuda" if world.on_gpu else "cpu"
    model.to(device).train()
    collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id, padding_free=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    useful = seconds = 0
    for step in range(asked.steps + 1):
        start = time.perf_counter()
        for rank in range(world.size):
            first = (step * world.size + rank) * MICRO_BATCH
            rows = list(data.select(range(first, first + MICRO_BATCH)))
            batch = {k: v.to(device) if hasattr(v, "to") else v for k, v in collate(rows).items()}
            (model(**batch, use_cache=False).loss / world.size).backward()
            useful += batch["input_ids"].numel() * (step > 0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds += (time.perf_counter() - start) * (step > 0)
    return {
        "useful": useful,
        "slots": asked.steps * world.size * MICRO_BATCH * asked.max_length,
        "seconds": seconds,
    }


JOBS = {"padded": padded, "bare": bare}


def _prepared(asked: argparse.Namespace, packing: bool) -> tuple[Any, Any, Any]:
    """Model, tokenizer and training rows as the recipe has them."""
    import torch

    from slipway import attention, encode, models

    found = models.resolve(asked.model_name_or_path)
    tokenizer = models.load_tokenizer(found)
    data = encode.prepare(
        "docstrings",
        tokenizer,
        max_length=asked.max_length,
        packing=packing,
        seed=42,
        vocab_size=len(tokenizer),
        held_out_rows=0,
    )
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    precision = "bf16" if on_gpu else "fp32"
    choice = attention.choose("auto", dtype=precision, packing=packing, device=attention.Device.current())
    attention.register(choice.name)
    distributed = torch.distributed.is_initialized()
    model = models.load(found, tokenizer, dtype=dtype, attn=choice.name, zero3=distributed)
    return model, tokenizer, data.train


def _start(job: str, asked: argparse.Namespace, world: topology.World, folder: str) -> dict[str, float]:
    """Run a job of this script in processes of its own: the padded one on all ranks, the bare loop on one."""
    topology.prepare_environment(world)
    env = dict(os.environ)
    command = [sys.executable]
    if job == "padded":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world.size)]
    else:
        env["OMP_NUM_THREADS"] = str(os.cpu_count())
    result = Path(folder) / f"{job}.json"
    flags = ["--model_name_or_path", asked.model_name_or_path, "--max_length", asked.max_length]
    _run([*command, __file__, *flags, "--steps", asked.steps, "--job", job, "--result", result], env)
    return json.loads(result.read_text())


def _run(command: list[Any], env: dict[str, str] | None = None) -> None:
    done = subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
        raise InputError(f"a job of the benchmark failed with exit code {done.returncode}", "see the lines above")


def show(results: dict[str, dict[str, float]], steps: int, saved: dict[str, float]) -> None:
    """The table, the two ratios, and what saving and resuming take."""
    names = {
        "recipe": f"recipe {RECIPE}, packed",
        "padded": "plain Trainer, padded to the longest row",
        "bare": "bare torch loop, packed",
    }
    table = Table(width=report.WIDTH)
    for title in ("job", "useful tokens/s", "useful share", "s/step"):
        table.add_column(title, justify="left" if title == "job" else "right")
    rate = {name: r["useful"] / r["seconds"] for name, r in results.items()}
    for name, r in results.items():
        table.add_row(
            names[name], f"{rate[name]:,.1f}", f"{r['useful'] / r['slots']:.1%}", f"{r['seconds'] / steps:.1f}"
        )
    out = report.console()
    out.print(table)
    out.print(f"recipe / plain Trainer: {rate['recipe'] / rate['padded']:.2f}x")
    out.print(f"recipe / bare loop:     {rate['recipe'] / rate['bare']:.2f}x")
    out.print(f"launch to the end of the first step, warm: {results['recipe']['first_step']:.1f} s")
    gib, stall = saved["bytes"] / memory.GIB, saved["stall"]
    out.print(f"a checkpoint of {gib:.3f} GiB: training stands still for {stall:.1f} s ({gib / stall:.2f} GiB/s)")
    again, first = saved["resumed_first_step"], saved["first_step"]
    out.print(f"resume: {again:.1f} s from launch to the end of the first step ({first:.1f} s at the first start)")


if __name__ == "__main__":
    with stop_on_bad_input():
        main(sys.argv[1:])
