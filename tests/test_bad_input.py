"""Bad input ends the real command with one message, what to do, exit code 2, and an untouched OUTPUT."""

import concurrent.futures
import json
import sys
from pathlib import Path

import pytest
from harness import FINETUNE, ROOT, assert_kept, assert_refused, launch, run, selected, write_files
from harness import start as start_command
from hub_server import serving

GOOD = {"prompt": "What is one and one?", "completion": "Two."}
ZERO2 = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
DDP, NVME = (str(FINETUNE.parent / f"{name}.yaml") for name in ("ddp", "zero3_nvme"))
BATCHES = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# name: (files to write, flags, words of the message). {d} is the folder of the files.
CASES = {
    "unknown YAML key": (
        {"my.yaml": "packing: true\nlearning_rat: 1.0e-5\n"},
        ["--config", "{d}/my.yaml"],
        ["my.yaml:2", "learning_rat", 'did you mean "learning_rate"'],
    ),
    "a number that is none": ({}, ["--learning_rate", "nan"], ["command line --learning_rate", "nan"]),
    "a batch of nothing": ({}, ["--per_device_train_batch_size", "0"], ["per_device_train_batch_size is 0"]),
    "steps that train nothing": ({}, ["--max_steps", "0"], ["max_steps is 0", "num_train_epochs"]),
    "a rate of nothing in a YAML": (
        {"my.yaml": "save_strategy: 'no'\nlearning_rate: 0\n"},
        ["--config", "{d}/my.yaml"],
        ["my.yaml:2", "learning_rate is 0"],
    ),
    "a seed beyond 32 bits": ({}, ["--seed", "4294967296"], ["seed is 4294967296", "0 to 4294967295"]),
    "longer than the model's positions": ({}, ["--max_length", "2049"], ["max_length 2049", "2048 positions"]),
    "merge without an adapter": ({}, ["--merge", "true"], ["merge True", "RECIPE=lora"]),
    "a tracker that is not there": ({}, ["--report_to", "nonsense"], ["report_to", "nonsense", "tensorboard"]),
    "nothing in a YAML where a number belongs": (
        {"my.yaml": "packing: true\nlearning_rate:\n"},
        ["--config", "{d}/my.yaml"],
        ["my.yaml:2", "learning_rate", "found nothing"],
    ),
    "no max_length": ({"my.yaml": "max_length:\n"}, ["--config", "{d}/my.yaml"], ["my.yaml:1", "max_length is empty"]),
    "a list in a YAML where a number belongs": (
        {"my.yaml": "learning_rate: [1, 2]\n"},
        ["--config", "{d}/my.yaml"],
        ["my.yaml:1", "learning_rate", "found a list"],
    ),
    "an empty value": ({}, ["--dataset_name", ""], ["--dataset_name is given an empty value"]),
    "a ds_config of brackets": (
        {"ds.json": '{"a":' * 100_000},
        ["--deepspeed", "{d}/ds.json"],
        ["ds.json is nested too deep"],
    ),
    "columns that are no JSON": ({}, ["--columns", "{prompt: question}"], ["--columns", "{prompt: question}"]),
    "a job manager's several ranks": ({}, [], ["WORLD_SIZE=2 is set"]),
    "a job manager's rank": ({}, ["--seed", "-1"], ["seed is -1"]),
    "a link to nowhere": (
        {"a.jsonl": Path("nowhere.jsonl")},
        ["--dataset_name", "{d}/a.jsonl"],
        ["a.jsonl is a link to nowhere.jsonl"],
    ),
    "no such YAML": ({}, ["--config", "{d}/none.yaml"], ["no recipe file", "none.yaml"]),
    "unknown flag": ({}, ["--max_lenght", "5"], ["--max_lenght", 'did you mean "--max_length"']),
    "flag without effect": ({}, ["--packing_strategy", "wrapped"], ["packing_strategy has no effect here"]),
    "unknown ds_config key": (
        {"ds.json": json.dumps({"zero_optimisation": {"stage": 2}})},
        ["--deepspeed", "{d}/ds.json"],
        ["ds.json", "zero_optimisation", 'did you mean "zero_optimization"'],
    ),
    "unknown nested ds_config key": (
        {"ds.json": json.dumps({"zero_optimization": {"stage": 2, "overlap_com": True}})},
        ["--deepspeed", "{d}/ds.json"],
        ["zero_optimization.overlap_com", 'did you mean "overlap_comm"'],
    ),
    "ds_config is no JSON": (
        {"ds.json": '{\n "zero_optimization": {"stage": 2,}\n}'},
        ["--deepspeed", "{d}/ds.json"],
        ["ds.json:2"],
    ),
    "ds_config is missing": ({}, ["--deepspeed", "{d}/none.json"], ["none.json", "does not exist"]),
    "batch size against its factors": (
        {"ds.json": json.dumps(ZERO2 | {"train_batch_size": 7, "train_micro_batch_size_per_gpu": "auto"})},
        ["--deepspeed", "{d}/ds.json", "--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "1"],
        ["train_batch_size is 7", "4"],
    ),
    "accumulation in two places": (
        {"ds.json": json.dumps(ZERO2 | BATCHES | {"gradient_accumulation_steps": 3})},
        ["--deepspeed", "{d}/ds.json", "--gradient_accumulation_steps", "2"],
        ["gradient_accumulation_steps", "3", "2", "command line"],
    ),
    "optimizer that cannot be offloaded": (
        {},
        ["--deepspeed", "zero2_offload", "--optim", "adafactor"],
        ["adafactor", "offload"],
    ),
    "scheduler in two places": (
        {"ds.json": json.dumps(ZERO2 | BATCHES | {"scheduler": {"type": "WarmupLR", "params": {}}})},
        ["--deepspeed", "{d}/ds.json", "--lr_scheduler_type", "cosine"],
        ["WarmupLR", "lr_scheduler_type"],
    ),
    "data file is missing": ({"data1.jsonl": lines(GOOD)}, ["--dataset_name", "{d}/data.jsonl"], ["data.jsonl"]),
    "data file is empty": ({"a.jsonl": ""}, ["--dataset_name", "{d}/a.jsonl"], ["a.jsonl", "empty"]),
    "bad JSON in line 2": (
        {"a.jsonl": lines(GOOD) + '{"prompt": "x", "completion"\n'},
        ["--dataset_name", "{d}/a.jsonl"],
        ["a.jsonl:2"],
    ),
    "not UTF-8": ({"a.jsonl": b'{"text": "caf\xe9"}\n'}, ["--dataset_name", "{d}/a.jsonl"], ["a.jsonl", "UTF-8"]),
    "wrong type in a column": (
        {"a.jsonl": lines(GOOD, {"prompt": "x", "completion": 7})},
        ["--dataset_name", "{d}/a.jsonl"],
        ["a.jsonl:2", "completion"],
    ),
    "mixed shapes": (
        {"a.jsonl": lines(GOOD), "b.jsonl": lines({"text": "words"})},
        ["--dataset_name", "{d}"],
        ["b.jsonl", "text"],
    ),
    "columns that fit no shape": (
        {"a.csv": "question,answer\n1+1?,2\n"},
        ["--dataset_name", "{d}/a.csv"],
        ["question", "answer", "messages"],
    ),
    "no usable row": (
        {"a.jsonl": lines({"text": ""}, {"text": "  "})},
        ["--dataset_name", "{d}/a.jsonl"],
        ["a.jsonl: no usable row: 2 rows read"],
    ),
    "prompts without answers": (
        {"a.jsonl": lines(*[{"prompt": f"question {i}", "completion": ""} for i in range(5)])},
        ["--dataset_name", "{d}/a.jsonl"],
        ["5 rows read", "answer"],
    ),
    "all rows too long": (
        {"a.jsonl": lines(*[{"prompt": "why " * 50 + str(i), "completion": "so"} for i in range(6)])},
        ["--dataset_name", "{d}/a.jsonl", "--max_length", "16"],
        ["all 6 rows", "max_length 16", "shortest needs"],
    ),
    "token ids outside the vocabulary": (
        {"a.jsonl": lines({"input_ids": [1, 2, 99999]})},
        ["--dataset_name", "{d}/a.jsonl"],
        ["99999"],
    ),
    "fewer rows than a batch": (
        {"a.jsonl": lines(*[GOOD | {"prompt": f"What is {i}?"} for i in range(5)])},
        ["--dataset_name", "{d}/a.jsonl", "--packing", "false", "--held_out_rows", "0"],
        ["5 rows", "one global batch needs 16"],
    ),
    "gzip that is none": ({"a.jsonl.gz": "plain text"}, ["--dataset_name", "{d}/a.jsonl.gz"], ["a.jsonl.gz"]),
    "model is no model": ({"m/notes.txt": "x"}, ["--model_name_or_path", "{d}/m"], ["config.json"]),
    "model has no weights": (
        {"m/config.json": (ROOT / "slipway/tiny_llama.json").read_text()},
        ["--model_name_or_path", "{d}/m"],
        ["weights"],
    ),
    "model is gated": ({}, ["--model_name_or_path", "org/gated"], ["org/gated is gated", "hf auth login"]),
    "model path is missing": ({}, ["--model_name_or_path", "{d}/none/model"], ["none/model"]),
    "hub is unreachable": (
        {},
        ["--model_name_or_path", "someone/some-model"],
        ["someone/some-model", "127.0.0.1:9"],
    ),
    "OUTPUT holds something else": (
        {"out/thesis.tex": "years of work"},
        ["--output_dir", "{d}/out"],
        ["not empty", "another folder"],
    ),
    "OUTPUT is a file": ({"out": "x"}, ["--output_dir", "{d}/out"], ["/out is a file"]),
    "OUTPUT is below a file": ({"out": "x"}, ["--output_dir", "{d}/out/run"], ["/out is a file"]),
    "NVMe folder is not named": ({}, ["--config", NVME], ["needs an nvme_path", "--nvme_path FOLDER"]),
    "NVMe folder is missing": (
        {},
        ["--config", NVME, "--nvme_path", "{d}/none"],
        ["nvme_path", "none does not exist"],
    ),
    "DeepSpeed without a ds_config": ({}, ["--config", DDP], ["names no ds_config", "--deepspeed FILE"]),
    "fp16 on a CPU": ({}, ["--fp16", "true"], ["fp16", "GPU"]),
    "bf16 and fp16": ({}, ["--fp16", "true", "--bf16", "true"], ["bf16", "fp16", "both"]),
    "4-bit weights without a GPU": ({}, ["--load_in_4bit", "true"], ["load_in_4bit needs a GPU"]),
    "flash attention without a GPU": ({}, ["--attn", "flash_attention_2"], ["flash_attention_2", "GPU"]),
    "unknown attention": ({}, ["--attn", "sdpaa"], ['did you mean "sdpa"']),
    "NPROC 0": ({}, ["NPROC"], ["NPROC=0"]),
}
WHERE = {
    "hub is unreachable": {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"},
    "model is gated": {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "{hub}"},
    "a job manager's several ranks": {"WORLD_SIZE": "2", "RANK": "1"},
    "a job manager's rank": {"RANK": "1"},
    "DeepSpeed without a ds_config": {"ACCELERATE_USE_DEEPSPEED": "true"},  # as accelerate launch says it
}


def start(name: str, folder: Path, hub: str):
    files, flags, _ = CASES[name]
    write_files(folder, files)
    words = [flag.replace("{d}", str(folder)) for flag in flags]
    nproc = ["--nproc", "0"] if words == ["NPROC"] else []
    words = [] if nproc else words
    usual = {
        "--config": FINETUNE.parent / "zero2.yaml",
        "--model_name_or_path": "tiny-llama",
        "--output_dir": folder / "output",
    }
    words += [str(word) for flag, value in usual.items() if flag not in words for word in (flag, value)]
    env = {key: value.replace("{hub}", hub) for key, value in WHERE.get(name, {}).items()}
    # What is said in the environment is read while python starts, which a fork does not.
    command = [ROOT / "scripts/launch.py", *nproc, FINETUNE, *words]
    return start_command(*command, forked=not env, timeout=120, **env)


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """The selected cases, started two at a time: most of a start is importing."""
    top = tmp_path_factory.mktemp("bad")
    assert launch("--max_rows", 0, "--output_dir", top / "warm").returncode == 2  # makes the caches
    with serving({}) as (hub, _), concurrent.futures.ThreadPoolExecutor(2) as pool:
        chosen = enumerate(selected(CASES, request))
        yield {name: (top / str(i), pool.submit(start, name, top / str(i), hub)) for i, name in chosen}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_message(name, results):
    folder, future = results[name]
    assert_refused(future.result(), CASES[name][2])
    assert not (folder / "output").exists()
    assert_kept(folder, CASES[name][0])


def test_make_lists_the_recipes_where_one_is_unknown():
    done = run("make", "finetune-llama", "RECIPE=zero4", timeout=20, SLIPWAY_PYTHON=sys.executable)
    assert done.returncode == 2
    assert "No recipe zero4. Recipes: ddp, lora" in done.stderr
