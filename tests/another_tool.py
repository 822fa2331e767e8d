"""What another tool leaves: a plain DeepSpeed loop, nothing of Slipway in it, and its own weights to compare with.

    torchrun --nproc_per_node 2 tests/another_tool.py FOLDER     # FOLDER/CASE/global_step2, FOLDER/CASE.safetensors

The model is tied, of odd sizes (so that every cut needs padding), has a buffer and a frozen layer, and is trained in
bf16 or fp32. A large one is saved as it begins: what counts there is its size.
"""

import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

# name: (stage, bf16, more of zero_optimization)
CASES = {
    "zero0": (0, False, {}),
    "zero1": (1, False, {}),
    "zero2_bf16": (2, True, {}),
    "zero2_round_robin": (2, False, {"round_robin_gradients": True}),
    "zero3_bf16": (3, True, {}),
    "zero3_groups": (3, False, {"sub_group_size": 3000}),
    "large_zero2": (2, False, {}),
    "large_zero3": (3, False, {}),
}


def config(large: bool = False, tied: bool = True) -> LlamaConfig:
    """Of 25 thousand parameters, most in odd numbers; `large`: of 42 million, 168 MB."""
    return LlamaConfig(
        vocab_size=8000 if large else 101,
        hidden_size=512 if large else 33,
        intermediate_size=1376 if large else 75,
        num_hidden_layers=12 if large else 2,
        num_attention_heads=4 if large else 3,
        num_key_value_heads=4 if large else 1,
        head_dim=128 if large else 12,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )


def build(large: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(large))
    model.model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
    model.model.norm.register_buffer("scale", torch.tensor([1.25, 3.0]))
    return model


def one(folder: Path, name: str) -> None:
    stage, bf16, more = CASES[name]
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, **more},
        "zero_allow_untested_optimizer": True,
    }
    model = build(name.startswith("large"))
    norms = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    kind = torch.optim.SGD if name.startswith("large") else torch.optim.AdamW  # SGD saves no moments
    optimizer = kind([{"params": others}, {"params": norms, "weight_decay": 0.0}], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    ids = torch.arange(24).view(1, -1) + engine.global_rank
    for _ in range(0 if name.startswith("large") else 2):
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()
    engine.save_checkpoint(str(folder / name), tag="global_step2")
    masters = {}
    for key, parameter in engine.module.named_parameters():  # on all ranks: they gather together
        if bf16 and parameter.requires_grad:
            masters[key] = safe_get_full_fp32_param(parameter).clone()
        else:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                masters[key] = parameter.detach().clone()
    masters["model.norm.scale"] = engine.module.model.norm.scale.clone()
    if engine.global_rank == 0:
        save_file(masters, folder / f"{name}.safetensors")


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    for case in sys.argv[2:] or CASES:
        one(Path(sys.argv[1]), case)
