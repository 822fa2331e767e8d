"""On a CPU the LM head scores trained tokens only, in few passes, to the same losses and gradients as TRL's own."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer import utils

from slipway import lm_head

OUTPUTS = ("log_probs", "entropy", "is_top1")


@pytest.fixture
def tiled(monkeypatch):
    """TRL's function, and how many tokens each call of it was given."""
    counts, tiled = [], utils._ChunkedLogProbFunction

    class Counting:
        @staticmethod
        def apply(hidden, *rest):
            counts.append(len(hidden))
            return tiled.apply(hidden, *rest)

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Counting)
    monkeypatch.setattr(utils, "_use_triton", utils._use_triton)  # both put back after the test
    return counts


@pytest.fixture
def fast(monkeypatch):
    """How many tokens each call of ours was given."""
    counts, forward = [], lm_head.ScoreTokens.forward

    def count(ctx, hidden, *rest):
        counts.append(len(hidden))
        return forward(ctx, hidden, *rest)

    monkeypatch.setattr(lm_head.ScoreTokens, "forward", staticmethod(count))
    return counts


def tiny_model(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, **{"tie_word_embeddings": True} | changes))
    utils.add_fused_lm_head(model, outputs=OUTPUTS)
    return model


def step(model, prompt=10):
    """Loss, metrics and the head's gradient of one batch, its first tokens a prompt."""
    torch.manual_seed(1)
    ids = torch.randint(64, (2, 16))
    labels = ids.clone()
    labels[:, :prompt] = -100
    model.zero_grad()
    out = model(input_ids=ids, labels=labels, fused_lm_head=True)
    out.loss.backward()
    return out.loss.detach(), out.entropy, out.is_top1, model.lm_head.weight.grad.clone()


def assert_same(mine, trl):
    for ours, theirs in zip(mine, trl, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # logits are near 20: 1e-5 is a few ulp


def test_prompts_are_not_scored_and_nothing_else_changes(tiled, fast):
    model = tiny_model()
    before = step(model)
    lm_head.score_fast_on_cpu()
    assert_same(step(model), before)
    assert (tiled, fast) == ([2 * 15], [2 * 6])


@pytest.mark.parametrize("tokens", [0, 1, lm_head.TILE, lm_head.TILE + 1])
def test_the_function_equals_trls_at_the_borders_of_a_tile(tokens):
    """Upstream gradients differ per token, so a mixed-up row or token shows."""
    results = []
    for function in ("trl", "ours"):
        torch.manual_seed(2)
        hidden = torch.randint(-1, 2, (tokens, 8)).float().requires_grad_()  # whole numbers: a tie is exact
        weight = torch.randint(-1, 2, (50, 8)).float().index_fill_(0, torch.tensor([7, 9]), 1.0).requires_grad_()
        targets, upstream = torch.randint(50, (tokens,)), torch.randn(tokens)
        targets[: tokens // 2] = 9  # ties with 7, often as the greatest: the first one is TRL's top-1
        if function == "trl":
            arguments = (None, targets, 1.0, 16, None, 1.0, OUTPUTS)
            log_probs, entropy, _, _, is_top1 = utils._ChunkedLogProbFunction.apply(hidden, weight, *arguments)
        else:
            log_probs, entropy, is_top1 = lm_head.ScoreTokens.apply(hidden, weight, targets, True)
        log_probs.backward(upstream)
        results.append((log_probs.detach(), entropy, is_top1, hidden.grad, weight.grad))
    assert_same(results[1], results[0])


def test_a_batch_without_a_label_gives_zero(tiled, fast):
    lm_head.score_fast_on_cpu()
    loss, _, _, gradient = step(tiny_model(), prompt=16)
    assert (loss, gradient.abs().sum(), fast) == (0, 0, [0])


def test_a_frozen_head_gets_no_gradient(tiled, fast):
    lm_head.score_fast_on_cpu()
    model = tiny_model(tie_word_embeddings=False)
    model.lm_head.weight.requires_grad_(False)
    ids = torch.randint(64, (2, 16))
    model(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
    assert model.lm_head.weight.grad is None
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0
    assert fast


def test_evaluation_keeps_no_probabilities():
    class Context:
        def save_for_backward(self, *_):
            pass

        mark_non_differentiable = save_for_backward

    for train, tiles in ((True, 2), (False, 0)):
        ctx = Context()
        hidden = torch.randn(lm_head.TILE + 1, 8)
        lm_head.ScoreTokens.forward(ctx, hidden, torch.randn(50, 8), torch.zeros(len(hidden), dtype=int), train)
        assert len(ctx.kept) == tiles


@pytest.mark.parametrize("why", ["bf16", "autocast", "bias", "logit_scale"])
def test_what_ours_does_not_compute_is_left_to_trl(tiled, fast, why):
    model = tiny_model(**({"logit_scale": 0.5} if why == "logit_scale" else {}))
    if why == "bf16":
        model.bfloat16()
    if why == "bias":
        model.lm_head.bias = torch.nn.Parameter(torch.ones(64))
    lm_head.score_fast_on_cpu()
    with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
        step(model)
    assert (tiled, fast) == ([2 * 6], [])
