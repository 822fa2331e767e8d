"""Why is it not faster? Steps/s of a BERT classifier on 1 and on N ranks, where a step's time goes, and what bounds it.

    make scaling [NPROC=8] [OUTPUT=folder] [ARGS="--batch 64 --num_workers 4"]
    python scripts/scaling.py --nproc 2 --layers 2 --width 128
    python scripts/scaling.py --dataset my_data.py:Rows        # your own Dataset of dicts: labels and input_ids

Each rank has the same batch (weak scaling), and on a CPU as many threads in both runs. How it is measured, all-reduce
above all, stands in slipway/step_times.py. Writes scaling.json and scaling.png to OUTPUT (outputs/scaling).
Exit codes: 0 measured, 1 a rank failed, 2 bad input, 130 Ctrl-C.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from slipway import attached, bound, memory, report, step_times, topology
from slipway.bound import PARTS, Run
from slipway.errors import InputError, stop_on_bad_input
from slipway.step_times import Job

GPU = {"layers": 12, "width": 768, "batch": 32, "steps": 40}
CPU = {"layers": 4, "width": 256, "batch": 8, "steps": 12}
SMALLEST = {"layers": 1, "width": 1, "length": 1, "batch": 1, "steps": 4, "num_workers": 0}


def main(argv: list[str]) -> None:
    report.quiet()
    asked = _arguments(argv)
    world = topology.plan(asked.nproc)
    topology.prepare_environment(world)
    job = _job(asked, world)
    output = _output(asked.output)
    runs = []
    for ranks in sorted({1, world.size}):
        print(f"measuring {ranks} rank{'s' if ranks > 1 else ''} ...", file=sys.stderr, flush=True)
        runs.append(bound.summary(_measure(job, ranks), job))
    cores = len(os.sched_getaffinity(0))
    name, sentence = bound.name_bound(runs[0], runs[-1], job, cores)
    content = {
        "job": asdict(job),
        "cores": cores,
        "runs": [run.as_plain() for run in runs],
        "efficiency": round(bound.efficiency(runs[0], runs[-1]), 4),
        "bound": {"name": name, "sentence": sentence},
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "scaling.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    plot(output / "scaling.png", runs, content["efficiency"])
    show(runs, content, output)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--nproc", type=int, help="ranks; one per GPU, or 2 without a GPU, if left out")
    parser.add_argument("--layers", type=int, help="of the model; 12 on a GPU, 4 on a CPU")
    parser.add_argument("--width", type=int, help="of the model, a multiple of 64 (or below 64); 768, or 256 on a CPU")
    parser.add_argument("--length", type=int, default=128, help="tokens a row")
    parser.add_argument("--batch", type=int, help="rows a rank and step; 32 on a GPU, 8 on a CPU")
    parser.add_argument("--steps", type=int, help="counted steps of each kind, 4 or more; 40 on a GPU, 12 on a CPU")
    parser.add_argument("--num_workers", type=int, default=0, help="processes a rank that load data")
    parser.add_argument("--dataset", help="FILE.py:NAME of your own Dataset; random token ids if left out")
    parser.add_argument("--output", type=Path, help="folder to write to; outputs/scaling, then outputs/scaling-2 ...")
    return parser.parse_args(argv)


def _job(asked: argparse.Namespace, world: topology.World) -> Job:
    """What was asked, with defaults for this hardware. Raises InputError for what cannot be measured."""
    usual = GPU if world.on_gpu else CPU
    values = {key: value for key, value in vars(asked).items() if key in Job.__dataclass_fields__ and value is not None}
    job = Job(**usual | values)
    for key, least in SMALLEST.items():
        if getattr(job, key) < least:
            raise InputError(f"--{key} {getattr(job, key)} is too small", f"give {least} or more")
    if job.width > 64 and job.width % 64:
        raise InputError(f"--width {job.width} is no multiple of 64, the width of a head", "such as --width 256")
    step_times.rows_of(job, world.size)
    return job


def _output(asked: Path | None) -> Path:
    """The folder to write to: never one that holds something."""
    numbered = (Path("outputs") / f"scaling-{number}" for number in itertools.count(2))
    for output in [asked] if asked else itertools.chain([Path("outputs/scaling")], numbered):
        memory.check_writable(output)
        if not output.exists() or not any(output.iterdir()):
            return output
    raise InputError(f"OUTPUT {asked} is not empty", "name another folder; nothing was changed")


def _measure(job: Job, ranks: int) -> list[dict[str, Any]]:
    """What step_times.measure gives on each of `ranks` ranks, which run in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1"]
        rank = ["-m", "slipway.step_times", json.dumps(asdict(job)), str(file)]
        command = [*launcher, "--nproc_per_node", str(ranks), *rank]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=attached.end_with_parent,  # as the ranks do with it
        )
        try:
            out, err = process.communicate()
        finally:
            process.terminate()  # torchrun ends its ranks then; nothing happens where it has ended
            process.wait()
        if process.returncode:
            print(out[-2000:], err[-4000:], file=sys.stderr)
            print(f"error: a rank of {ranks} failed; its lines are above", file=sys.stderr)
            sys.exit(1)
        return json.loads(file.read_text(encoding="utf-8"))


