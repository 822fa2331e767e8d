"""The attention sdpa_packed: sequence by sequence, plain sdpa otherwise, and without a trace in a saved model.

That it keeps sequences apart is proved in test_packed_rows.py, as for every kernel.
"""

import subprocess
import sys

import pytest
import torch
from test_packed_rows import llama, logits_of, sequences
from transformers import MistralConfig, MistralForCausalLM

from slipway import attention

attention.register("sdpa_packed")


@pytest.fixture
def packed_calls(monkeypatch):
    """The (query tokens, key tokens) of each SDPA call that "sdpa_packed" makes itself."""
    calls, kernel = [], torch.nn.functional.scaled_dot_product_attention

    def counted(query, key, *rest, **asked):
        if asked.get("is_causal") and "attn_mask" not in asked:  # transformers' own call names attn_mask
            calls.append((query.shape[2], key.shape[2]))
        return kernel(query, key, *rest, **asked)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    return calls


def test_sdpa_packed_computes_nothing_across_a_border(packed_calls):
    positions = torch.cat([torch.arange(n) for n in (5, 1, 7)])[None]
    logits_of(llama("sdpa_packed"), input_ids=torch.cat(sequences(5, 1, 7))[None], position_ids=positions)
    assert packed_calls == [(5, 5), (1, 1), (7, 7)] * 2, "once in each of the two layers"


def test_sdpa_packed_is_plain_sdpa_for_all_other_batches(packed_calls):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    window = MistralForCausalLM(MistralConfig(**sizes, num_hidden_layers=1, sliding_window=4)).eval()
    ahead = llama("sdpa")
    ahead.config.is_causal = False
    ids = torch.stack(sequences(12, 12))
    packed = {"input_ids": ids[:1], "position_ids": torch.cat([torch.arange(7), torch.arange(5)])[None]}
    padded = {"input_ids": ids, "attention_mask": torch.ones(2, 12).long().tril(9)}
    for model, inputs in (
        (llama("sdpa"), padded),
        (llama("sdpa"), {"input_ids": ids}),
        (window, packed),
        (ahead, packed),
    ):
        found = []
        for kernel in ("sdpa", "sdpa_packed"):
            model.set_attn_implementation(kernel)
            found.append(logits_of(model, **inputs))
        assert found[0].equal(found[1])
    assert not packed_calls


def test_sdpa_packed_refuses_what_it_would_get_wrong():
    positions = torch.tensor([[0, 1, 0, 1]])
    with pytest.raises(ValueError, match="cannot do softcap"):
        llama("sdpa_packed")(torch.tensor([[5, 6, 7, 8]]), position_ids=positions, use_cache=False, softcap=30.0)


def test_a_saved_model_does_not_need_this_package(tmp_path):
    llama("sdpa_packed").save_pretrained(tmp_path)
    assert not [path for path in tmp_path.glob("*.json") if "sdpa_packed" in path.read_text()]
    code = f"""
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
assert model.config._attn_implementation == "sdpa"
assert not [name for name in sys.modules if name.split(".")[0] == "slipway"]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
