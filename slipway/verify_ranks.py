"""`make verify`: ranks talk to each other, and three steps under ZeRO-3 give the losses that they should.

Ranks are started here and not by torchrun, whose agent would wait for a rank that hangs as long as the rank does.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from slipway.gpu import Live
from slipway.verify import Finding, check, failed, passed
from slipway.verify_cards import expected, nvlinks
from slipway.verify_gpu import cards
from slipway.verify_rates import judge_bandwidth

LIMIT_S = {"cpu": 30, "cuda": 60}  # from the start of the ranks to the result, imports and NCCL's set-up included
STEP_LIMIT_S = {"cpu": 90, "cuda": 180}  # two busy cores take 20 s, most of it imports
LOSSES = Path(__file__).with_name("verify_losses.json")
LOSS_BOUND = {"cpu": 1e-4, "cuda": 1e-3}  # relative; other kernels add in another order


@dataclass(frozen=True)
class Outcome:
    """What ranks left: `result` of rank 0, or the `problem` in words."""

    result: dict[str, Any] | None
    problem: str = ""


def run_ranks(what: str, count: int, limit_s: float, **environ: str) -> Outcome:
    """Start `count` ranks of slipway.verify_rank on this machine; all have ended when this returns."""
    with tempfile.TemporaryDirectory(prefix="slipway-ranks-") as folder:
        file, outputs = Path(folder, "result.json"), [Path(folder, f"rank{i}") for i in range(count)]
        port = str(_free_port())
        ranks = [_start(what, file, i, count, port, outputs[i], environ) for i in range(count)]
        try:
            problem, hung = _wait(ranks, time.monotonic() + limit_s, limit_s)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        texts = [output.read_text(encoding="utf-8", errors="replace") for output in outputs]
        print("\n".join(f"rank {i}: {line}" for i, text in enumerate(texts) for line in text.splitlines()[-12:]))
        if problem:
            said = "" if hung else _last_words(texts)
            return Outcome(None, problem + said)
        return Outcome(json.loads(file.read_text(encoding="utf-8")))


def _start(what: str, file: Path, rank: int, count: int, port: str, output: Path, environ: dict) -> subprocess.Popen:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    with output.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "slipway.verify_rank", what, str(file)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **place, **environ},
        )


def _wait(ranks: list[subprocess.Popen], deadline: float, limit_s: float) -> tuple[str, bool]:
    """("", False) once all ranks ended well, else what went wrong and whether it was a hang."""
    while any(rank.poll() is None for rank in ranks):
        bad = [i for i, rank in enumerate(ranks) if rank.poll()]
        if bad:
            return f"rank {bad[0]} ended with exit code {ranks[bad[0]].returncode}", False
        if time.monotonic() > deadline:
            states = [f"rank {i} is {_state(rank)}" for i, rank in enumerate(ranks) if rank.poll() is None]
            return f"no result within {limit_s:.0f} s: {', '.join(states)}", True
        time.sleep(0.05)
    bad = [i for i, rank in enumerate(ranks) if rank.poll()]
    return (f"rank {bad[0]} ended with exit code {ranks[bad[0]].returncode}", False) if bad else ("", False)


def _state(rank: subprocess.Popen) -> str:
    """The kernel's word for it: running, sleeping, stopped (by SIGSTOP), disk-sleep (in a driver) ..."""
    try:
        return psutil.Process(rank.pid).status()
    except psutil.NoSuchProcess:
        return "gone"


def _last_words(texts: list[str]) -> str:
    """The last line of the first rank that names an error; ranks that only lost the other one come later."""
    lines = [line for text in texts for line in text.splitlines() if "Error" in line]
    return f": {lines[-1].strip()[:200]}" if lines else ""


def loopback() -> str:
    """Why this machine does not reach itself, where the ranks would wait for each other in vain; empty if it does."""
    try:
        with socket.socket() as opened:
            opened.bind(("127.0.0.1", 0))
            opened.listen()
            with socket.create_connection(opened.getsockname(), timeout=5):
                return ""
    except OSError as error:
        return f"127.0.0.1 cannot be reached: {error.strerror or error}"


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def count_ranks() -> tuple[int, str]:
    """A rank a GPU (at most 8), or two CPU ranks; and the device."""
    from slipway import topology

    world = topology.plan(None)
    return min(world.size, 8), world.accelerator


