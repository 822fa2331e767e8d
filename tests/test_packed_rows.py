"""The sequences of a packed row do not see each other, and none sees padding, under each attention kernel.

xformers has no CPU kernel. Its mask, its function and the way through transformers run here over the formula
that xformers tests its own kernels against; the kernels themselves run in the tests marked gpu.
"""

import copy

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from slipway import attention
from slipway.attention import Device

CPU_KERNELS = ("eager", "sdpa", "sdpa_packed", "xformers_reference")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
flash = pytest.mark.skipif(not Device.current().flash_attn, reason="needs flash-attn")
KERNELS = (
    *CPU_KERNELS,
    pytest.param("xformers", marks=gpu),
    pytest.param("flash_attention_2", marks=[*gpu, flash]),
)


@pytest.fixture(autouse=True, scope="module")
def kernels():
    """Registers xformers, its formula, and one that leaks because transformers makes no mask for it."""
    for name in ("sdpa_packed", "xformers", "xformers"):  # twice must not matter
        attention.register(name)
    from xformers.attn_bias_utils import ref_attention

    from slipway.xformers_attention import attention_over, blocks

    def reference(query, key, value, attn_bias, p, scale):
        assert query.dtype == key.dtype == value.dtype, "xformers takes one dtype only"
        return ref_attention(query, key, value, attn_bias, p=p, scale=scale).to(query.dtype)

    AttentionInterface.register("xformers_reference", attention_over(reference))
    AttentionMaskInterface.register("xformers_reference", blocks)
    AttentionInterface.register("leaky", sdpa_attention_forward)


def llama(kernel, dtype=torch.bfloat16):
    """A random LLaMA with grouped heads and large weights; on GPU in `dtype` if the kernel needs one."""
    torch.manual_seed(0)
    on_gpu = kernel in ("xformers", "flash_attention_2")
    config = LlamaConfig(
        vocab_size=64, hidden_size=128 if on_gpu else 32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, max_position_embeddings=128,
        pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model = model.to("cuda", dtype) if on_gpu else model
    model.set_attn_implementation(kernel)
    return model


def sequences(*lengths, seed=1):
    """Random token ids of these lengths, without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 64, (length,), generator=generator) for length in lengths]


def eager_twin(model):
    """The same weights under transformers' plain formula, to compare kernels with."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


def logits_of(model, **inputs):
    with torch.no_grad():
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        return model(**inputs, use_cache=False).logits.float().cpu()


def assert_same(found, expected, model):
    """Within rounding; in half precision against the spread of the logits."""
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.05 * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [[(5, 7)], [(5, 7), (9, 3)], [(1, 1, 10)], [(12,), (4, 8)]], ids=str)
def test_packed_sequences_equal_the_same_alone(kernel, rows):
    model = llama(kernel)
    parts = [sequences(*lengths, seed=seed) for seed, lengths in enumerate(rows)]
    ids = torch.stack([torch.cat(row) for row in parts])
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    packed = logits_of(model, input_ids=ids, position_ids=positions)
    plain = eager_twin(model)
    alone = [torch.cat([logits_of(plain, input_ids=x[None])[0] for x in row]) for row in parts]
    assert_same(packed, torch.stack(alone), model)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_a_packed_row_equal_those_of_its_sequences(kernel):
    model = llama(kernel)
    plain, texts = eager_twin(model), [x.to(model.device) for x in sequences(5, 9)]
    positions = torch.cat([torch.arange(len(x), device=x.device) for x in texts])
    packed = model(input_ids=torch.cat(texts)[None], position_ids=positions[None], use_cache=False).logits
    packed.square().mean().backward()
    torch.cat([plain(input_ids=x[None]).logits for x in texts], dim=1).square().mean().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(found.grad.float().cpu(), expected.grad.float().cpu(), model)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_the_same_without_padding(kernel, side):
    model = llama(kernel)
    texts = sequences(4, 11, 8)
    kept = torch.stack([torch.arange(11) < len(x) for x in texts])
    kept = kept.flip(1) if side == "left" else kept
    ids = torch.zeros(3, 11, dtype=torch.long).masked_scatter(kept, torch.cat(texts))
    positions = (kept.long().cumsum(1) - 1).clamp(min=0)
    padded = logits_of(model, input_ids=ids, attention_mask=kept.long(), position_ids=positions)
    plain = eager_twin(model)
    alone = torch.cat([logits_of(plain, input_ids=x[None])[0] for x in texts])
    assert_same(padded[kept], alone, model)


@pytest.mark.parametrize("kernel", ["sdpa", "sdpa_packed", "xformers_reference", pytest.param("xformers", marks=gpu)])
def test_generation_from_a_padded_batch_equals_one_by_one(kernel):
    model, prompts = llama(kernel, torch.float32), sequences(3, 7)
    plain = eager_twin(model)
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
    alone = [plain.generate(x[None].to(model.device), settings)[0, len(x) :] for x in prompts]
    ids = torch.stack([torch.cat([torch.zeros(7 - len(x), dtype=torch.long), x]) for x in prompts])
    inputs = {"input_ids": ids.to(model.device), "attention_mask": (ids != 0).long().to(model.device)}
    together = model.generate(**inputs, generation_config=settings)[:, 7:]
    assert together.tolist() == [x.tolist() for x in alone]


