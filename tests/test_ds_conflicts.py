"""A ds_config against the run's arguments, held to what Hugging Face, accelerate and DeepSpeed really do."""

import copy
from types import SimpleNamespace

import pytest
from test_ds_config import BY_NAME, FILES, TUTORIAL, changed, read

from slipway import ds_config
from slipway.ds_resolve import asked
from slipway.ds_schema import HF_FILLS, at, leaves

RECIPE = "recipes/llama/zero3.yaml"
ARGUMENTS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "max_grad_norm": 1.0,
    "learning_rate": 2e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "warmup_steps": 10,
    "max_steps": 100,
    "lr_scheduler_type": "cosine",
    "optim": "adamw_torch_fused",
    "bf16": True,
    "fp16": False,
}


EVERY_AUTO = read(ds_config.find("zero3")) | {
    "optimizer": {"type": "Adam", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("total_num_steps", "warmup_num_steps", "warmup_max_lr"), "auto"),
    },
}


def run(typed: dict | None = None, **recipe: object) -> dict[str, tuple[object, str]]:
    """Arguments as they reach `conflicts`: a recipe's, and what was typed over them."""
    args = {name: (value, RECIPE) for name, value in {**ARGUMENTS, **recipe}.items()}
    return args | {name: (value, f"command line --{name}") for name, value in (typed or {}).items()}


@BY_NAME
def test_ours_contradict_nothing(path):
    assert ds_config.conflicts(read(path), path, run({"learning_rate": 1e-4}), 2) == ([], [])


def test_the_tutorials_scheduler_is_named():
    errors, notices = ds_config.conflicts(TUTORIAL, "t.json", run(), 2)
    assert errors == []
    assert notices[0] == (
        f"t.json: the scheduler WarmupLR overrides lr_scheduler_type=cosine ({RECIPE}): the rate will not decay"
    )
    assert "logarithm" in notices[1]
    assert "DeepSpeed#7188" in notices[2]
    (error,), _ = ds_config.conflicts(TUTORIAL, "t.json", run({"lr_scheduler_type": "cosine"}), 2)
    assert "overrides lr_scheduler_type=cosine (command line --lr_scheduler_type): the rate will not" in error


def test_a_scheduler_that_follows_the_same_curve_is_no_conflict():
    config = copy.deepcopy(EVERY_AUTO)
    config["scheduler"]["params"]["warmup_type"] = "linear"
    assert ds_config.conflicts(config, "my.json", run({"lr_scheduler_type": "linear"}), 2) == ([], [])
    assert len(ds_config.conflicts(config, "my.json", run({"lr_scheduler_type": "cosine"}), 2)[0]) == 1


# (what the JSON says, what was typed, the text, whether it is an error)
CONFLICTS = {
    "micro batch": (
        {"train_micro_batch_size_per_gpu": 8},
        {},
        f"train_micro_batch_size_per_gpu is 8, but per_device_train_batch_size=4 ({RECIPE});"
        ' write "auto", or pass --per_device_train_batch_size 8',
        True,
    ),
    "accumulation": ({"gradient_accumulation_steps": 2}, {}, "gradient_accumulation_steps=8 (", True),
    "accumulation missing": (
        {"gradient_accumulation_steps": None},
        {},
        "gradient_accumulation_steps is missing, which means 1, but gradient_accumulation_steps=8",
        True,
    ),
    "rate": (
        {"optimizer.params.lr": 1e-4},
        {"learning_rate": 3e-4},
        "optimizer.params.lr is 0.0001, but learning_rate=0.0003 (command line --learning_rate)",
        True,
    ),
    "betas": ({"optimizer.params.betas": [0.9, 0.95]}, {}, "pass --adam_beta1 0.9 --adam_beta2 0.95", True),
    "decay": ({"optimizer.params.weight_decay": 0.1}, {}, "weight_decay=0.0", True),
    "warm-up": ({"scheduler.params.warmup_num_steps": 5}, {}, "is 5, but warmup_steps=10", True),
    "clipping": ({"gradient_clipping": 0.5}, {}, "gradient_clipping is 0.5, but max_grad_norm=1.0", True),
    "clipping missing, typed": (
        {"gradient_clipping": None},
        {"max_grad_norm": 0.3},
        "gradient_clipping is missing, which means 1, but max_grad_norm=0.3 (command line --max_grad_norm)",
        True,
    ),
    "rate missing": (
        {"optimizer.params.lr": None},
        {},
        "optimizer.params.lr is missing, which means 0.001, but learning_rate=2e-05",
        False,
    ),
    "global batch": (
        {"train_batch_size": 32},
        {},
        "train_batch_size is 32, but 4 (train_micro_batch_size_per_gpu) x 8 (gradient_accumulation_steps)"
        ' x 2 (ranks) = 64; write 64 or "auto"',
        True,
    ),
    "fp16 over the hardware's bf16": (
        {"fp16.enabled": True},
        {},
        f"fp16.enabled is true, which overrides bf16=True ({RECIPE})",
        False,
    ),
    "fp16 over a typed bf16": (
        {"fp16.enabled": True},
        {"bf16": True},
        "fp16.enabled is true, which contradicts bf16=True",
        True,
    ),
    "bf16 off": ({"bf16.enabled": False}, {}, "bf16.enabled is false, which overrides bf16=True", False),
    "optimizer": (
        {},
        {"optim": "adafactor"},
        "the optimizer AdamW overrides optim=adafactor (command line",
        True,
    ),
    "ungathered": ({"zero_optimization": {"stage": 3}}, {}, "a save holds shards only", False),
}


