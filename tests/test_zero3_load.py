"""Under ZeRO-3 on two CPU ranks a model is loaded in shards, and is the same model."""

import model_zoo
import pytest
import torch
from harness import torchrun
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from slipway import embedded, models

ZERO3 = """
import sys
import torch
from accelerate import PartialState
PartialState(backend="gloo")
import deepspeed
from transformers import TrainingArguments
from slipway import models
stage3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
joined = {"use_configured_state": True}
args = TrainingArguments(sys.argv[1], deepspeed=stage3, accelerator_config=joined, report_to=[])
for folder in sys.argv[2:]:
    model = models.resolve(folder)
    tokenizer = models.load_tokenizer(model)
    loaded = models.load(model, tokenizer, dtype=torch.float32, attn="sdpa", zero3=True)
    sharded = [p for p in loaded.parameters() if hasattr(p, "ds_id")]  # a resized table: later
    assert len(sharded) >= len(list(loaded.parameters())) - 2 and not any(p.numel() for p in sharded)
    with deepspeed.zero.GatheredParameters(sharded):
        state = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    if args.process_index == 0:
        loaded.save_pretrained(folder + "-zero3", state_dict=state)
        models.check_saved(folder + "-zero3", loaded.config)
"""


@pytest.mark.timeout(600)
def test_zero3_loads_the_same_weights_resized_tied_or_from_an_adapter(tmp_path):
    folders = [model_zoo.write(tmp_path / f"tied-{tied}", model_zoo.gpt2(), tied=tied) for tied in (True, False)]
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(embedded.folder("tiny-llama")), lora).save_pretrained(
        tmp_path / "adapter"
    )
    folders.append(tmp_path / "adapter")
    script = tmp_path / "zero3.py"
    script.write_text(ZERO3)
    done = torchrun(script, tmp_path, *folders, timeout=500, DS_ACCELERATOR="cpu", ACCELERATE_USE_DEEPSPEED="true")
    assert done.returncode == 0, done.stderr[-3000:]
    for folder in folders:
        model = models.resolve(str(folder))
        tokenizer = models.load_tokenizer(model)
        alone = models.load(model, tokenizer, dtype=torch.float32, attn="sdpa", zero3=False)
        sharded = AutoModelForCausalLM.from_pretrained(f"{folder}-zero3")
        assert sharded.config.vocab_size == alone.config.vocab_size
        expected = alone.state_dict()
        for name, tensor in sharded.state_dict().items():
            assert torch.allclose(tensor, expected[name], atol=1e-6), name
