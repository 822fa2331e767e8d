"""xformers as an attention of transformers: the mask and the function that slipway.attention registers.

A batch is laid end to end as one row of causal blocks, one block a sequence: padding costs nothing, and the
sequences of a packed row stay apart without a dense mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from xformers.ops.fmha.attn_bias import (
    AttentionBias,
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalMask,
)

from slipway.borders import sequence_starts

# Arguments that other models hand to their attention and that this one would have to leave out.
_EXTRAS = ("softcap", "sliding_window", "s_aux", "position_bias")


@dataclass(frozen=True)
class Blocks:
    """What stands for the attention mask in every layer of one forward.

    `bias`: xformers' mask over the tokens laid end to end. `queries`, `keys`: (tokens,) int64, the tokens
    that are no padding as indices into the flat (rows * length); None where all are.
    """

    bias: AttentionBias
    queries: torch.Tensor | None
    keys: torch.Tensor | None


def blocks(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable,
    device: torch.device,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Blocks:
    """The mask of one forward, called as transformers' mask interface says (unused keywords go into `_`).

    `mask_function(row, head, query, key)` tells who sees whom; `attention_mask` is (rows, kv_length) bool,
    False for padding. Raises ValueError for a pattern other than causal within each sequence.
    """
    if local_size is not None or use_vmap or kv_offset:
        raise ValueError("attention xformers has no window, chunks or own masks: use sdpa for this model")
    if kv_length != q_offset + q_length:
        raise ValueError("attention xformers has no static cache: leave cache_implementation out, or use sdpa")
    starts = sequence_starts(mask_function, batch_size, kv_length, device)
    if starts is None:
        raise ValueError("attention xformers is causal and this model looks ahead: use sdpa for it")
    sequence = starts.flatten().cumsum(0).view(batch_size, kv_length) - 1
    seen = torch.ones_like(starts) if attention_mask is None else attention_mask
    count = int(sequence[-1, -1]) + 1
    keys = torch.bincount(sequence[seen], minlength=count)
    queries = torch.bincount(sequence[:, q_offset:][seen[:, q_offset:]], minlength=count)
    q_lengths, kv_lengths = torch.stack([queries, keys])[:, keys > 0].tolist()
    # A new token after cached ones is the last of its sequence; the plain mask would take it for the first.
    kind = BlockDiagonalCausalMask if q_lengths == kv_lengths else BlockDiagonalCausalFromBottomRightMask
    bias = kind.from_seqlens(q_lengths, kv_lengths, device=device)
    return Blocks(bias, _kept(seen[:, q_offset:]), _kept(seen))


def _kept(seen: torch.Tensor) -> torch.Tensor | None:
    return None if seen.all() else seen.flatten().nonzero().flatten()


def attention_over(kernel: Callable) -> Callable:
    """transformers' attention function over xformers' memory_efficient_attention or a kernel like it."""

    def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
        """query (rows, heads, q_length, dim), key and value (rows, kv_heads, kv_length, dim), mask Blocks.

        Returns ((rows, q_length, heads, dim), None), zeros where the query is padding. Raises ValueError if
        the model asks for more than that.
        """
        extras = [name for name in _EXTRAS if kwargs.get(name) is not None]
        if extras or not isinstance(attention_mask, Blocks):
            found = ", ".join(extras) or f"an attention mask of type {type(attention_mask).__name__}"
            raise ValueError(f"attention xformers cannot do {found}: use sdpa for this model")
        rows, heads, q_length, _ = query.shape
        groups = heads // key.shape[1]
        # Under autocast the rotary positions make query and key float32; the value keeps the right type.
        q = _lay(query.to(value.dtype), attention_mask.queries)
        # Repeated, because xformers shares a key head among query heads in the forward pass only.
        k = _lay(key.to(value.dtype), attention_mask.keys).repeat_interleave(groups, dim=2)
        v = _lay(value, attention_mask.keys).repeat_interleave(groups, dim=2)
        out = kernel(q, k, v, attn_bias=attention_mask.bias, p=dropout, scale=scaling)[0]
        if attention_mask.queries is not None:
            out = out.new_zeros(rows * q_length, *out.shape[1:]).index_copy(0, attention_mask.queries, out)
        return out.view(rows, q_length, heads, -1), None

    return attention


def _lay(x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """(rows, heads, length, dim) to (1, tokens, heads, dim), padding left out."""
    x = x.transpose(1, 2).flatten(0, 1)
    return (x if kept is None else x[kept])[None]