@pytest.mark.parametrize(("patch", "typed", "text", "is_error"), CONFLICTS.values(), ids=CONFLICTS)
def test_conflict(patch, typed, text, is_error):
    config = changed(TUTORIAL, "zero_optimization.overlap_comm", False)
    config["scheduler"]["params"]["warmup_type"] = "linear"
    for key, value in patch.items():
        config = changed(config, key, value)
    if None in patch.values():
        config = without_nulls(config)
    errors, notices = ds_config.conflicts(config, "my.json", run(typed, lr_scheduler_type="constant_with_warmup"), 2)
    right, other = (errors, notices) if is_error else (notices, errors)
    assert len(right) == 1 and other == []
    assert right[0].startswith("my.json: ") and text in right[0]


def without_nulls(section: dict) -> dict:
    kept = {key: value for key, value in section.items() if value is not None}
    return {key: without_nulls(value) if isinstance(value, dict) else value for key, value in kept.items()}


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_batch_is_checked_for_the_ranks_that_run(ranks):
    config = TUTORIAL | {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    errors, _ = ds_config.conflicts(config, "my.json", run(), ranks)
    assert len(errors) == (ranks != 2)


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_32bit", "adafactor", "lion_32bit", "sgd"])
def test_an_optimizer_that_cannot_be_offloaded_is_named(optim):
    errors, _ = ds_config.conflicts(read(ds_config.find("zero2_offload")), "my.json", run(optim=optim), 2)
    assert len(errors) == 1 and f"offload_optimizer cannot use optim={optim} ({RECIPE})" in errors[0]
    assert ds_config.conflicts(read(ds_config.find("zero2")), "my.json", run(optim=optim), 2) == ([], [])
    free = read(ds_config.find("zero2_offload")) | {"zero_force_ds_cpu_optimizer": False}
    on_cpu = optim in ("adafactor", "sgd")
    assert len(ds_config.conflicts(free, "my.json", run(optim=optim), 2)[0]) == (not on_cpu)


def test_precision_is_the_files_where_it_says_so():
    assert [ds_config.precision_of(None, wanted) for wanted in ("bf16", "fp32")] == ["bf16", "fp32"]
    assert ds_config.precision_of(TUTORIAL, "bf16") == "bf16"
    assert ds_config.precision_of(changed(TUTORIAL, "fp16.enabled", True), "bf16") == "fp16"
    assert ds_config.precision_of(changed(TUTORIAL, "bf16.enabled", False), "bf16") == "fp32"


def hugging_face(config: dict, dtype: str, seen: list | None = None) -> dict:
    """The config after Hugging Face's own code, for 2 ranks, hidden size 48 and 100 steps."""
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    class Recorder(HfTrainerDeepSpeedConfig):
        def fill_match(self, ds_key_long, *args, **kwargs):
            seen is None or seen.append(ds_key_long)
            return super().fill_match(ds_key_long, *args, **kwargs)

        def fill_only(self, ds_key_long, *args, **kwargs):
            return self.fill_match(ds_key_long, *args, must_match=False, **kwargs)

    arguments = {name: value for name, value in ARGUMENTS.items() if name not in ("bf16", "fp16")}
    real = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[], **arguments)
    args = SimpleNamespace(**{**vars(real), "bf16": dtype == "bf16", "fp16": dtype == "fp16"}, world_size=2)
    args.get_warmup_steps = real.get_warmup_steps
    filled = Recorder(config)
    filled.trainer_config_process(args)
    filled.trainer_config_finalize(args, SimpleNamespace(config=SimpleNamespace(hidden_size=48)), 100)
    return filled.config


