"""Folders that hold no whole model are refused with what was found there; so is a save without weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import model_zoo
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertModel

from slipway import embedded, models
from slipway.errors import InputError

WEIGHTS = "model.safetensors"
POINTER = "version https://git-lfs.example/spec/v1\noid sha256:0\nsize 99\n"


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A copy of tiny-llama that a test may break."""
    return Path(shutil.copytree(embedded.folder("tiny-llama"), tmp_path / "tiny"))


def shard(folder: Path) -> Path:
    """The model in folder, saved again in several files."""
    to = folder.with_name("sharded")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(to, max_shard_size="400KB")
    assert len(list(to.glob("model-*.safetensors"))) > 2
    return to


def configured(folder: Path, **settings: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def emptied(folder: Path, count: int) -> Path:
    """What saving under ZeRO-3 without gathering leaves: `count` tensors of no elements."""
    tensors = load_file(folder / WEIGHTS)
    tensors |= {name: torch.empty(0) for name in sorted(tensors)[:count]}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def dropped(folder: Path, *names: str) -> Path:
    """The model without some of its tensors."""
    tensors = {name: tensor for name, tensor in load_file(folder / WEIGHTS).items() if name not in names}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def changed(folder: Path, *, without: tuple[str, ...] = (), **files: str | bytes | None) -> Path:
    """The folder without files of these patterns and with `files` (name with __ for a dot) written."""
    for pattern in without:
        for file in list(folder.glob(pattern)):
            file.unlink()
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def cut(folder: Path) -> Path:
    file = folder / WEIGHTS
    return changed(folder, model__safetensors=file.read_bytes()[:-1000])


def lost_shard(folder: Path) -> Path:
    to = shard(folder)
    sorted(to.glob("model-*.safetensors"))[1].unlink()
    return to


def encoder(folder: Path) -> Path:
    to = folder.with_name("bert")
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=99, **size)).save_pretrained(to)
    return to


def with_checkpoints(folder: Path) -> Path:
    folder.rename(folder.with_name("moved"))
    (folder / "checkpoint-20").mkdir(parents=True)
    return folder


# name -> (what is done to a copy of tiny-llama, what is said was found, what is said to do)
BAD: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "no config": (
        lambda f: changed(f, without=("config.json",)),
        "no config.json; found: .*tokenizer",
        "holds config",
    ),
    "GGUF in it": (
        lambda f: changed(f, without=("config.json",), a__gguf=b"GGUF"),
        "no config.json",
        r"tiny/a\.gguf",
    ),
    "checkpoints": (with_checkpoints, "found: checkpoint-20/", "MODEL=.*/checkpoint-20"),
    "config is no JSON": (
        lambda f: changed(f, config__json="{"),
        "config.json cannot be used",
        "copy it again",
    ),
    "unknown type": (
        lambda f: configured(f, model_type="lama"),
        "config.json cannot be used: .*`lama`",
        "correct",
    ),
    "own code": (
        lambda f: configured(f, model_type="lama", auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}),
        "cannot be used",
        "--trust_remote_code",
    ),
    "no weights": (lambda f: changed(f, without=("*.safetensors",)), "holds no weights", "whole model"),
    "empty file": (lambda f: changed(f, model__safetensors=b""), "model.safetensors is empty", "again"),
    "git-lfs pointer": (
        lambda f: changed(f, model__safetensors=POINTER),
        "is a git-lfs pointer",
        "git lfs pull",
    ),
    "cut short": (cut, r"model.safetensors \(1,.* bytes\) is broken or cut short", "copy it again"),
    "a shard lost": (
        lost_shard,
        "1 of the . files that .*index.json names are missing: model-00002-of",
        "copy or",
    ),
    "an index of nothing": (
        lambda f: changed(f, without=("*.safetensors",), **{"model__safetensors__index__json": "{}"}),
        "no index of weights",
        "again",
    ),
    "empty tensors": (lambda f: emptied(f, 16), "16 of 21 tensors are empty: lm_head.weight", "ZeRO-3"),
    "other vocabulary": (
        lambda f: configured(f, vocab_size=2050),
        r"2 tensors do not have the shape .*\(2048, 64\) for \(2050, 64\)",
        "restore the config.json",
    ),
    "encoder": (encoder, "is an encoder .*bert, BertModel", "give one such as"),
    "encoder-decoder": (
        lambda f: configured(f, model_type="t5", is_encoder_decoder=True),
        "an encoder-decoder",
        "LLaMA",
    ),
    "classifier": (
        lambda f: configured(f, architectures=["LlamaForSequenceClassification"]),
        "without the head",
        "LLaMA",
    ),
    "a file that is no GGUF": (lambda f: f / WEIGHTS, "is no GGUF file", "the folder of a model"),
    "broken GGUF": (
        lambda f: changed(f, a__gguf=b"GGUF" + bytes(90)) / "a.gguf",
        "broken GGUF file",
        "again",
    ),
    "misspelled folder": (
        lambda f: f.with_name("tinny"),
        r"tinny does not exist",
        "did you mean .*/tiny[,?]",
    ),
    "misspelled parent": (lambda f: f.with_name("x") / "y", "has no x", "existing folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_model_is_refused_with_what_was_found(tiny, case):
    spoil, found, fix = BAD[case]
    with pytest.raises(InputError, match=f"(?s){found}.*fix: .*{fix}") as raised:
        models.resolve(str(spoil(tiny)))
    assert "MODEL=" in raised.value.message or str(tiny.parent) in raised.value.message


def test_sound_models_in_several_files_or_in_bin_are_taken(tiny):
    assert models.resolve(str(shard(tiny))).kind == "folder"
    torch.save(load_file(tiny / WEIGHTS), tiny / "pytorch_model.bin")
    (tiny / WEIGHTS).unlink()
    model = models.resolve(str(tiny))
    tokenizer = models.load_tokenizer(model)
    assert models.load(model, tokenizer, dtype=torch.float32, attn="sdpa", zero3=False).lm_head.weight.any()


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda f: changed(f, without=("*token*",)), "holds no tokenizer"),
        (lambda f: changed(f, tokenizer__json="{"), "its tokenizer cannot be loaded"),
        (lambda f: changed(f, tokenizer__json=POINTER), "is a git-lfs pointer"),
    ],
    ids=["none", "broken", "git-lfs pointer"],
)
def test_a_tokenizer_that_cannot_be_used_is_said(tiny, spoil, found):
    model = models.resolve(str(spoil(tiny)))
    with pytest.raises(InputError, match=found):
        models.load_tokenizer(model)


