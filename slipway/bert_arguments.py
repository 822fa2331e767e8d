"""The arguments of recipes/bert/train.py: Hugging Face's names where it has one."""

import importlib.util
import os
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from slipway import limits
from slipway.errors import InputError, nearest

PRECISIONS = ("no", "fp16", "bf16")
TRACKERS = ("tensorboard", "wandb", "none")
# name: (least, greatest), both allowed; None: no end.
RANGES: dict[str, tuple[int, int | None]] = {
    **limits.RANGES,
    **dict.fromkeys(("max_length", "num_train_epochs", "logging_steps", "num_hidden_layers", "max_rows"), (1, None)),
    **dict.fromkeys(("max_steps", "save_steps", "patience"), (0, None)),
    "dropout": (0, 1),
}
POSITIVE = ("learning_rate", "max_grad_norm")


def _field(default: object, text: str) -> object:
    return field(default=default, metadata={"help": text})


@dataclass
class BertArguments:
    """What a run can be told."""

    model: str | None = _field(None, "minilm (needs no hub), a folder or a hub id; without it the dummy job")
    data: str | None = _field(None, "docstrings, or a file or folder (csv, jsonl, parquet) with a text and a label")
    output_dir: str | None = _field(None, "folder of the run; outputs/bert if left out, or the next free one")
    resume: str | None = _field(None, "auto: OUTPUT's newest complete checkpoint, if any; or a checkpoint's folder")
    text_column: str = _field("text", "name of the column that holds the text")
    label_column: str = _field("label", "name of the column that holds the class")
    eval_data: str | None = _field(None, "held-out rows from here, not from the data")
    held_out: float = _field(0.1, "share of each class that is kept from training to measure on")
    max_rows: int | None = _field(None, "use no more rows than this")
    max_length: int = _field(128, "tokens of a text; what is longer is cut, and counted")
    per_device_train_batch_size: int = _field(32, "rows a rank takes at once; halved if they do not fit its memory")
    per_device_eval_batch_size: int = _field(64, "the same in evaluation")
    gradient_accumulation_steps: int = _field(1, "micro-batches an optimizer step")
    num_train_epochs: int = _field(3, "passes over the training rows")
    max_steps: int = _field(0, "stop after so many optimizer steps; 0: only the epochs count")
    learning_rate: float = _field(5e-5, "at its highest")
    warmup_steps: float = _field(0.1, "steps of linear warm-up; below 1 a share of all steps; then linear decay")
    weight_decay: float = _field(0.01, "of AdamW")
    max_grad_norm: float = _field(1.0, "gradients are clipped to this norm")
    dropout: float | None = _field(None, "of the encoder and its head; the model's own if left out")
    patience: int = _field(0, "stop after so many epochs without a lower held-out loss; 0: never")
    mixed_precision: str | None = _field(None, "no, fp16 or bf16; what accelerate launch says, else no")
    torch_compile_backend: str | None = _field(None, "compile the model by this: inductor, or another that torch knows")
    seed: int = _field(42, "of the head's weights, the order of rows and dropout")
    dataloader_num_workers: int = _field(0, "processes that prepare batches, for each rank")
    logging_steps: int = _field(10, "print and record the loss every so many steps")
    save_steps: int = _field(0, "checkpoint every so many optimizer steps; 0: none, only the trained model")
    save_total_limit: int = _field(2, "keep so many of this run's complete checkpoints")
    heartbeat_seconds: int = _field(120, "a rank without a sign of life for so long ends the run; 0: no limit")
    report_to: str = _field("tensorboard", "tensorboard, wandb (where installed; WANDB_MODE=offline works) or none")
    num_hidden_layers: int = _field(4, "layers of the dummy model (bert-base has 12)")


def read(argv: list[str]) -> BertArguments:
    """The arguments of the command line.

    Raises InputError for an unknown flag (with the nearest known one), a value of the wrong type, one out of range, or
    one that names what is not here.
    """
    args, unknown = _parser().parse_args_into_dataclasses(argv, return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        flags = [f"--{one.name}" for one in fields(BertArguments)]
        raise InputError(f"unknown argument {unknown[0]}{nearest(unknown[0], flags)}", "`--help` lists all arguments")
    for name, value in as_dict(args).items():
        if instead := limits.allowed(value, *RANGES.get(name, (None, None)), name in POSITIVE):
            raise InputError(f"--{name} {value}: {instead} is needed", "correct the value, or leave it out")
    if not 0 < args.held_out < 1:
        raise InputError(f"--held_out {args.held_out} is no share of the rows", "a number between 0 and 1, as 0.1")
    for name, value, known in (
        ("mixed_precision", args.mixed_precision, PRECISIONS),
        ("report_to", args.report_to, TRACKERS),
    ):
        if value is not None and value not in known:
            raise InputError(f"--{name} {value}: unknown{nearest(value, known)}", f"one of {', '.join(known)}")
    _agree_on_precision(args)
    _check_tracker(args.report_to)
    _check_compiler(args.torch_compile_backend)
    return args


def typed(argv: list[str]) -> set[str]:
    """Names of the arguments that stand on the command line."""
    return {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in argv if word.startswith("--")}


def _agree_on_precision(args: BertArguments) -> None:
    """accelerate's launcher always says a precision; where both say one and they differ, neither is taken."""
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if launcher not in (None, "no") and args.mixed_precision not in (None, launcher):
        raise InputError(
            f"two precisions: --mixed_precision {args.mixed_precision}, and {launcher} of accelerate launch",
            "say one of them",
        )
    args.mixed_precision = args.mixed_precision or launcher or "no"


def _check_tracker(name: str) -> None:
    if name != "wandb":
        return
    if importlib.util.find_spec("wandb") is None:
        raise InputError(
            "--report_to wandb: the package wandb is not installed in this Python",
            "install it beside the lock (uv pip install wandb), or --report_to tensorboard",
        )
    local = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    if not local and not os.environ.get("WANDB_API_KEY") and not Path("~/.netrc").expanduser().exists():
        raise InputError(
            "--report_to wandb: nobody is logged in to Weights & Biases",
            "`wandb login` or WANDB_API_KEY; WANDB_MODE=offline writes to OUTPUT/wandb alone",
        )


def _check_compiler(backend: str | None) -> None:
    import torch._dynamo

    known = torch._dynamo.list_backends(exclude_tags=()) if backend else []
    if backend and backend not in known:
        raise InputError(
            f"--torch_compile_backend {backend}: torch knows no such{nearest(backend, known)}",
            f"one of {', '.join(known)}",
        )


def print_help() -> None:
    """All arguments, as argparse prints them."""
    _parser().print_help(sys.stdout)


def as_dict(args: BertArguments) -> dict[str, object]:
    """Name -> value, for run.json and the trackers."""
    return asdict(args)


def _parser() -> object:
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> None:
            raise InputError(message.replace("argument ", "", 1), "`--help` lists all arguments and their types")

    return Parser(BertArguments, allow_abbrev=False)
