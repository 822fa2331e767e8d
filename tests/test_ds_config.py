"""Our ds_configs are right; a wrong one is named by file, key and right key before anything is launched."""

import copy
from pathlib import Path

import pytest

from slipway import ds_config
from slipway.ds_schema import leaves
from slipway.errors import InputError

FILES = sorted(ds_config.FOLDER.glob("*.json"))
BY_NAME = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
GOOD = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}

# The tutorial's own file, which people arrive with.
TUTORIAL = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "fp16": {"enabled": "auto", "loss_scale_window": 1000},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


def read(path: Path) -> dict:
    config = ds_config.load(path)
    if "nvme" in ds_config.facts_of(config).values():
        ds_config.set_nvme_path(config, "/nvme")
    return config


def every_key(section: dict, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = [every_key(value, (*path, key)) for key, value in section.items() if isinstance(value, dict)]
    return [(*path, key) for key in section] + [key for keys in below for key in keys]


def changed(config: dict, dotted: str, value: object) -> dict:
    config = copy.deepcopy(config)
    *sections, last = dotted.split(".")
    section = config
    for key in sections:
        section = section.setdefault(key, {})
    section[last] = value
    return config


def test_there_are_configs():
    assert len(FILES) >= 6
    assert all(7 <= len(path.read_text().splitlines()) <= 25 for path in FILES)


@BY_NAME
def test_ours_pass_and_hold_no_optimizer_and_no_scheduler(path):
    config = read(path)
    assert ds_config.find_problems(config, path) == []
    assert not {"optimizer", "scheduler"} & config.keys()
    assert config["bf16"] == config["fp16"] == {"enabled": "auto"}
    assert config["zero_optimization"]["overlap_comm"] is False  # DeepSpeed#7188; at stage 3 it is on by default


@BY_NAME
def test_the_name_tells_every_difference(path):
    stage, _, offload = path.stem.removeprefix("zero").partition("_")
    facts = ds_config.facts_of(read(path))
    device = {"": "none", "offload": "cpu", "nvme": "nvme"}[offload]
    assert facts == {
        "zero_stage": int(stage),
        "offload_optimizer": device,
        "offload_param": device if stage == "3" else "none",
    }
    plain, mine = read(ds_config.FOLDER / f"zero{stage}.json"), read(path)
    for section in ds_config.OFFLOADS:
        mine["zero_optimization"].pop(section, None)
    assert mine == plain


def test_all_stage_3_saves_are_gathered():
    third = [config for config in map(read, FILES) if config["zero_optimization"]["stage"] == 3]
    assert third and all(c["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True for c in third)


KEYS = [(path, key) for path in FILES for key in every_key(ds_config.load(path))]
KEYS += [(None, key) for key in every_key(TUTORIAL)]


@pytest.mark.parametrize(("path", "key"), KEYS, ids=lambda part: ".".join(part) if isinstance(part, tuple) else None)
def test_a_misspelling_at_any_depth_is_refused_with_the_right_key(path, key):
    config = copy.deepcopy(TUTORIAL) if path is None else read(path)
    section = config
    for name in key[:-1]:
        section = section[name]
    middle = len(key[-1]) // 2
    wrong = key[-1][:middle] + key[-1][middle + 1 :]
    section[wrong] = section.pop(key[-1])
    with pytest.raises(InputError) as caught:
        ds_config.check(config, "my.json")
    assert f"my.json: key {'.'.join((*key[:-1], wrong))} is unknown to DeepSpeed" in caught.value.message
    assert f'did you mean "{key[-1]}"?' in caught.value.message


@pytest.mark.parametrize("key", [key for key, value in leaves(TUTORIAL) if type(value) in (float, int)])
def test_a_number_written_as_a_string_is_refused(key):
    wrong = changed(TUTORIAL, key, "2e8")
    (problem,) = ds_config.find_problems(wrong, "my.json")
    assert problem.startswith(f"my.json: key {key}: expected ") and problem.endswith('found string "2e8"')


def test_the_tutorials_file_passes():
    assert ds_config.find_problems(TUTORIAL, "tutorial.json") == []


PROBLEMS = {
    "bucket as string": (
        {"zero_optimization.reduce_bucket_size": "2e8"},
        'key zero_optimization.reduce_bucket_size: expected integer > 0 or "auto", found string "2e8"',
    ),
    "auto where no one fills": (
        {"zero_optimization.sub_group_size": "auto"},
        '.sub_group_size: "auto", but Hugging Face fills in nothing here; write a value or drop it'
        " (DeepSpeed's default is 1000000000)",
    ),
    "auto by the other name": ({"zero_optimization.prefetch_bucket_size": "auto"}, "fills in nothing here"),
    "auto that accelerate turns into stage 2": ({"zero_optimization.stage": "auto"}, "fills in nothing here"),
    "stage": (
        {"zero_optimization.stage": 5},
        "zero_optimization.stage: expected one of 0, 1, 2, 3, found integer 5",
    ),
    "stage as boolean": ({"zero_optimization.stage": True}, "expected one of 0, 1, 2, 3, found boolean true"),
    "half a bucket": ({"zero_optimization.reduce_bucket_size": 0.5}, "found number 0.5"),
    "device": (
        {"zero_optimization.offload_optimizer.device": "gpu"},
        '.offload_optimizer.device: expected one of "none", "cpu", "nvme", found string "gpu"',
    ),
    "batch": ({"train_batch_size": 0}, 'train_batch_size: expected integer >= 1 or "auto", found integer 0'),
    "clipping": ({"gradient_clipping": -1}, "gradient_clipping: expected number >= 0"),
    "flag": (
        {"zero_optimization.overlap_comm": "true"},
        'expected true or false or null, found string "true"',
    ),
    "name": ({"tensorboard.job_name": 5}, "tensorboard.job_name: expected string, found integer 5"),
    "section": ({"zero_optimization": True}, "key zero_optimization: expected object, found boolean true"),
    "deprecated": (
        {"zero_optimization.cpu_offload": True},
        'zero_optimization.cpu_offload is deprecated; write "offload_optimizer": {"device": "cpu"} instead',
    ),
    "removed": ({"amp": {"enabled": True}}, "key amp: NVIDIA Apex AMP integration has been removed"),
    "wrong place": ({"stage": 2}, "key stage is unknown to DeepSpeed, it belongs at zero_optimization.stage"),
    "British": ({"zero_optimisation": {"stage": 3}}, 'did you mean "zero_optimization"?'),
    "one m": ({"gradient_cliping": 1.0}, 'did you mean "gradient_clipping"?'),
    "both precisions": (
        {"fp16.enabled": True, "bf16.enabled": True},
        "fp16.enabled and bf16.enabled are both true",
    ),
    "offload_param below 3": (
        {"zero_optimization.offload_param.device": "cpu"},
        "zero_optimization.offload_param to cpu needs stage 3, stage is 2",
    ),
    "offload_optimizer at 0": (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer to cpu needs stage 1, stage is 0",
    ),
    "nvme below 3": (
        {"zero_optimization.offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
        "zero_optimization.offload_optimizer to nvme needs stage 3, stage is 2",
    ),
    "nvme nowhere": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        'zero_optimization.offload_param: device "nvme" needs an nvme_path',
    ),
    "ratio below 3": (
        {"zero_optimization.offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        "offload_optimizer.ratio below 1 needs stage 3",
    ),
    "Lamb offloaded": (
        {"zero_optimization.offload_optimizer.device": "cpu", "optimizer": {"type": "Lamb", "params": {}}},
        'optimizer.type: "Lamb" has no CPU version in DeepSpeed, which offload_optimizer needs',
    ),
    "no optimizer": (
        {"optimizer": {"type": "AdmaW", "params": {}}},
        'neither DeepSpeed nor torch has "AdmaW"',
    ),
    "no scheduler": ({"scheduler": {"type": "WarmUpLR"}}, 'has "WarmUpLR", did you mean "WarmupLR"?'),
    "no type": ({"optimizer": {"params": {}}}, "key optimizer.type is missing"),
    "param of an optimizer": (
        {"optimizer": {"type": "Adam", "params": {"beta": [0.9, 0.99]}}},
        'mean "betas"?',
    ),
    "rate as string": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "1e-5"}}},
        'string "1e-5"',
    ),
    "no warm-up": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "integer >= 1"),
    "stage forgotten": ({"zero_optimization": {}}, "zero_optimization.stage is missing"),
}


