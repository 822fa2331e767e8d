"""Ranks that hang or are wrong are found out, and nothing of them is left; the known losses are right."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from harness import ROOT
from transformers import LlamaConfig, LlamaForCausalLM

from slipway import attention_cases, embedded, verify_kernels, verify_rank, verify_ranks
from slipway.attention_cases import BOUNDS, CASES
from slipway.verify_ranks import LOSSES, Outcome, judge_losses, why_not

KNOWN = json.loads(LOSSES.read_text())["losses"]


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    return [one for one in process.children(recursive=True) if "slipway.verify_rank" in one.cmdline()]


def test_a_stopped_rank_is_reported_within_the_limit_and_nothing_is_left():
    words = [sys.executable, str(ROOT / "scripts" / "verify.py"), "--only", "all-reduce", "--json"]
    began = time.monotonic()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while len(ranks := ranks_of(psutil.Process(process.pid))) < 2 and time.monotonic() - began < 60:
            time.sleep(0.05)
        stopped = next(one for one in ranks if one.environ()["RANK"] == "1")
        os.kill(stopped.pid, signal.SIGSTOP)
        out, err = process.communicate(timeout=verify_ranks.LIMIT_S["cpu"] + 60)
    finally:
        process.kill()
    [row] = json.loads(out)["checks"]
    assert process.returncode == 1, err
    assert (row["state"], row["finding"]) == ("failed", "all-reduce.stopped")
    assert "no result within 30 s" in row["fact"] and "rank 1 is stopped" in row["fact"]
    assert row["seconds"] < verify_ranks.LIMIT_S["cpu"] + 15
    assert psutil.wait_procs(ranks, timeout=5)[1] == []


@pytest.mark.parametrize(
    ("works", "key", "words"),
    [
        ("NCCL_P2P_DISABLE", "p2p", "works with NCCL_P2P_DISABLE=1"),
        ("NCCL_SHM_DISABLE", "shm", "works with NCCL_SHM_DISABLE=1"),
        ("NCCL_IB_DISABLE", "ib", "works with NCCL_IB_DISABLE=1"),
        ("nothing", "nccl", "nor without P2P"),
    ],
)
def test_on_gpus_a_failed_all_reduce_is_tried_without_each_transport(works, key, words):
    tried = []

    def again(**off):
        tried.append(off)
        return Outcome({"wrong": 0} if works in off else None, "no result within 60 s")

    found = why_not(Outcome(None, "no result within 60 s"), again, "cuda")
    assert found[0] == key and words in found[1]
    assert tried[0] == {"NCCL_P2P_DISABLE": "1"}


def test_the_known_losses_are_those_of_a_plain_loop():
    """One process, no DeepSpeed: so ZeRO-3 on any number of ranks is held to what torch alone gives."""
    config = LlamaConfig.from_json_file(embedded.TINY_CONFIG)
    torch.manual_seed(20)
    model = LlamaForCausalLM(config)
    batch = torch.randint(config.vocab_size, (verify_rank.ROWS, verify_rank.TOKENS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(verify_rank.STEPS):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(KNOWN, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "passed"),
        ({"losses": [KNOWN[0], KNOWN[1], KNOWN[2] * 1.001]}, "failed"),
        ({"losses": [KNOWN[0], float("nan"), KNOWN[2]]}, "failed"),
        ({"stage": 2}, "failed"),
        ({"engine": "DistributedDataParallel"}, "failed"),
    ],
)
def test_losses_engine_and_stage_are_compared(change, state):
    got = {"device": "cpu", "ranks": 2, "engine": "DeepSpeedEngine", "stage": 3, "losses": KNOWN}
    assert judge_losses(got | change, KNOWN).state == state


# --- the numeric checks can fail

PACKED, GROUPED, PADDED = CASES[3], CASES[1], CASES[2]


def without_borders(q, k, v, case):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def without_scale(q, k, v, case):
    return attention_cases.sdpa(q * 1.01, k, v, case)


def wrong_heads(q, k, v, case):
    groups = case.heads // case.kv_heads
    k, v = (tensor.repeat(1, groups, 1, 1) for tensor in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def wrong_gradient(q, k, v, case):
    return attention_cases.sdpa(q.detach(), k, v, case) + 0 * q.sum()


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("kernel", "case", "dtype"),
    [
        (without_borders, PACKED, FP32),
        (without_borders, PACKED, BF16),
        (without_scale, CASES[0], FP32),  # 1 % off: less than bfloat16 can tell
        (wrong_heads, GROUPED, FP32),
        (wrong_heads, GROUPED, BF16),
        (wrong_gradient, PADDED, FP32),
        (wrong_gradient, PADDED, BF16),
    ],
)
def test_a_wrong_attention_kernel_is_over_the_bound(kernel, case, dtype):
    assert attention_cases.worst_error(kernel, case, dtype, "cpu") > BOUNDS[dtype]


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "passed"),
        ({"weight_decay": 0.0}, "failed"),
        ({"betas": (0.9, 0.951)}, "failed"),
        ({"lr": 1.001e-2}, "failed"),
    ],
)
def test_an_optimizer_that_steps_otherwise_is_found(change, state):
    def make(weights):
        return torch.optim.AdamW(weights, **(verify_kernels.ADAM | change))

    assert verify_kernels.same_steps("AdamW", make, "cpu").state == state
