"""Models of every kind are found, fitted with pad token and template, and saved as plain transformers'."""

import hashlib
import inspect
import json
from pathlib import Path

import model_zoo
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipway import embedded, models
from slipway.errors import InputError
from slipway.tokenizers import end_of_turn

TOKENIZERS = {
    name: make
    for name, make in inspect.getmembers(model_zoo, inspect.isfunction)
    if not inspect.signature(make).parameters and make.__module__ == model_zoo.__name__
}
assert len(TOKENIZERS) >= 4
CHAT = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Blue."}]


def opened(folder: Path, dtype=torch.float32):
    """Model, tokenizer and weights of a folder, by our three steps."""
    model = models.resolve(str(folder))
    tokenizer = models.load_tokenizer(model)
    return model, tokenizer, models.load(model, tokenizer, dtype=dtype, attn="sdpa", zero3=False)


def logits(model, tokenizer) -> torch.Tensor:
    """For one sentence, (tokens, vocabulary)."""
    ids = tokenizer("The sky is blue.", return_tensors="pt").input_ids
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits[0]


def test_tiny_llama_has_the_same_bits_everywhere():
    tensors = load_file(embedded.folder("tiny-llama") / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].numpy().tobytes())
    assert digest.hexdigest() == "7c26b85045c273e1c8c01be0b1fa4b26aa0e6363243a5467d9e271cc0152f808"


def test_tiny_llama_reads_and_writes_any_ascii_with_2048_tokens():
    tokenizer = models.load_tokenizer(models.resolve("tiny-llama"))
    assert len(tokenizer) == 2048 and tokenizer.pad_token_id != tokenizer.eos_token_id
    text = "".join(map(chr, range(32, 127))) + "\n\tdef f(x):\n    return naïve"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer(models.__doc__).input_ids) < 0.5 * len(models.__doc__)
    chat = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert chat.endswith("<|im_start|>assistant\nBlue.<|im_end|>\n")


@pytest.mark.timeout(600)
def test_smollm2_answers_and_is_the_same_model_after_saving(tmp_path):
    model, tokenizer, loaded = opened("smollm2-135m")
    assert models.parameters(model.config) == sum(p.numel() for p in loaded.parameters()) == 134_515_008
    question = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    assert "Paris" in models.answers(loaded, tokenizer, [question], max_new_tokens=12)[0]
    loaded.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert models.check_saved(tmp_path, loaded.config) == 272
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(loaded, tokenizer), logits(again, AutoTokenizer.from_pretrained(tmp_path)))


def test_a_gguf_file_is_unpacked_once_into_the_same_model(tmp_path):
    tiny = embedded.folder("tiny-llama")
    file = model_zoo.write_gguf(tiny, tmp_path / "tiny.gguf")
    model, tokenizer, loaded = opened(file)
    assert model.kind == "gguf" and torch.equal(
        logits(loaded, tokenizer),
        logits(AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)),
    )
    made = Path(model.path).stat().st_mtime_ns
    assert models.resolve(str(file)).path == model.path and Path(model.path).stat().st_mtime_ns == made
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(InputError, match=r"tiny\.gguf is a broken GGUF file, or one cut short"):
        models.resolve(str(file))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_kind_ends_as_the_same_model_in_plain_transformers(tmp_path, kind, tied):
    source = model_zoo.write(tmp_path / "source", TOKENIZERS[kind](), tied=tied)
    before = logits(AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source))
    _, tokenizer, loaded = opened(source)
    now = logits(loaded, tokenizer)
    assert torch.allclose(now[:, : before.shape[1]], before, atol=1e-6)
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id) and tokenizer.padding_side == "right"

    loaded.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    models.check_saved(tmp_path / "saved", loaded.config)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    words = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again, words), now)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    assert again.config.pad_token_id == again.generation_config.pad_token_id == words.pad_token_id
    assert again.config.use_cache and words.eos_token_id == again.generation_config.eos_token_id
    assert words.apply_chat_template(CHAT, tokenize=False) == tokenizer.apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize(
    ("kind", "pad"),
    {
        "llama2": "<unk>",
        "pad_is_eos": "<unk>",
        "llama3": "<|reserved_special_token_0|>",
        "gpt2": "<pad>",
    }.items(),
)
def test_pad_token_rule(tmp_path, kind, pad):
    model = models.resolve(str(model_zoo.write(tmp_path, TOKENIZERS[kind]())))
    assert models.load_tokenizer(model).pad_token == pad
    assert any(note.startswith(f"pad token: {pad}") for note in model.notes)