def show(runs: list[Run], content: dict[str, Any], output: Path) -> None:
    """The table, the efficiency, the bound."""
    table = Table(width=report.WIDTH)
    table.add_column("")
    for run in runs:
        table.add_column(f"{run.ranks} rank{'s' if run.ranks > 1 else ''}", justify="right")
    rows = {
        "steps/s": [f"{run.steps_per_s:,.2f}" for run in runs],
        "rows/s, all ranks": [f"{run.rows_per_s:,.1f}" for run in runs],
        "a step": [f"{run.step_ms:,.1f} ms       " for run in runs],
    }
    for key, text in PARTS.items():
        rows[f"  {text}"] = [f"{run.parts_ms[key]:,.1f} ms {run.parts_ms[key] / run.step_ms:5.0%}" for run in runs]
    for text, values in rows.items():
        table.add_row(text, *values)
    out, job = report.console(), content["job"]
    out.print(
        f"BERT, {job['layers']} layers of {job['width']}, {runs[0].parameters / 1e6:,.1f} M parameters, "
        f"{runs[0].precision}; {job['batch']} rows of {job['length']} tokens a rank; {runs[0].card}"
    )
    out.print(table)
    if len(runs) > 1:
        rate = runs[1].rows_per_s / runs[0].rows_per_s
        out.print(f"{runs[1].ranks} ranks do {rate:.2f} x one rank's work: efficiency {content['efficiency']:.0%}")
    out.print(f"bound: {content['bound']['name']}. {content['bound']['sentence']}.")
    out.print(f"written: {output}/scaling.json, {output}/scaling.png")


def plot(path: Path, runs: list[Run], efficiency: float) -> None:
    """scaling.png: a bar a run, the parts of its step stacked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    names = [f"{run.ranks} rank{'s' if run.ranks > 1 else ''}\n{run.rows_per_s:,.0f} rows/s" for run in runs]
    bottom = [0.0] * len(runs)
    for key, text in PARTS.items():
        heights = [run.parts_ms[key] for run in runs]
        bars = axes.bar(names, heights, 0.5, bottom=bottom, label=text)
        shares = [height / run.step_ms for height, run in zip(heights, runs, strict=True)]
        axes.bar_label(bars, [f"{share:.0%}" if share >= 0.05 else "" for share in shares], label_type="center")
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    title = f"BERT, {runs[0].parameters / 1e6:,.1f} M parameters, {runs[0].card}"
    if len(runs) > 1:
        title += f": efficiency {efficiency:.0%} on {runs[1].ranks} ranks"
    axes.set(ylabel="ms of a step", title=title, xlim=(-0.6, len(runs) + 0.4))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center right")  # from top to bottom, as the bars
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    with stop_on_bad_input():
        main(sys.argv[1:])
