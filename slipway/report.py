"""What a person sees of a run: the summary before, the result after, loss.png and the model card."""

import logging
import os
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from slipway import topology

WIDTH = 100


def quiet() -> None:
    """Hold back the libraries' notes to developers, which would hide what the run says. Errors still come through."""
    # Importing torch's inductor would start processes that compile, in each rank, whether or not anything is compiled.
    os.environ.setdefault("TORCH_WARM_POOL", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)
    for name in (
        "DeepSpeed",
        "bitsandbytes",
        "accelerate",
        "trl",
        "torch.distributed.elastic",
        "torch.utils",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)


def console() -> Console:
    """Rank 0's console, 100 columns where it is no terminal; the other ranks' says nothing."""
    silent = os.environ.get("RANK", "0") != "0"
    probe = Console(quiet=silent)
    return probe if probe.is_terminal else Console(quiet=silent, width=WIDTH)


def show_rows(rows: list[tuple[str, str]]) -> None:
    """(what, value) lines, printed by rank 0."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def show_plan(plan: Any) -> None:
    """What will run, before the model is loaded."""
    asked, facts, world = plan.asked, plan.ds_facts, plan.world
    micro, steps = asked.get("per_device_train_batch_size"), asked.get("gradient_accumulation_steps")
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = plan.data.facts
    table.add_row("recipe", f"{asked.config or 'arguments only'}")
    table.add_row(
        "model",
        f"{plan.model.name}, {count(plan.parameters)} parameters"
        + (", an adapter is trained" if asked.get("use_peft") else ""),
    )
    table.add_row(
        "data",
        f"{asked.get('dataset_name')}: {rows['train_rows']:,} rows to train on, {rows['held_out_rows']:,} held out",
    )
    for line in plan.data_lines:
        table.add_row("", line)
    where = f"{world.size} x {plan.card}" if world.on_gpu else topology.ranks(world.size, "CPU")
    engine = (
        f"DeepSpeed, ZeRO stage {facts['zero_stage']}" if plan.ds_config else "DDP" if world.size > 1 else "one process"
    )
    offload = [
        f"{what} on {facts[key]}"
        for key, what in (("offload_optimizer", "optimizer"), ("offload_param", "parameters"))
        if facts[key] != "none"
    ]
    table.add_row("ranks", f"{where}, {engine}" + (f" ({', '.join(offload)})" if offload else ""))
    table.add_row("precision", f"{plan.precision}, attention {plan.attention.name}: {plan.attention.reason}")
    table.add_row(
        "batch",
        f"micro-batch {micro} x accumulation {steps} x {topology.ranks(world.size)} = "
        f"{micro * steps * world.size} sequences of at most {asked.get('max_length')} tokens",
    )
    table.add_row("output", str(plan.output))
    for notice in [*plan.notices, *plan.model.notes]:
        table.add_row("note", notice)
    console().print(table)


def show_start(start: Any) -> None:
    """Where a resumed run goes on, and which checkpoints were passed over. Nothing of a new run."""
    for line in start.lines:
        console().print(f"resume: {line}", highlight=False, soft_wrap=True)
    if start.checkpoint:
        console().print(f"resume: going on after step {start.step}, from {start.path}", highlight=False, soft_wrap=True)
        if start.conversion:
            console().print(f"resume: {start.conversion}", highlight=False, soft_wrap=True)
    elif start.earlier:
        console().print("resume: no complete checkpoint; from the start", highlight=False)


def show_result(content: dict[str, Any], samples: list[dict[str, str]]) -> None:
    """What came of it: losses, sample answers before and after, cost, and where everything was written."""
    out, got, cost = console(), content["got"], content["cost"]
    if out.quiet:
        return
    for sample in samples:
        table = Table(
            title=_short(sample["prompt"], 180), title_justify="left", show_header=False, width=min(WIDTH, out.width)
        )
        for key in ("before", "after", "reference"):
            table.add_row(key, _short(sample[key], 240))
        out.print(table)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    if "held_out" in content:
        a, b = content["held_out"]["before"], content["held_out"]["after"]
        table.add_row(
            "held-out loss",
            f"{a['loss']:.3f} -> {b['loss']:.3f} ({100 * (b['loss'] / a['loss'] - 1):+.1f} %), "
            f"perplexity {a['perplexity']:.2f} -> {b['perplexity']:.2f}",
        )
    table.add_row(
        "ran",
        f"{got['engine']}, ZeRO stage {got['zero_stage']}, {topology.ranks(got['world_size'])}, {got['dtype']}, "
        f"{got['attention']}",
    )
    mfu = f", {100 * cost['mfu']:.1f} % MFU" if cost.get("mfu") else ""
    table.add_row(
        "speed",
        f"{cost['useful_tokens_per_s']:,.0f} useful tokens/s of {cost['tokens_per_s']:,.0f}{mfu}; "
        f"training {cost['train_s']:.0f} s, whole run {cost['total_s']:.0f} s",
    )
    table.add_row(
        "peak memory",
        ", ".join(f"rank {i}: {gib:.2f} GiB" for i, gib in enumerate(cost["peak_gib_per_rank"])),
    )
    table.add_row("written", content["output"])
    out.print(table)


def plot_losses(path: Path, losses: list[dict[str, float]], evaluations: list[dict[str, float]], title: str) -> None:
    """loss.png: training loss by step, held-out loss where it was measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot([row["step"] for row in losses], [row["loss"] for row in losses], label="training", linewidth=1.5)
    if evaluations:
        axes.plot([row["step"] for row in evaluations], [row["loss"] for row in evaluations], "o-", label="held-out")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_card(path: Path, content: dict[str, Any]) -> None:
    """A short model card in the hub's format: what this is, how it was made, how good it is."""
    asked, got, held = content["asked"], content["got"], content.get("held_out")
    base = asked["model"]["name"]
    lines = [
        "---",
        f"base_model: {base}",
        "library_name: transformers",
        "tags: [slipway, sft]",
        "---",
        "",
        f"# {base}, fine-tuned on {asked['data']['source']}",
        "",
        f"Trained with Slipway's recipe `{asked['recipe']}`: {got['engine']}, ZeRO stage {got['zero_stage']}, "
        f"{topology.ranks(got['world_size'])}, {got['dtype']}, {len(content['losses'])} logged steps.",
        "",
    ]
    if held:
        lines += [
            "| held-out | before | after |",
            "|---|---|---|",
            *(f"| {key} | {held['before'][key]:.4f} | {held['after'][key]:.4f} |" for key in ("loss", "perplexity")),
            "",
        ]
    lines += ["`run.json` beside this file has every argument, version and loss; `loss.png` the curve.", ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def printable(text: str) -> str:
    """The text without characters that steer a terminal: a model may say anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _short(text: str, length: int) -> str:
    """A text on one line, cut at `length` characters; run.json holds it whole."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= length else line[: length - 3] + "..."


def count(number: int) -> str:
    """Millions or billions, for a person."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
