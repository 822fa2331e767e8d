"""Attention in fp64, written out, and inputs to hold fast kernels against: masks, grouped heads, packed borders."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

DIM = 64
# Largest relative error that a right kernel may show: some roundings of a dtype with 24, 11 or 8 bits of mantissa.
BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """One row of sequences `lengths` (tokens), laid end to end, the last `padding` tokens of it padding."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 4
    padding: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.padding


CASES = (
    Case("causal", (96,)),
    Case("grouped heads", (96,), heads=8, kv_heads=2),
    Case("padded", (70,), padding=26),
    Case("packed", (33, 1, 47, 15)),
    Case("packed, grouped heads", (50, 46), heads=8, kv_heads=2),
)

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Case], torch.Tensor]


def allowed(case: Case, device: torch.device | str) -> torch.Tensor:
    """(tokens, tokens) bool: which key (column) a query (row) sees. A padding token sees itself, so no row is empty."""
    number = torch.full((case.tokens,), -1, device=device)
    for i, (start, length) in enumerate(zip(_starts(case), case.lengths, strict=True)):
        number[start : start + length] = i
    same = (number[:, None] == number[None]) & (number >= 0)
    return (same.tril() | torch.eye(case.tokens, dtype=torch.bool, device=device)).contiguous()


def _starts(case: Case) -> list[int]:
    return [sum(case.lengths[:i]) for i in range(len(case.lengths))]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
    """softmax(q k^T / sqrt(dim)) v over what is allowed. q (1, heads, tokens, dim), k and v (1, kv_heads, ...)."""
    groups = case.heads // case.kv_heads
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(2, 3)) / DIM**0.5
    return scores.masked_fill(~allowed(case, q.device), float("-inf")).softmax(-1) @ v


def worst_error(kernel: Kernel, case: Case, dtype: torch.dtype, device: str) -> float:
    """Largest relative error of the output and of the gradients of q, k and v, against fp64 on the same inputs.

    Relative to the largest value of each tensor; padding counts neither as input nor as output. Inputs are random, from
    torch's current seed.
    """
    shapes = [(1, heads, case.tokens, DIM) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    inputs = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    weight = torch.randn(shapes[0], device=device).to(dtype)
    weight[:, :, case.tokens - case.padding :] = 0  # so nothing of padding reaches the gradients
    results = []
    for function, kind in ((kernel, dtype), (reference, torch.float64)):
        leaves = [tensor.to(kind).clone().requires_grad_() for tensor in inputs]
        out = function(*leaves, case)
        (out * weight.to(kind)).sum().backward()
        kept = out[:, :, : case.tokens - case.padding]
        results.append([kept.detach().double(), *(leaf.grad.double() for leaf in leaves)])
    errors = [((got - want).abs().max() / want.abs().max()).item() for got, want in zip(*results, strict=True)]
    return max(error if error == error else float("inf") for error in errors)  # nan counts as wrong


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
    """torch's own: without a mask where one causal sequence is all there is, as that is another kernel."""
    plain = len(case.lengths) == 1 and not case.padding
    mask = None if plain else allowed(case, q.device)
    grouped = case.heads != case.kv_heads
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=plain, enable_gqa=grouped
    )


def flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
    """flash-attn's kernel for packed rows; its padding is left out of the row."""
    from flash_attn import flash_attn_varlen_func

    kept = case.tokens - case.padding
    ends = torch.tensor([*_starts(case), kept], dtype=torch.int32, device=q.device)
    laid = [tensor[0, :, :kept].transpose(0, 1) for tensor in (q, k, v)]
    longest = max(case.lengths)
    out = flash_attn_varlen_func(*laid, ends, ends, longest, longest, causal=True)
    return torch.nn.functional.pad(out.transpose(0, 1)[None], (0, 0, 0, case.padding))


def xformers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
    """xformers' memory-efficient attention over causal blocks, as slipway.xformers_attention calls it."""
    from xformers.ops import memory_efficient_attention
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

    kept, groups = case.tokens - case.padding, case.heads // case.kv_heads
    bias = BlockDiagonalCausalMask.from_seqlens(list(case.lengths), device=q.device)
    laid = [tensor[:, :, :kept].transpose(1, 2) for tensor in (q, k, v)]
    laid[1:] = [tensor.repeat_interleave(groups, dim=2) for tensor in laid[1:]]
    out = memory_efficient_attention(*laid, attn_bias=bias).transpose(1, 2)
    return torch.nn.functional.pad(out, (0, 0, 0, case.padding))
