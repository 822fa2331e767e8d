"""On a CPU the LM head scores trained tokens only, to the same loss and gradients as on all of them."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer import utils

from slipway import lm_head


@pytest.fixture
def scored(monkeypatch):
    """How many tokens each call of TRL's kernel was given."""
    counts, kernel = [], utils._ChunkedLogProbFunction.apply

    class Counting:
        @staticmethod
        def apply(hidden, *rest):
            counts.append(len(hidden))
            return kernel(hidden, *rest)

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Counting)
    monkeypatch.setattr(utils, "_use_triton", utils._use_triton)  # put back after the test
    return counts


def loss_and_gradient():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=True))
    utils.add_fused_lm_head(model)
    ids = torch.randint(64, (2, 16))
    labels = ids.clone()
    labels[:, :10] = -100
    out = model(input_ids=ids, labels=labels, fused_lm_head=True)
    loss = -out.log_probs.sum() / out.label_mask.sum()
    loss.backward()
    return loss.detach(), model.lm_head.weight.grad


def test_prompt_tokens_are_not_scored(scored):
    loss, gradient = loss_and_gradient()
    lm_head.score_labelled_tokens_only()
    same_loss, same_gradient = loss_and_gradient()
    assert scored == [2 * 15, 2 * 6]
    torch.testing.assert_close(same_loss, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(same_gradient, gradient, rtol=1e-5, atol=1e-7)
