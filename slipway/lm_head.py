"""TRL's fused LM head, made as fast on a CPU as plain torch.

TRL scores a token against the vocabulary in one autograd function that a GPU runs as Triton kernels. Where Triton is
missing it folds every tile in a dozen torch calls, which took half of a training step here, and it scores the prompts
too. The functions below give the same loss, metrics and gradients.
"""

from typing import Any

import torch

# Rows of logits in flight: 512 x 49,152 in fp32 are 100 MB. Smaller tiles lose time in the matrix products.
TILE = 512


def score_fast_on_cpu() -> None:
    """Makes TRL's loss on a CPU score only the tokens that are trained on, in few passes over their logits."""
    from trl.trainer import utils

    on_gpu, tiled = utils._use_triton, utils._ChunkedLogProbFunction

    class Score:
        @staticmethod
        def apply(hidden: Any, weight: Any, bias: Any, targets: Any, temperature: float, chunk: int, *rest: Any) -> Any:
            softcap, scale, outputs = rest
            if _plain(hidden, weight, outputs) and bias is softcap is None and temperature == scale == 1:
                log_probs, entropy, is_top1 = ScoreTokens.apply(hidden, weight, targets, torch.is_grad_enabled())
                return (
                    log_probs,
                    entropy if "entropy" in outputs else None,
                    None,
                    None,
                    is_top1 if "is_top1" in outputs else None,
                )
            return tiled.apply(hidden, weight, bias, targets, temperature, chunk, *rest)

    utils._ChunkedLogProbFunction = Score
    # TRL scores all positions where it has no Triton, for accelerators that compile anew for each number of tokens.
    utils._use_triton = lambda device: device.type == "cpu" or on_gpu(device)


def _plain(hidden: torch.Tensor, weight: torch.Tensor, outputs: tuple[str, ...]) -> bool:
    """Whether ScoreTokens computes what is asked: fp32 on a CPU, and metrics that it has."""
    return (
        hidden.device.type == "cpu"
        and hidden.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and set(outputs) <= {"log_probs", "entropy", "is_top1"}
    )


class ScoreTokens(torch.autograd.Function):
    """Log-probability of each target token, entropy of its distribution, and whether it is the most likely one.

    The probabilities (N x V, fp32) are kept from forward to backward, as in plain torch, and become the gradient in
    place: d(log p[target]) / d(logits) = onehot(target) - p.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, train: bool) -> Any:
        """hidden (N, H), weight (V, H), targets (N,) -> three tensors (N,): fp32, fp32, bool. Not train: keeps no p."""
        log_probs, entropy, is_top1, ctx.kept = [], [], [], []
        for rows, wanted in zip(hidden.split(TILE), targets.split(TILE), strict=True):
            logits = rows @ weight.t()
            norm = logits.logsumexp(-1)
            p = (logits - norm[:, None]).exp_()
            log_probs.append(logits.gather(1, wanted[:, None])[:, 0] - norm)
            entropy.append(norm - torch.linalg.vecdot(p, logits))
            is_top1.append(logits.argmax(-1) == wanted)
            if train:
                ctx.kept.append(p)
        ctx.save_for_backward(hidden, weight, targets)
        found = torch.cat(log_probs), torch.cat(entropy), torch.cat(is_top1)
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor, *_: Any) -> Any:
        """upstream (N,) -> gradients of hidden and weight, where they are needed."""
        from trl.trainer.utils import maybe_gather_lm_head_ctx

        hidden, weight, targets = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None  # overwritten below, so a second backward must not find them
        if kept is None:
            raise RuntimeError("the graph of the LM head was freed by an earlier backward")
        of_hidden = torch.empty_like(hidden)
        with maybe_gather_lm_head_ctx(weight, None):  # ZeRO-3 has partitioned it again since forward
            of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
            tiles = (x.split(TILE) for x in (hidden, targets[:, None], upstream[:, None], of_hidden))
            for rows, wanted, up, out, p in zip(*tiles, kept, strict=True):
                gradient = p.mul_(-up).scatter_add_(1, wanted, up)
                torch.mm(gradient, weight, out=out)
                if of_weight is not None:
                    of_weight.addmm_(gradient.t(), rows)
        return of_hidden, of_weight, None, None
