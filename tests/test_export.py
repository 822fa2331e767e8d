"""A checkpoint of every recipe, and one of another tool, as plain safetensors: the trainer's weights, bit for bit."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import another_tool
import pytest
import torch
from exports import assert_same, exported, foreign, make, read
from harness import NOT_HERE, RECIPES, ROOT, forks, record
from safetensors.torch import load_file, save_file
from small_bert import write_model, write_texts
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from slipway import export, models
from slipway.errors import InputError

pytestmark = pytest.mark.timeout(600)  # a recipe is trained where test_recipes.py has not done so
HERE = [recipe for recipe in RECIPES if recipe not in NOT_HERE]
ADAPTERS = [recipe for recipe in HERE if recipe.startswith("lora")]
WHOLE = [recipe for recipe in HERE if recipe not in ADAPTERS]
DIVIDED = [recipe for recipe in WHOLE if recipe != "ddp"]
OTHERS = [case for case in another_tool.CASES if not case.startswith("large")]


def logits(folder, ids=tuple(range(3, 40))):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits


@pytest.mark.parametrize("recipe", WHOLE)
def test_each_recipes_checkpoint_becomes_the_trainers_model(recipe, trained, tmp_path, capsys):
    folder, _ = trained(recipe)
    got = make(folder, tmp_path / "out", "--shard_size", "500KB")
    assert_same(got, load_file(folder / "model.safetensors"))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(got) and len(set(index["weight_map"].values())) == 3
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((folder / name).read_text())
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    ids = record(folder)["proof"]["input_ids"]
    assert torch.equal(logits(tmp_path / "out", ids), logits(folder, ids))
    assert "its newest complete checkpoint is checkpoint-20" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", DIVIDED)
def test_the_ranks_parts_alone_are_the_trainers_model(recipe, trained, tmp_path):
    folder, _ = trained(recipe)
    checkpoint = foreign(folder, tmp_path)
    for asked in (checkpoint, checkpoint / "global_step20"):
        assert_same(make(asked, tmp_path / asked.name / "out"), load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("recipe", ADAPTERS)
def test_an_adapter_stays_one_or_is_merged_as_peft_merges_it(recipe, trained, tmp_path):
    folder, _ = trained(recipe)
    assert_same(make(folder, tmp_path / "adapter"), load_file(folder / "adapter_model.safetensors"))
    assert torch.equal(logits(tmp_path / "adapter"), logits(folder))  # transformers loads the base by itself
    models.merge(folder, tmp_path / "by_peft")
    got = make(folder / "checkpoint-20", tmp_path / "merged", "--merge", "--shard_size", "500KB")
    assert_same(got, load_file(tmp_path / "by_peft/model.safetensors"))
    assert torch.equal(logits(tmp_path / "merged"), logits(tmp_path / "by_peft"))
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "merged" / name).read_text() == (tmp_path / "by_peft" / name).read_text(), name


def test_a_classifier_is_exported_as_it_was_saved(tmp_path, capsys):
    argv = ["--model", write_model(tmp_path / "model"), "--data", write_texts(tmp_path / "texts.csv", 40)]
    argv += ["--max_steps", 5, "--save_steps", 2, "--report_to", "none", "--output_dir", tmp_path / "run"]
    [(codes, said)] = forks(tmp_path, [{"argv": argv}])
    assert codes == [0], said[-3000:]
    ended, saved = tmp_path / "run", tmp_path / "run/checkpoint-4"
    assert_same(make(ended, tmp_path / "end"), load_file(ended / "model.safetensors"))
    assert "the model that the run saved at its end, step 5" in capsys.readouterr().err
    assert_same(make(saved, tmp_path / "at 4"), load_file(saved / "model.safetensors"))
    assert not torch.equal(*(read(tmp_path / name)["classifier.weight"] for name in ("end", "at 4")))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "at 4")
    assert loaded.config.id2label == {0: "land", 1: "sea"}


def test_an_adapters_fp32_copy_has_the_names_of_the_adapter(trained, tmp_path):
    """Its file in half precision stands for a run in half precision, which no CPU makes."""
    folder, _ = trained("lora")
    checkpoint = foreign(folder, tmp_path)
    want = load_file(folder / "adapter_model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in want.items()}, checkpoint / "adapter_model.safetensors")
    assert_same(make(checkpoint, tmp_path / "out", "--dtype", "fp32"), want)


def test_an_adapter_with_more_than_matrices_is_merged_in_memory(tmp_path, capsys):
    from peft import LoraConfig, get_peft_model

    base = models.resolve("tiny-llama").path
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(base) / name, tmp_path / "adapter" / name)
    models.merge(tmp_path / "adapter", tmp_path / "by_peft")
    got = make(tmp_path / "adapter", tmp_path / "out", "--merge")
    assert_same(got, load_file(tmp_path / "by_peft/model.safetensors"))
    assert "is merged in memory" in capsys.readouterr().err


@pytest.mark.parametrize("case", OTHERS)
def test_another_tools_checkpoint_is_the_model_that_its_engine_held(case, other, tmp_path):
    want = load_file(other / f"{case}.safetensors")
    got = make(other / case, tmp_path / "fp32", "--config_from", other / "config", "--dtype", "fp32")
    assert_same(got, {name: tensor.float() for name, tensor in want.items()})
    auto = make(other / case, tmp_path / "auto", "--config_from", other / "config")
    dtype = torch.bfloat16 if "bf16" in case else torch.float32
    trained = {name: tensor.to(dtype) for name, tensor in want.items() if name != "model.norm.scale"}
    assert_same({name: auto[name] for name in trained}, trained)
    assert json.loads((tmp_path / "auto/config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, want["model.embed_tokens.weight"].float())


def test_deepspeeds_own_converter_agrees(other, tmp_path):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as convert

    want = convert(str(other / "zero3_groups"))
    del want["lm_head.weight"]  # tied
    assert_same(make(other / "zero3_groups", tmp_path / "out", "--config_from", other / "config"), want)


@pytest.mark.parametrize("case", ["zero0", "zero2_bf16", "zero3_bf16"])
def test_weights_that_the_config_does_not_tie_are_both_written(case, other, tmp_path):
    got = make(other / case, tmp_path / "out", "--config_from", other / "untied")
    assert torch.equal(got["lm_head.weight"], got["model.embed_tokens.weight"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_dtypes_are_rounded_once_and_what_fp16_cannot_hold_is_refused(other, tmp_path):
    want = load_file(other / "zero3_bf16.safetensors")
    got = make(other / "zero3_bf16", tmp_path / "fp16", "--config_from", other / "config", "--dtype", "fp16")
    assert_same(got, {name: tensor.half() for name, tensor in want.items()})
    model = another_tool.build(large=False)
    model.lm_head.weight.data[0, 0] = 1e6
    model.save_pretrained(tmp_path / "big")
    make(tmp_path / "big", tmp_path / "bf16", "--dtype", "bf16")
    with pytest.raises(InputError, match="holds 1e\\+06, and fp16 ends at 65504"):
        make(tmp_path / "big", tmp_path / "out", "--dtype", "fp16")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def peak(other, tmp_path_factory):
    """peak(case, *flags) -> (bytes of memory above those of an export of next to nothing, the exported folder)."""

    def measured(case, *flags):
        folder = tmp_path_factory.mktemp("peak") / "out"
        done = exported(other, case, folder, *flags)
        assert done.returncode == 0, done.stderr
        return float(re.search(r"peak memory ([\d.]+) GiB", done.stdout)[1]) * 2**30, folder

    idle, _ = measured("zero1")

    def above(case, *flags):
        held, folder = measured(case, *flags)
        return held - idle, folder

    return above


@pytest.mark.parametrize("case", ["large_zero2", "large_zero3"])
def test_peak_memory_is_a_shard_and_the_pages_it_was_read_from(case, other, peak):
    whole = (other / f"{case}.safetensors").stat().st_size
    held, folder = peak(case, "--shard_size", "20MB")
    assert held < 3 * 20e6 < 0.4 * whole
    assert_same(read(folder), load_file(other / f"{case}.safetensors"))


def test_the_measure_of_memory_sees_a_model_that_is_held_whole(other, peak):
    assert peak("large_zero3")[0] > 1.8 * (other / "large_zero3.safetensors").stat().st_size


def test_a_kill_in_the_middle_leaves_nothing_that_looks_complete(other, tmp_path):
    words = ["--checkpoint", other / "large_zero3", "--output", tmp_path / "out", "--config_from"]
    words += [other / "large_config", "--shard_size", "1MB"]
    process = subprocess.Popen([sys.executable, ROOT / "scripts/export.py", *words])
    while not list(tmp_path.glob("out.part-*/*.safetensors")):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    (part,) = tmp_path.glob("out.part-*")
    assert not (part / "config.json").exists()
    done = exported(other, "large_zero3", tmp_path / "out")
    assert done.returncode == 0, done.stderr


def test_an_interrupt_leaves_nothing(other, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(other / "zero1", tmp_path / "out", "--config_from", other / "config")
    assert not list(tmp_path.iterdir())
