"""A recipe's arguments: the recipe's YAML below, typed flags above, all of them Hugging Face's and TRL's own names.

`read` parses without building a TrainingArguments (which would start a process group), so that the launcher can check
everything before a process is launched, and remembers where each value came from. `build` then makes the dataclasses.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml

from slipway.errors import InputError, nearest

# Arguments of TRL's that would do nothing here, because slipway.encode prepares the data; said instead of ignored.
NO_EFFECT = {
    "assistant_only_loss": "loss is on the answers wherever there are any; --loss_on all trains on everything",
    "completion_only_loss": "loss is on the answers wherever there are any; --loss_on all trains on everything",
    "dataset_text_field": 'name the column with --columns \'{"text": "your_column"}\'',
    "dataset_kwargs": "rows are prepared by slipway.encode",
    "dataset_num_proc": "rows are prepared by slipway.encode, once, and cached",
    "eval_packing": "held-out rows are packed as the training rows are",
    "packing_strategy": "rows are packed by best fit; --packing false turns packing off",
    "shuffle_dataset": "rows are shuffled by --seed before they are packed",
    "truncation_mode": "answers are cut at their end, texts are split into pieces",
    "attn_implementation": "use --attn",
    "model_init_kwargs": "each has an argument of its own: --dtype, --attn, --model_revision",
    "quantization_config": "use --load_in_4bit true",
    "bf16_full_eval": "evaluation runs in the precision of the training",
    "fp16_full_eval": "evaluation runs in the precision of the training",
    "use_cpu": "a machine without a GPU trains on its CPU; CUDA_VISIBLE_DEVICES= hides the GPUs",
}


@dataclass
class RecipeArguments:
    """What Hugging Face and TRL have no argument for."""

    dataset_name: str = field(
        default="docstrings",
        metadata={"help": "docstrings, a file, a folder of files, or a dataset id of the hub"},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "configuration of a hub dataset"})
    dataset_train_split: str = field(default="train", metadata={"help": "split of a hub dataset to train on"})
    shape: str | None = field(
        default=None,
        metadata={"help": "messages, prompt_completion, alpaca or text; found from the columns if unset"},
    )
    columns: dict | str | None = field(
        default=None, metadata={"help": 'JSON: what your columns are called, {"prompt": "question", ...}'}
    )
    loss_on: str = field(default="answer", metadata={"help": "answer (where the rows have one) or all"})
    eval_data: str | None = field(default=None, metadata={"help": "held-out rows from here, not from the data"})
    held_out_rows: int = field(default=64, metadata={"help": "rows kept from training to measure on; 0: none"})
    max_rows: int | None = field(default=None, metadata={"help": "read no more rows than this"})
    attn: str = field(
        default="auto",
        metadata={"help": "auto, sdpa, flash_attention_2, xformers or eager; auto says its choice"},
    )
    nvme_path: str | None = field(default=None, metadata={"help": "folder on an NVMe disk, for zero3_nvme"})
    samples: int = field(default=3, metadata={"help": "held-out prompts answered before and after; 0: none"})
    sample_tokens: int = field(default=48, metadata={"help": "length of such an answer at most, in tokens"})
    merge: bool = field(
        default=False, metadata={"help": "LoRA: also save base + adapter as one model in OUTPUT/merged"}
    )
    resume: str | None = field(
        default=None,
        metadata={"help": "auto: go on from the newest complete checkpoint in OUTPUT; or OUTPUT/checkpoint-STEP"},
    )
    stop_seconds: int = field(
        default=300, metadata={"help": "after a signal, ranks that have not saved and ended by then are killed"}
    )
    stop_on_sigusr1: bool = field(default=False, metadata={"help": "SIGUSR1 stops as SIGTERM does: Slurm's warning"})
    heartbeat_seconds: int = field(
        default=120, metadata={"help": "a rank without a sign of life for so long ends the run; 0: no limit"}
    )
    on_full_disk: Literal["go_on", "stop"] = field(
        default="go_on",
        metadata={"help": "no room for a checkpoint: go_on (without it) or stop (the last good one stays either way)"},
    )
    overwrite: bool = field(
        default=False,
        metadata={"help": "replace what an earlier run left in OUTPUT (only ever a run's folder)"},
    )


@dataclass
class Asked:
    """What was asked: the values that were given, where each came from, and the defaults below them."""

    values: dict[str, Any]
    origins: dict[str, str]
    defaults: dict[str, Any]
    config: Path | None = None

    def get(self, key: str) -> Any:
        return self.values.get(key, self.defaults[key])

    def origin(self, key: str) -> str:
        return self.origins.get(key, "default")

    def set(self, key: str, value: Any, origin: str) -> None:
        self.values[key], self.origins[key] = value, origin

    def typed(self, key: str) -> bool:
        return self.origin(key).startswith("command line")

    @property
    def recipe(self) -> str:
        return self.config.stem if self.config else "custom"


def read(argv: list[str]) -> Asked:
    """Parse `[--config FILE.yaml] [--flag value ...]`.

    Raises InputError for a YAML that is none, an unknown key or flag (with the nearest known one), a value of the wrong
    type (with file and line), and an argument that would have no effect.
    """
    parser = _parser()
    actions: dict[str, Any] = {}
    for action in parser._actions:
        actions.setdefault(action.dest, action)  # --no_x comes after --x and has its destination
    actions.pop("help")
    defaults = {key: action.default for key, action in actions.items()}
    argv, config = _take_config(list(argv))
    values, origins = {}, {}
    for key, (value, line) in _read_yaml(config).items() if config else ():
        where = f"{config}:{line}"
        if key not in defaults:
            raise InputError(f"{where}: unknown key {key!r}{nearest(key, defaults)}", "correct it or take it out")
        values[key] = _typed(actions[key], value, f"{where}: {key}")
        origins[key] = where
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False  # so that only typed flags come back
    typed, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [f"--{key}" for key in defaults]
        raise InputError(f"unknown argument {unknown[0]}{nearest(unknown[0], flags)}", "`--help` lists all arguments")
    for key, value in vars(typed).items():
        if value == "":
            raise InputError(f"--{key} is given an empty value", "give one, or leave the flag out")
        values[key], origins[key] = value, f"command line --{key}"
    if isinstance(values.get("columns"), str):
        values["columns"] = _mapping(values["columns"], origins["columns"])
    for key in values:
        if key in NO_EFFECT:
            raise InputError(f"{origins[key]}: {key} has no effect here", NO_EFFECT[key])
    return Asked(values, origins, defaults, config)


def _mapping(text: str, where: str) -> dict[str, str]:
    """A JSON object of texts, as it is typed on a command line."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise InputError(
            f"{where}: expected a JSON object of column names, found {text}",
            """in a shell, and in make's ARGS: --columns '{"prompt": "question", "completion": "answer"}'""",
        )
    return found