CASES = {"tutorial": TUTORIAL, "every_auto": EVERY_AUTO, **{path.stem: read(path) for path in FILES}}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_resolve_fills_in_what_hugging_face_does(name, dtype):
    config = copy.deepcopy(CASES[name])
    mine, origins = ds_config.resolve(config, run(), 2, 48, dtype, num_training_steps=100, where="my.json")
    theirs = hugging_face(config, dtype)
    assert config == CASES[name]
    expected = dict(leaves(theirs))
    if "steps_per_print" in expected:
        expected["steps_per_print"] = None  # accelerate writes infinity there; JSON has none
    assert {key: at(mine, key) for key in expected} == expected
    assert "auto" not in dict(leaves(mine)).values()
    assert origins.keys() == dict(leaves(mine)).keys()
    assert origins["zero_optimization.stage"] == "my.json"
    assert origins["gradient_clipping"] == f"max_grad_norm=1.0 ({RECIPE})"


def test_the_keys_that_may_be_auto_are_hugging_faces():
    seen: list[str] = []
    third = read(ds_config.find("zero3"))
    hugging_face(third, "bf16", seen)
    assert set(seen) == set(HF_FILLS)


def test_stage_3_sizes_at_another_stage_become_deepspeeds_defaults():
    resolved, origins = ds_config.resolve(changed(EVERY_AUTO, "zero_optimization.stage", 2), run(), 2, 48, "fp32")
    key = "zero_optimization.stage3_prefetch_bucket_size"
    assert (at(resolved, key), origins[key]) == (50_000_000, "DeepSpeed's default")


def test_step_counts_are_unknown_before_the_data_is_read():
    args = run(max_steps=-1, warmup_steps=0.03)
    resolved, origins = ds_config.resolve(EVERY_AUTO, args, 2, 48, "fp32")
    for key in ("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps"):
        assert at(resolved, key) is None and origins[key] == "counted when the data is read"
    assert asked(args, 2, 50)["scheduler.params.warmup_num_steps"].value == 2


@BY_NAME
def test_deepspeed_takes_the_resolved_config(path):
    from deepspeed.runtime.config import DeepSpeedConfig

    config = read(path)
    resolved, _ = ds_config.resolve(config, run(), 1, 48, "bf16")
    got = DeepSpeedConfig(resolved)
    zero = got.zero_config
    devices = {key: getattr(getattr(zero, key), "device", "none") for key in ds_config.OFFLOADS}
    assert ds_config.facts_of(config) == {"zero_stage": got.zero_optimization_stage, **devices}
    assert (got.bfloat16_config.enabled, got.float16_config.enabled) == (True, False)
    assert (got.train_batch_size, got.gradient_clipping) == (32, 1.0)
    assert zero.overlap_comm is False and zero.contiguous_gradients is True


def test_deepspeed_itself_trains_on_with_a_misspelt_section():
    """Why there is a lint: if this fails, DeepSpeed has learned to refuse unknown keys."""
    from deepspeed.runtime.config import DeepSpeedConfig

    wrong = {"train_batch_size": 1, "zero_optimisation": {"stage": 3}, "gradient_cliping": 0.1}
    got = DeepSpeedConfig(wrong)
    assert (got.zero_optimization_stage, got.gradient_clipping) == (0, 1.0)


def test_accelerate_refuses_the_same_keys(monkeypatch):
    from accelerate.utils import DeepSpeedPlugin

    for key in ds_config.YAML_KEYS:
        monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", key)
        with pytest.raises(ValueError, match=r"will be ignored") as caught:
            DeepSpeedPlugin(hf_ds_config=read(FILES[0]))
    listed = str(caught.value).partition("[")[2].partition("]")[0]
    assert len(listed.split(",")) == len(ds_config.YAML_KEYS)
