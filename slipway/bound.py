"""What the times of `make scaling` mean: the parts of a step, the efficiency, and what keeps ranks from more."""

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from slipway.step_times import Job

PARTS = {
    "data": "data wait",
    "forward_backward": "forward + backward",
    "all_reduce": "all-reduce",
    "optimizer": "optimizer",
    "other": "other",
}
ENOUGH = 0.1  # the share of a step from which something is worth mending


@dataclass(frozen=True)
class Run:
    """Times in ms, of one rank's step: means over the middle half of its steps, then over all ranks."""

    ranks: int
    step_ms: float
    median_ms: float
    steps_per_s: float
    rows_per_s: float  # of all ranks together
    parts_ms: dict[str, float]  # a key for each of PARTS
    fixed_ms: float  # of forward and backward: what does not grow with the batch
    all_reduce_alone_ms: float
    gradient_mib: float
    parameters: int
    threads: int
    precision: str
    card: str

    def as_plain(self) -> dict[str, Any]:
        """For JSON; times and rates to 3 decimals."""
        rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(self).items()}
        return rounded | {"parts_ms": {key: round(value, 3) for key, value in self.parts_ms.items()}}


def summary(ranks: list[dict[str, Any]], job: Job) -> Run:
    """From what step_times.measure gave on each rank, seconds, to a Run."""
    parts = [_parts(rank) for rank in ranks]
    step = _mean([part["step"] for part in parts])
    return Run(
        ranks=len(ranks),
        step_ms=1e3 * step,
        median_ms=1e3 * _mean([median([times["step"] for times in rank["plain"]]) for rank in ranks]),
        steps_per_s=1 / step,
        rows_per_s=len(ranks) * job.batch / step,
        parts_ms={key: 1e3 * _mean([part[key] for part in parts]) for key in PARTS},
        fixed_ms=1e3 * _mean([_fixed(rank, job) for rank in ranks]),
        all_reduce_alone_ms=1e3 * _mean([median([times["all_reduce"] for times in rank["split"]]) for rank in ranks]),
        gradient_mib=ranks[0]["gradient_bytes"] / 2**20,
        **{key: ranks[0][key] for key in ("parameters", "threads", "precision", "card")},
    )


def _parts(rank: dict[str, Any]) -> dict[str, float]:
    """Seconds of each part and of the step, over the middle half of the steps by time: outliers are left out as by a
    median, and parts that were clocked together are still added up (medians of parts are no parts of a median)."""
    steps = sorted(rank["plain"], key=lambda times: times["step"])
    quarter = len(steps) // 4
    middle = steps[quarter : len(steps) - quarter]
    parts = {key: _mean([times[key] for times in middle]) for key in middle[0]}
    alone = _middle([times["forward_backward"] for times in rank["split"]])
    parts["all_reduce"] = max(0.0, parts["forward_backward"] - alone) if rank["gradient_bytes"] else 0.0
    parts["forward_backward"] -= parts["all_reduce"]
    return parts


def _fixed(rank: dict[str, Any], job: Job) -> float:
    """Where the line through the times of two batch sizes meets a batch of none; 0 at least, the whole at most."""
    whole, other = (_middle([times["forward_backward"] for times in rank[key]]) for key in ("split", "other_batch"))
    a_row = (whole - other) / (job.batch - job.other_batch)
    return min(max(0.0, whole - job.batch * a_row), whole)


def _middle(values: list[float]) -> float:
    quarter = len(values) // 4
    return _mean(sorted(values)[quarter : len(values) - quarter])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def efficiency(one: Run, many: Run) -> float:
    """Rows a second of all ranks, over as many times those of one rank; 1 is perfect."""
    return many.rows_per_s / (many.ranks * one.rows_per_s)


def name_bound(one: Run, many: Run, job: Job, cores: int) -> tuple[str, str]:
    """(name, sentence) of what takes most of a step of `many` and can be mended; "compute" where nothing takes 10 %.

    `cores` are those of this machine that these ranks may use.
    """
    parts, before = many.parts_ms, one.parts_ms
    compute = ("forward_backward", "optimizer")
    costs = {
        "data loading": parts["data"],
        "communication": parts["all_reduce"],
        "shared machine": sum(parts[key] - before[key] for key in compute),
        "too small a step": many.fixed_ms + parts["optimizer"] + parts["other"],
    }
    name = max(costs, key=costs.get)
    if costs[name] < ENOUGH * many.step_ms:
        name = "compute"
    cost = f"{costs.get(name, 0.0):,.1f} of {many.step_ms:,.1f} ms ({costs.get(name, 0.0) / many.step_ms:.0%})"
    sentences = {
        "data loading": lambda: _data(cost, job, cores),
        "communication": lambda: _communication(cost, many),
        "shared machine": lambda: _shared(one, many, cores),
        "too small a step": lambda: (
            f"{cost} of a step would be the same for any batch (the optimizer, launching kernels, reading weights): "
            f"a larger --batch (now {job.batch}) or --length (now {job.length}), gradient accumulation, torch.compile, "
            "or a larger model"
        ),
        "compute": lambda: (
            f"nothing to mend among ranks: {parts['forward_backward'] / many.step_ms:.0%} of a step is forward and "
            f"backward in {many.precision}; fewer tokens, a lower precision or a faster card make it shorter"
        ),
    }
    return name, sentences[name]()


def _data(cost: str, job: Job, cores: int) -> str:
    if job.num_workers >= cores:
        advice = (
            f"{job.num_workers} workers a rank on {cores} cores are enough: make rows cheaper, or prepare them once"
        )
    else:
        advice = f"raise --num_workers (now {job.num_workers}; {cores} cores), or prepare the rows once, beforehand"
    return f"each rank waits {cost} of a step for its batch: {advice}"


def _communication(cost: str, many: Run) -> str:
    rate = many.gradient_mib / 1024 / (many.all_reduce_alone_ms / 1e3)
    link = "NVLink in place of PCIe (`nvidia-smi topo -m`)" if many.card != "CPU" else "GPUs: gloo adds on the CPU"
    return (
        f"all-reduce takes {cost} of a step that backward does not hide ({many.gradient_mib:,.1f} MiB of gradients, "
        f"{many.all_reduce_alone_ms:,.1f} ms alone, {rate:.1f} GiB/s): a larger --batch, gradient accumulation "
        f"(`accelerator.accumulate` sends once a window), or {link}"
    )


def _shared(one: Run, many: Run, cores: int) -> str:
    took = [run.parts_ms["forward_backward"] + run.parts_ms["optimizer"] for run in (one, many)]
    times = f"the same work takes a rank {took[1]:,.1f} ms beside {many.ranks - 1} other, and {took[0]:,.1f} ms alone"
    if many.card != "CPU":
        return f"{times}: cards or host cores hold each other up; `make verify` looks at clocks, power and links"
    if many.threads * many.ranks > cores:
        fewer = max(1, cores // many.ranks)
        return f"{times}: {many.ranks} ranks x {many.threads} threads on {cores} cores; set OMP_NUM_THREADS={fewer}"
    return f"{times}: {many.ranks} ranks on {cores} cores share their caches and memory bandwidth; a GPU each, or fewer"
