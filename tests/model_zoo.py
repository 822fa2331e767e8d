"""Small models of the kinds that people bring, written to folders by transformers itself."""

import json
from pathlib import Path

import torch
from gguf import GGUFWriter, TokenType
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer(special: list[str], *, begins: bool = False, **named: str) -> PreTrainedTokenizerFast:
    """Byte-level: the `special` tokens, then 256 bytes. `begins`: bos before each text, as LLaMA-2 has it."""
    vocabulary = {token: number for number, token in enumerate([*special, *BYTES])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if begins:
        bos = named["bos_token"]
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, **named)


def llama2() -> PreTrainedTokenizerFast:
    """LLaMA-2's manners: <unk> is free, no pad token, no chat template, bos before texts."""
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return tokenizer(list(names.values()), begins=True, **names)


def llama3() -> PreTrainedTokenizerFast:
    """LLaMA-3's: no unk, spare special tokens in the vocabulary."""
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    return tokenizer([*names.values(), "<|reserved_special_token_0|>"], **names)


def gpt2() -> PreTrainedTokenizerFast:
    """GPT-2's: one special token for everything, so that a pad token has to be added."""
    return tokenizer(["<|endoftext|>"], unk_token="<|endoftext|>", bos_token="<|endoftext|>", eos_token="<|endoftext|>")


def pad_is_eos() -> PreTrainedTokenizerFast:
    """What a tutorial leaves behind after `tokenizer.pad_token = tokenizer.eos_token`."""
    made = llama2()
    made.pad_token = made.eos_token
    return made


def write(
    folder: Path,
    words: PreTrainedTokenizerFast,
    *,
    tied: bool = False,
    rows: int | None = None,
    **settings: object,
) -> Path:
    """A two-layer LLaMA with random weights, and its tokenizer. `rows`: of the vocabulary, if not as many."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=rows or len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id)
    model.save_pretrained(folder, **settings)
    words.save_pretrained(folder)
    return folder


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
}


def write_gguf(folder: Path, to: Path) -> Path:
    """A folder's LLaMA as one GGUF file in fp32, as llama.cpp's converter writes it."""
    config = json.loads((folder / "config.json").read_text())
    words = json.loads((folder / "tokenizer.json").read_text())
    writer = GGUFWriter(to, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    tokens = sorted(words["model"]["vocab"], key=words["model"]["vocab"].get)
    special = {token["content"] for token in words["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in words["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, tensor in load_file(folder / "model.safetensors").items():
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        for short, count in heads.items():
            if f".{short}_proj." in name:  # llama.cpp interleaves the halves that rotary embedding turns
                tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to