def test_a_new_pad_token_gets_the_mean_row_or_one_that_was_spare(tmp_path):
    exact = model_zoo.write(tmp_path / "exact", model_zoo.gpt2())
    model, tokenizer, loaded = opened(exact)
    table = loaded.get_output_embeddings().weight
    assert table.shape[0] == loaded.config.vocab_size == len(tokenizer) == 258
    assert torch.allclose(table[257], table[:257].mean(0)) and "from 257 to 258" in " ".join(model.notes)
    roomy = model_zoo.write(tmp_path / "roomy", model_zoo.gpt2(), rows=320)
    model, tokenizer, loaded = opened(roomy)
    assert tokenizer.pad_token_id == 257 and loaded.config.vocab_size == 320 and "resized" not in " ".join(model.notes)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_plain_template_marks_turns_so_that_a_prompt_is_a_prefix(tmp_path, kind):
    model = models.resolve(str(model_zoo.write(tmp_path, TOKENIZERS[kind]())))
    tokenizer = models.load_tokenizer(model)
    asked = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert whole["input_ids"][: len(asked)] == asked
    answer = [i for i, mask in zip(whole["input_ids"], whole["assistant_masks"], strict=True) if mask]
    assert answer == [*tokenizer("Blue.", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    assert whole["input_ids"].count(tokenizer.bos_token_id) == (1 if kind in ("llama2", "pad_is_eos") else 0) or (
        tokenizer.bos_token_id == tokenizer.eos_token_id
    )
    assert "chat template" in " ".join(model.notes) and end_of_turn(tokenizer) == [tokenizer.eos_token_id]


def test_llama2s_generation_config_is_repaired_so_that_saving_works(tmp_path):
    source = model_zoo.write(tmp_path / "source", model_zoo.llama2())
    file = source / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 0.9, "top_p": 0.6}))
    model, _, loaded = opened(source)
    loaded.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text())["do_sample"] is True
    assert "do_sample set to true" in " ".join(model.notes)


def adapter(base: Path, to: Path, **settings: object) -> Path:
    """An adapter with random weights of `base`."""
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).save_pretrained(to)
    return to


def test_an_adapter_is_merged_into_plain_safetensors(tmp_path):
    base = embedded.folder("tiny-llama")
    folder = adapter(base, tmp_path / "adapter")
    models.merge(folder, tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.allclose(merged, logits(plain, tokenizer), atol=1e-3)
    assert torch.allclose(merged, logits(PeftModel.from_pretrained(plain, folder), tokenizer), atol=1e-5)
    model, tokenizer, loaded = opened(folder)
    assert model.kind == "adapter" and torch.allclose(logits(loaded, tokenizer), merged, atol=1e-5)
    assert models.check_saved(folder, model.config) == 8


def test_an_adapters_base_is_found_by_its_embedded_name_on_another_machine(tmp_path):
    folder = adapter(embedded.folder("tiny-llama"), tmp_path)
    file = folder / "adapter_config.json"
    file.write_text(file.read_text().replace(str(embedded.folder("tiny-llama").parent), "/elsewhere/models"))
    assert models.resolve(str(folder)).base.kind == "embedded"
    file.write_text(file.read_text().replace("tiny-llama-", "other-"))
    with pytest.raises(InputError, match=r"its base cannot be used: MODEL=/elsewhere/models/other-.* does not exist"):
        models.resolve(str(folder))


def test_answers_are_greedy_bounded_and_leave_the_model_as_it_was():
    _, tokenizer, loaded = opened("tiny-llama")
    prompts = [{"messages": CHAT[:1]}, {"text": "Once upon"}, {"messages": CHAT[:1]}]
    alone = models.answers(loaded.eval(), tokenizer, prompts, max_new_tokens=8)
    loaded.train()
    loaded.model.layers[0].self_attn.attention_dropout = 0.9  # would change any answer in training mode
    loaded.gradient_checkpointing_enable()
    loaded.model.layers[1].eval()
    loaded.config.use_cache = False
    state = [module.training for module in loaded.modules()]
    random = torch.get_rng_state()
    first = models.answers(loaded, tokenizer, prompts, max_new_tokens=8)
    assert first == alone and first[0] == first[2] != first[1]
    assert state == [module.training for module in loaded.modules()] and loaded.config.use_cache is False
    assert torch.equal(random, torch.get_rng_state())
    warm = [models.answers(loaded, tokenizer, prompts, max_new_tokens=8, temperature=2.0, seed=s) for s in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]
    assert [models.prompt_text(prompt) for prompt in prompts[:2]] == ["Name a colour.", "Once upon"]
    with pytest.raises(InputError, match="the model's context ends at 2048"):
        models.answers(loaded, tokenizer, [{"text": "a b " * 3000}], max_new_tokens=8)


def test_an_answer_ends_at_the_end_of_turn():
    _, tokenizer, loaded = opened("tiny-llama")
    prompt = {"messages": CHAT[:1]}
    long = models.answers(loaded, tokenizer, [prompt], max_new_tokens=12)[0]
    with torch.no_grad():  # make the end token the likeliest everywhere
        loaded.lm_head.weight.zero_()
        loaded.model.norm.weight.zero_()
        loaded.lm_head.bias = torch.nn.Parameter(torch.nn.functional.one_hot(torch.tensor(2), 2048).float())
    steps = []
    loaded.register_forward_hook(lambda *_: steps.append(1))
    assert long and models.answers(loaded, tokenizer, [prompt], max_new_tokens=12) == [""] and len(steps) == 1


def test_flops_agree_with_torchs_own_counter():
    from torch.utils.flop_counter import FlopCounterMode

    model, _, loaded = opened("tiny-llama")
    with FlopCounterMode(display=False) as counter:
        loaded(input_ids=torch.zeros(1, 128, dtype=torch.long), use_cache=False)
    counted = 3 * counter.get_total_flops() / 128  # the backward pass is twice the forward one
    assert models.flops_per_token(model.config, 128) == pytest.approx(counted, rel=0.005)
