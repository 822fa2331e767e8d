"""Where the sequences of a batch start, read from the mask function that transformers hands to an attention."""

from collections.abc import Callable

import torch


def sequence_starts(mask_function: Callable, batch_size: int, length: int, device: torch.device) -> torch.Tensor | None:
    """(rows, length) bool: True where a token does not see the one before it, so a sequence starts there.

    None if tokens look ahead. `mask_function(row, head, query, key)` tells who sees whom; it is asked about
    neighbours only, so the cost grows with length and not with its square.
    """
    rows, here = torch.arange(batch_size, device=device)[:, None], torch.arange(length, device=device)[None]
    before, head = (here - 1).clamp(min=0), here.new_zeros(())
    if mask_function(rows, head, before, here).expand(batch_size, -1)[:, 1:].any():
        return None
    starts = ~mask_function(rows, head, here, before).expand(batch_size, -1)
    return torch.cat([torch.ones_like(starts[:, :1]), starts[:, 1:]], dim=1)