@pytest.mark.parametrize(("patch", "expected"), PROBLEMS.values(), ids=PROBLEMS)
def test_lint(patch, expected):
    config = GOOD
    for key, value in patch.items():
        config = changed(config, key, value)
    problems = ds_config.find_problems(config, "my.json")
    assert len(problems) == 1 and problems[0].startswith("my.json: ") and expected in problems[0]


def test_a_config_without_its_main_sections():
    assert "section zero_optimization is missing" in ds_config.find_problems({"train_batch_size": 8})[0]
    assert "neither train_batch_size nor train_micro" in ds_config.find_problems({"zero_optimization": {"stage": 1}})[0]


def test_a_torch_optimizer_may_be_offloaded_where_the_user_says_so():
    config = changed(GOOD, "zero_optimization.offload_optimizer.device", "cpu")
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    assert len(ds_config.find_problems(config)) == 1
    assert ds_config.find_problems({**config, "zero_force_ds_cpu_optimizer": False}) == []


BAD_FILES = {
    "comma": (b'{\n  "a": 1,\n}', ["my.json:3:1: no valid JSON"]),
    "comment": (b'{\n  // stage\n  "a": 1}', ["my.json:2:3: no valid JSON", "no comments"]),
    "twice": (b'{"a": {\n"stage": 1,\n"stage": 2}}', ['my.json: key "stage" stands twice', "lines 2, 3"]),
    "list": (b"[1]", ["my.json holds a list, expected an object"]),
    "empty": (b" \n", ["my.json is empty"]),
    "latin": (b'{\n"a": "\xe9"}', ["my.json:2: byte 0xe9 is not UTF-8"]),
}


@pytest.mark.parametrize(("content", "expected"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_is_no_config(tmp_path, content, expected):
    (tmp_path / "my.json").write_bytes(content)
    with pytest.raises(InputError) as caught:
        ds_config.load(tmp_path / "my.json")
    assert all(text in str(caught.value) for text in expected)


def test_a_missing_file_lists_what_there_is(tmp_path):
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(InputError, match=r"zero4.json does not exist\n.*zero3_offload.*mine.json"):
        ds_config.load(tmp_path / "zero4.json")
    with pytest.raises(InputError, match="is a folder"):
        ds_config.load(tmp_path)


@pytest.mark.parametrize("name", ["zero3", "zero3.json", "ds_configs/zero3.json"])
def test_ours_are_found_by_name_from_any_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert ds_config.find(name) == ds_config.FOLDER / "zero3.json"


def test_nvme_path_is_written_where_it_is_needed_only():
    config = ds_config.load("zero3_nvme")
    assert len(ds_config.find_problems(config)) == 2
    ds_config.set_nvme_path(config, "/mnt/nvme")
    assert {config["zero_optimization"][key]["nvme_path"] for key in ds_config.OFFLOADS} == {"/mnt/nvme"}
    with pytest.raises(InputError, match="offloads nothing to NVMe"):
        ds_config.set_nvme_path(ds_config.load("zero3_offload"), "/mnt/nvme")