def test_token_ids_outside_the_vocabulary_and_a_missing_end_token_are_refused(tmp_path):
    model = models.resolve(str(model_zoo.write(tmp_path / "small", model_zoo.llama2(), rows=200)))
    with pytest.raises(InputError, match=r"token ids up to 258, the model's vocabulary ends at 199"):
        models.load_tokenizer(model)
    endless = model_zoo.tokenizer(["<unk>"], unk_token="<unk>")
    model = models.resolve(str(model_zoo.write(tmp_path / "endless", endless)))
    with pytest.raises(InputError, match="names no end token"):
        models.load_tokenizer(model)


def test_weights_that_would_start_at_random_are_refused(tiny):
    model = models.resolve(str(dropped(tiny, "lm_head.weight")))
    tokenizer = models.load_tokenizer(model)
    with pytest.raises(InputError, match=r"no weights for lm_head\.weight"):
        models.load(model, tokenizer, dtype=torch.float32, attn="sdpa", zero3=False)


def test_options_that_exclude_each_other_are_refused():
    model = models.resolve("tiny-llama")
    given = {"dtype": torch.float32, "attn": "sdpa", "zero3": True}
    for options, what in (({"device_map": "auto"}, "device_map"), ({"quantization": object()}, "QLoRA")):
        with pytest.raises(InputError, match=f"{what}.* and ZeRO-3 exclude each other"):
            models.load(model, None, **given, **options)
    with pytest.raises(InputError, match="zero_stage: asked 3, got another"):
        models.load(model, None, **given)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda f: emptied(f, 16), "16 of 21 tensors are empty"),
        (
            lambda f: dropped(f, "lm_head.weight", "model.norm.weight"),
            "2 of 21 tensors are missing: model.norm.weight, lm_head",
        ),
        (lambda f: changed(f, without=("*.safetensors",)), "holds no weights"),
        (cut, "broken or cut short"),
    ],
    ids=["empty", "missing", "nothing", "cut short"],
)
def test_a_save_that_lost_weights_is_found(tiny, spoil, found):
    config = models.resolve(str(tiny)).config
    assert models.check_saved(tiny, config) == 21
    with pytest.raises(models.SavedModelError, match=found):
        models.check_saved(spoil(tiny), config)


def test_a_save_of_another_shape_is_found_and_a_tied_head_may_be_absent(tiny, tmp_path):
    config = models.resolve(str(tiny)).config
    config.vocab_size = 2049
    with pytest.raises(models.SavedModelError, match=r"2 of 21 tensors have another shape: .*\(2048, 64\) for \(2049"):
        models.check_saved(tiny, config)
    tied = models.resolve(str(model_zoo.write(tmp_path / "tied", model_zoo.llama2(), tied=True)))
    assert models.check_saved(tied.path, tied.config) == 20


def test_an_adapters_empty_tensor_is_found(tiny):
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), lora).save_pretrained(tiny.with_name("adapter"))
    file = tiny.with_name("adapter") / "adapter_model.safetensors"
    save_file({name: torch.empty(0) for name in load_file(file)}, file)
    for ask in (models.resolve, lambda folder: models.check_saved(folder, None)):
        with pytest.raises(InputError, match="4 of 4 tensors are empty"):
            ask(str(file.parent))