def dense(mask, rows, q_length, kv_length):
    """Blocks as (rows, q_length, kv_length) bool."""
    queries = torch.arange(rows * q_length) if mask.queries is None else mask.queries
    keys = torch.arange(rows * kv_length) if mask.keys is None else mask.keys
    seen = torch.zeros(rows * q_length, rows * kv_length, dtype=torch.bool)
    seen[queries[:, None], keys[None]] = mask.bias.materialize((len(queries), len(keys))) == 0
    by_row = seen.view(rows, q_length, rows, kv_length)
    own = torch.stack([by_row[row, :, row] for row in range(rows)])
    assert own.sum() == seen.sum(), "a row sees another row"
    return own


@pytest.mark.parametrize("seed", range(8))
def test_the_xformers_mask_is_the_dense_mask(seed):
    from slipway.xformers_attention import blocks

    generator = torch.Generator().manual_seed(seed)
    rows, length, new = 3, 12, seed % 4 + 1
    holes = torch.rand(rows, length, generator=generator) < 0.7
    holes[:, -new:] = True
    for q_length, padding in ((length, None), (length, holes), (new, None), (new, holes), (1, holes)):
        call = {
            "batch_size": rows, "q_length": q_length, "kv_length": length, "q_offset": length - q_length,
            "attention_mask": padding, "mask_function": causal_mask_function, "device": torch.device("cpu"),
        }  # fmt: skip
        expected = sdpa_mask(**call, allow_is_causal_skip=False)[:, 0]
        if padding is not None:
            expected = expected & padding[:, -q_length:, None]
        assert dense(blocks(**call), rows, q_length, length).equal(expected)


def test_xformers_takes_what_autocast_hands_over():
    model = llama("xformers_reference")
    (ids,) = sequences(6)
    with torch.autocast("cpu", torch.bfloat16):
        found = logits_of(model, input_ids=ids[None])
    expected = logits_of(model, input_ids=ids[None])
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * expected.abs().max().item())


def test_flash_attention_3_is_off_where_it_crashes():
    from xformers.ops import fmha

    assert fmha._get_use_fa3() == (Device.current().capability == (9, 0))


def test_xformers_refuses_what_it_would_get_wrong():
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = MistralForCausalLM(MistralConfig(**sizes, num_hidden_layers=1, sliding_window=4))
    model.set_attn_implementation("xformers_reference")
    with pytest.raises(ValueError, match="no window"):
        logits_of(model, input_ids=torch.tensor([[5, 6, 7, 8, 9, 10]]))
    model = llama("xformers_reference")
    with pytest.raises(ValueError, match="mask of type Tensor"):
        logits_of(model, input_ids=torch.tensor([[5, 6]]), attention_mask=torch.ones(1, 1, 2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="cannot do softcap"):
        model(input_ids=torch.tensor([[5, 6]]), softcap=30.0)
    with pytest.raises(ValueError, match="no static cache"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, cache_implementation="static")
    model.config.is_causal = False
    with pytest.raises(ValueError, match="looks ahead"):
        logits_of(model, input_ids=torch.tensor([[5, 6]]))


def trainer_on(model, texts, folder, checkpointing):
    """TRL's trainer, packing as the recipes do: one step of plain gradient descent on all `texts`."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w3"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", bos_token="w2")
    data = Dataset.from_dict({"input_ids": [x.tolist() for x in texts]})
    arguments = SFTConfig(
        output_dir=str(folder),
        packing=True,
        max_length=24,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        activation_checkpointing=checkpointing is not None,
        activation_checkpointing_kwargs={"use_reentrant": checkpointing is True},
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,  # TRL's default is true, on a CPU too
    )
    return SFTTrainer(model, args=arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer)


def step_alone(model, texts):
    """The mean loss a token over `texts`, each by itself, and the weights after a step down its gradient."""
    losses = [
        torch.nn.functional.cross_entropy(model(input_ids=x[None]).logits[0, :-1], x[1:], reduction="sum")
        for x in texts
    ]
    loss = sum(losses) / sum(len(x) - 1 for x in texts)
    loss.backward()
    return loss.item(), {name: (p - p.grad).detach() for name, p in model.named_parameters()}


def packed_run(kernel, folder, checkpointing=None):
    """(texts, trainer) where the trainer's only batch is two packed rows of several sequences."""
    texts = sequences(9, 5, 10, 14, 6, 3)
    trainer = trainer_on(llama(kernel), texts, folder, checkpointing)
    (batch,) = trainer.get_train_dataloader()
    assert len(trainer.train_dataset) == 2, "two rows of packed sequences"
    assert batch["input_ids"].shape == (1, sum(map(len, texts))), "TRL lays the rows of a micro-batch end to end"
    assert (batch["position_ids"] == 0).sum() == len(texts)
    assert "attention_mask" not in batch
    return texts, trainer


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["no", "reentrant", "plain"])
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_trl_trains_and_evaluates_packed_rows_as_if_alone(kernel, checkpointing, tmp_path):
    texts, trainer = packed_run(kernel, tmp_path, checkpointing)
    loss, weights = step_alone(llama("eager"), texts)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
    trainer.train()
    (trained,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert trained == pytest.approx(loss, rel=1e-5)
    assert trainer.model.is_activation_checkpointing == (checkpointing is not None)
    for name, weight in trainer.model.named_parameters():
        torch.testing.assert_close(weight.data, weights[name], rtol=1e-4, atol=1e-4, msg=name)


def test_that_proof_sees_a_leak(tmp_path):
    texts, trainer = packed_run("leaky", tmp_path)
    loss, _ = step_alone(llama("eager"), texts)
    assert trainer.evaluate()["eval_loss"] != pytest.approx(loss, rel=1e-3)
