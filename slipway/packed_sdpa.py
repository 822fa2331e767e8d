"""torch's SDPA over the sequences of a packed row one by one: the attention "sdpa_packed".

transformers' own "sdpa" gives a packed row one dense mask and computes all of it: tokens squared. Here each sequence
is a causal call of its own, so what lies across a border is neither masked nor computed. Anything but one packed row
(padding, several rows, a cache, a window) goes to transformers' "sdpa" as it is.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from slipway.borders import sequence_starts


@dataclass(frozen=True)
class Lengths:
    """Stands for the attention mask of one packed row: the lengths of its sequences, in tokens."""

    lengths: list[int]


def packed_mask(batch_size: int, q_length: int, kv_length: int, **asked: Any) -> Any:
    """Lengths for one row that holds several sequences, else what transformers' "sdpa" makes."""
    plain = asked.get("attention_mask") is None and asked.get("local_size") is None and not asked.get("use_vmap")
    if batch_size == 1 and q_length == kv_length and plain:
        starts = sequence_starts(asked["mask_function"], 1, kv_length, asked["device"])
        borders = [] if starts is None else starts[0].nonzero().flatten().tolist()
        if len(borders) > 1:
            ends = [*borders[1:], kv_length]
            return Lengths([end - start for start, end in zip(borders, ends, strict=True)])
    return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **asked)


def packed_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **asked: Any
) -> tuple[torch.Tensor, None]:
    """query (1, heads, tokens, dim), key and value (1, kv_heads, tokens, dim), mask Lengths: (1, tokens, heads, dim).

    With any other mask it is transformers' "sdpa". Raises ValueError for a model that asks for more than that.
    """
    if not isinstance(attention_mask, Lengths):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **asked)
    extras = [name for name in ("softcap", "position_bias") if asked.get(name) is not None]
    if extras:
        raise ValueError(f"attention sdpa_packed cannot do {', '.join(extras)}: use eager for this model")
    groups = query.shape[1] // key.shape[1]
    whole = (query, repeat_kv(key, groups), repeat_kv(value, groups))
    sequences = zip(*(part.split(attention_mask.lengths, dim=2) for part in whole), strict=True)
    out = [
        torch.nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=asked.get("dropout", 0.0), scale=asked.get("scaling"), is_causal=True
        )
        for q, k, v in sequences
    ]
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None