def build(asked: Asked) -> tuple[Any, Any, Any]:
    """(RecipeArguments, SFTConfig, ModelConfig) of the asked values. Joins the process group, as SFTConfig does."""
    return _parser().parse_dict(asked.values, allow_extra_keys=False)


def _parser() -> Any:
    import warnings

    warnings.filterwarnings("ignore", category=FutureWarning)
    from trl import ModelConfig, SFTConfig, TrlParser

    class Parser(TrlParser):
        def error(self, message: str) -> None:
            raise InputError(message.replace("argument ", "", 1), "`--help` lists all arguments and their types")

    return Parser((RecipeArguments, SFTConfig, ModelConfig), allow_abbrev=False)


def _take_config(argv: list[str]) -> tuple[list[str], Path | None]:
    for i, word in enumerate(argv):
        if word == "--config" or word.startswith("--config="):
            rest = argv[:i] + argv[i + (1 if "=" in word else 2) :]
            name = word.partition("=")[2] if "=" in word else (argv[i + 1] if i + 1 < len(argv) else "")
            if not name:
                raise InputError("--config needs a file", "name a recipe, as in --config recipes/llama/zero3.yaml")
            if any(other.partition("=")[0] == "--config" for other in rest):
                raise InputError("--config is given twice", "name one recipe; flags change its values")
            return rest, Path(name)
    return argv, None


def _read_yaml(path: Path) -> dict[str, tuple[Any, int]]:
    """Top-level keys of a YAML file with value and line number."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(p.stem for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        listed = f" Recipes there: {', '.join(near)}." if near else ""
        raise InputError(f"no recipe file {path}.{listed}", "name one that exists") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}", "a recipe is a text file in YAML") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise InputError(f"{path}{line}: no valid YAML: {problem}", "correct that line") from None
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise InputError(f"{path}: expected `key: value` lines, found {found}", "see recipes/llama/")
    lines: dict[str, int] = {}
    for key_node, _ in node.value:
        if key_node.value in lines:
            first = lines[key_node.value]
            raise InputError(
                f"{path}:{key_node.start_mark.line + 1}: {key_node.value} was set on line {first}", "keep one"
            )
        lines[key_node.value] = key_node.start_mark.line + 1
    return {str(key): (value, lines.get(str(key), 1)) for key, value in content.items()}


def _typed(action: Any, value: Any, where: str) -> Any:
    """A YAML value as the argument's type; YAML reads 2e-4 as a string, argparse would have made it a number."""
    for kind, name, shown in ((type(None), "None", "nothing"), (list, "list", "a list"), (dict, "dict", "a mapping")):
        if isinstance(value, kind):
            if name in _annotation(action.dest):
                return value
            raise InputError(f"{where}: expected one value, found {shown}", "correct the value, or take the key out")
    try:
        return action.type(str(value)) if action.type else value
    except Exception as error:  # argparse types raise what they like: ValueError, TypeError, ArgumentTypeError
        name = getattr(action.type, "__name__", str(action.type)).replace("string_to_bool", "true or false")
        raise InputError(f"{where}: expected {name}, found {value!r}", "correct the value") from error


def _annotation(key: str) -> str:
    """The type that a dataclass gives an argument, as text; the parser keeps a simpler one in its fields."""
    hints = [get_type_hints(kind) for kind in _parser().dataclass_types]
    return str(next(one[key] for one in hints if key in one)).replace("Optional", "None")


def repository() -> Path:
    """The checkout (or image folder) that recipes/ and ds_configs/ stand in."""
    return Path(__file__).resolve().parent.parent


def print_help() -> None:
    """All arguments, as argparse prints them."""
    _parser().print_help(sys.stdout)


def as_plain(values: dict[str, Any]) -> dict[str, Any]:
    """Values as JSON can hold them, without secrets."""
    hidden = {key for key in values if key.endswith("token") and key not in ("eos_token", "pad_token")}
    return {
        key: "(hidden)" if key in hidden and value else value if _is_plain(value) else str(value)
        for key, value in values.items()
    }


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool, list, dict))


def relative(path: str, config: Path | None) -> Path:
    """A path in a recipe: below the current folder, else beside the recipe, else below the checkout."""
    for base in (Path.cwd(), *([config.parent] if config else []), repository()):
        if (base / Path(path).expanduser()).exists():
            return base / Path(path).expanduser()
    return Path(path)
