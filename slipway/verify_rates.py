"""`make verify`: the GPU computes, and the cards exchange, at the rate that they should."""

import time
from typing import Any

from slipway.verify import Finding, check, failed, passed

MATMUL_SHARE = 0.4  # a sound card reaches 0.6 to 0.8 of its data sheet in a matmul of this size
LINK_SHARE = 0.15  # NCCL reaches 0.6 to 1 of NVLink's rate; through host memory it is a fifth of PCIe's
SIZE = 8192  # rows and columns: 1.1 TFLOP a product


@check(
    "gpu-matmul",
    "matrix products run at a fair share of the card's peak",
    fix="look at gpu-health (throttling) and gpu-cards (other processes); `nvidia-smi -q -d CLOCK,POWER` shows limits "
    "that were set: `nvidia-smi -rgc` and `-pl` undo them",
    limit_s=60,
    alone=True,
)
def check_matmul() -> Finding:
    from slipway.verify_kernels import need_gpu

    need_gpu()
    import torch

    dtypes = {"fp16": torch.float16, "tf32": torch.float32}
    dtypes |= {"bf16": torch.bfloat16} if torch.cuda.is_bf16_supported(including_emulation=False) else {}
    torch.backends.cuda.matmul.allow_tf32 = True
    return judge_matmul(torch.cuda.get_device_name(0), {kind: _rate(dtype) for kind, dtype in dtypes.items()})


def _rate(dtype: Any) -> float:
    """TFLOP/s of square products of random matrices on GPU 0."""
    import torch

    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=dtype) for _ in range(2))
    for _ in range(3):  # the first chooses a kernel, the others warm the clocks
        a @ b
    torch.cuda.synchronize()
    began, rounds = time.perf_counter(), 20
    for _ in range(rounds):
        a @ b
    torch.cuda.synchronize()
    return rounds * 2 * SIZE**3 / (time.perf_counter() - began) / 1e12


def judge_matmul(card: str, rates: dict[str, float]) -> Finding:
    """`rates` in TFLOP/s by dtype against topology.PEAKS; tf32 is shown, not judged, as is a card without a peak."""
    from slipway import topology

    peaks = {kind: topology.peak_flops(card, kind) for kind in rates}
    shares = {kind: rate * 1e12 / peaks[kind] for kind, rate in rates.items() if peaks[kind]}
    shown = ", ".join(
        f"{kind} {rate:.0f} TFLOP/s" + (f" ({100 * shares[kind]:.0f} % of peak)" if kind in shares else "")
        for kind, rate in rates.items()
    )
    slow = [kind for kind, share in shares.items() if share < MATMUL_SHARE]
    figures = {"card": card, "shown": shown, "rates": rates, "percent": {k: 100 * v for k, v in shares.items()}}
    return (failed if slow else passed)("{card}: {shown}", **figures)


def judge_bandwidth(got: dict[str, Any], kind: str, rate: float) -> Finding:
    """An all-reduce's bus bandwidth against what its links give in one direction, both in GB/s."""
    figures = {**got, "kind": kind, "rate": rate, "percent": 100 * got["gb_per_s"] / rate}
    text = "{ranks} GPUs, {mib:.0f} MiB, sums right, bus {gb_per_s:.0f} GB/s: {percent:.0f} % of {kind}'s {rate:.0f}"
    if got["gb_per_s"] < LINK_SHARE * rate:
        return failed(text, "slow", **figures)
    return passed(text, **figures)