@check(
    "all-reduce",
    "ranks of this machine sum a tensor over all of them, in time and rightly",
    fix="let processes reach 127.0.0.1 (no firewall on loopback, `ip link set lo up`), and let this host's own name "
    "resolve; or name an interface: GLOO_SOCKET_IFNAME=lo, NCCL_SOCKET_IFNAME=lo",
    fixes={
        "stopped": "find what stopped the rank (a debugger, SIGSTOP, a frozen cgroup, a full disk); `make verify "
        "ONLY=all-reduce JSON=1` shows the last lines of each",
        "p2p": "turn ACS off in the BIOS (or the IOMMU: iommu=pt); until then set NCCL_P2P_DISABLE=1, at less speed",
        "shm": "docker run --shm-size=16g or --ipc=host; until then NCCL_SHM_DISABLE=1, at less speed",
        "ib": "docker run --ulimit memlock=-1 --device /dev/infiniband; until then NCCL_IB_DISABLE=1",
        "nccl": "set NCCL_DEBUG=INFO and read its last lines; `nvidia-smi topo -m` and `dmesg` name the link or card",
        "slow": "look at gpu-links; `nvidia-smi topo -m` shows how cards are joined; NCCL_DEBUG=INFO says which "
        "transport NCCL took, and P2P that is off (NCCL_P2P_DISABLE, ACS) is the usual cause",
        "wrong": "do not train here: sums over the links are wrong; `nvidia-smi -q` and `dmesg` name the card",
    },
    limit_s=300,
    alone=True,
)
def check_all_reduce() -> Finding:
    if problem := loopback():
        return failed("{problem}", problem=problem)
    count, device = count_ranks()
    outcome = run_ranks("all-reduce", count, LIMIT_S[device])
    if outcome.result is None:
        key, more = why_not(outcome, lambda **off: run_ranks("all-reduce", count, LIMIT_S[device], **off), device)
        return failed("{problem}{more}", key, problem=outcome.problem, more=more, ranks=count, device=device)
    figures = outcome.result
    if figures["wrong"]:
        return failed("{wrong} of the sums over {ranks} ranks are wrong", "wrong", **figures)
    if device == "cuda" and count > 1:
        machine = Live()
        found = cards(machine)
        return judge_bandwidth(figures, *expected(machine, found, {one: nvlinks(machine, one) for one in found}))
    return passed("{ranks} {device} ranks, {mib:.0f} MiB, sums right, bus bandwidth {gb_per_s:.1f} GB/s", **figures)


# What NCCL can do without, in the order of what most often hangs; each off alone tells the cause.
WITHOUT = {"p2p": "NCCL_P2P_DISABLE", "shm": "NCCL_SHM_DISABLE", "ib": "NCCL_IB_DISABLE"}


def why_not(outcome: Outcome, again: Any, device: str) -> tuple[str, str]:
    """The key of the fix, and what was tried: on GPUs once more without each transport, until one run ends well."""
    if device == "cpu":
        return ("stopped", "") if " is stopped" in outcome.problem else ("", "")
    for key, variable in WITHOUT.items():
        if again(**{variable: "1"}).result is not None:
            return key, f"; it works with {variable}=1"
    return "nccl", "; nor without P2P, shared memory or InfiniBand"


@check(
    "step",
    "three steps of tiny-llama under ZeRO-3 give the losses that are known to be right",
    fix="look at the first check above that failed; if none did, report it with `make verify ONLY=step JSON=1`",
    limit_s=300,
)
def check_step() -> Finding:
    from slipway.verify_kernels import build_ops

    count, device = count_ranks()
    if device == "cpu":
        build_ops(offload=False)
    outcome = run_ranks("step", count, STEP_LIMIT_S[device])
    if outcome.result is None:
        return failed("{problem}", problem=outcome.problem, ranks=count)
    return judge_losses(outcome.result, json.loads(LOSSES.read_text(encoding="utf-8"))["losses"])


def judge_losses(got: dict[str, Any], known: list[float]) -> Finding:
    """Whether a step's result is by DeepSpeed's engine, at stage 3, and its losses are the known ones."""
    off = [abs(a - b) / b for a, b in zip(got["losses"], known, strict=True)]
    bound = LOSS_BOUND[got["device"]]
    shown = ", ".join(f"{loss:.4f}" for loss in got["losses"])
    text = "{ranks} {device} ranks, {engine}, ZeRO stage {stage}: losses {shown}"
    figures = {**got, "shown": shown, "known": known, "off": off, "bound": bound}
    if not all(one <= bound for one in off):  # a nan is not; max() would pass over it
        expected = ", ".join(f"{loss:.4f}" for loss in known)
        return failed(text + "; known to be right: {expected}", expected=expected, **figures)
    if (got["engine"], got["stage"]) != ("DeepSpeedEngine", 3):
        return failed(text, **figures)
    return passed(text + ", as known", **figures)
