"""Everything about a BERT run that can be known before it starts; the launcher and each rank call `check`."""

import os
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from slipway import (
    bert_arguments,
    checkpoints,
    dummy,
    encoders,
    labelled,
    manifest,
    memory,
    models,
    output,
    record,
    topology,
)
from slipway.bert_arguments import BertArguments, print_help
from slipway.errors import InputError
from slipway.topology import World
from slipway.windows import Windows

__all__ = ["BertPlan", "check", "print_help"]  # the last two are what scripts/launch.py asks of a recipe

RECIPE = "bert"
# On the embedded texts without a GPU a run is a demonstration of minutes; what is typed stays as typed.
DEMONSTRATION = {
    "max_length": 32,
    "num_train_epochs": 2,
    "learning_rate": 2e-4,
    "per_device_train_batch_size": 16,
}
# What may differ between a run and the one that goes on from its checkpoint: it changes no weight, or is compared
# by its content.
_FREE = {
    *("output_dir", "resume", "save_steps", "save_total_limit", "logging_steps", "report_to"),
    *("dataloader_num_workers", "per_device_eval_batch_size", "data", "eval_data", "model", "heartbeat_seconds"),
}


@dataclass
class BertPlan:
    """A run that passed all checks."""

    began: float  # time.time() of its first check
    args: BertArguments
    world: World
    output: Path
    model: models.Model | None  # None: the dummy job
    data: labelled.Labelled | None
    resume: manifest.Checkpoint | None = None
    notices: list[str] = field(default_factory=list)
    # Rows a rank takes at once and how often before an optimizer step: halved and doubled where memory is short.
    batch: int = 0
    accumulation: int = 0

    def __post_init__(self) -> None:
        self.batch, self.accumulation = self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps

    def limits(self) -> dict[str, Any]:
        """What the launcher watches the ranks by (slipway.watch.Limits): a signal ends them where they are."""
        return {"stop_s": 30, "silence_s": self.args.heartbeat_seconds, "sigusr1": False}

    def last_good(self) -> int | None:
        """The step of the newest complete checkpoint in OUTPUT; None if there is none."""
        found, _ = manifest.newest(self.output, checksums=False)
        return found.step if found else None

    def resume_rows(self) -> list[tuple[str, str]]:
        """(what, value) lines on the resume that was asked for."""
        told = [("note", notice) for notice in self.notices]
        if not self.resume:
            return [*told, ("goes on", f"from nowhere: there is no complete checkpoint for {self.output}")]
        return [*told, ("goes on", f"after step {self.resume.step}, from {self.resume.path}")]

    def before_ranks(self) -> None:
        """Nothing is to be done once for all ranks: models and data are in the cache by now."""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.data.classes if self.data else dummy.CLASSES

    @cached_property
    def tokenizer(self) -> Any:
        return encoders.tokenizer(self.model)

    @cached_property
    def train_rows(self) -> Any:
        """Rows to train on, each a dict of what the model's forward takes, and its labels."""
        if self.data is None:
            return dummy.Embeddings(self.args.max_rows or dummy.ROWS, self.args.seed)
        return self._encoded(self.data.train, "to train on")

    @cached_property
    def held_out_rows(self) -> Any:
        """Rows to measure on, as those to train on."""
        if self.data is None:
            return dummy.Embeddings(max(2, len(self.train_rows) // 8), self.args.seed + 1)
        return self._encoded(self.data.held_out, "held out")

    def _encoded(self, rows: list[labelled.Text], what: str) -> encoders.Encoded:
        found, longest = encoders.Encoded(rows, self.tokenizer, self.args.max_length), self.args.max_length
        if found.cut:
            share = f"{found.cut:,} of {len(rows):,} texts {what}"
            self.notices.append(f"{share} are longer than {longest} tokens and are cut there (--max_length)")
        return found

    @property
    def collate(self) -> Any:
        """Rows to a batch: texts are padded to the longest of the batch."""
        from torch.utils.data import default_collate
        from transformers import DataCollatorWithPadding

        return DataCollatorWithPadding(self.tokenizer) if self.data else default_collate

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model; no weights are loaded."""
        import torch

        with torch.device("meta"):
            built = (
                dummy.model(self.args.num_hidden_layers, None)
                if self.model is None
                else encoders.empty(self.model.config)
            )
        return sum(parameter.numel() for parameter in built.parameters())

    @property
    def size(self) -> memory.Size:
        """What the model takes on disk: trained whole, in fp32."""
        return memory.Size(self.parameters, self.parameters, 4)

    def build_model(self) -> Any:
        """The model in fp32 on the CPU; what is random in it comes from torch's seed."""
        if self.model is None:
            return dummy.model(self.args.num_hidden_layers, self.args.dropout)
        return encoders.load(self.model, self.classes, self.args.dropout)

    def windows(self, rank: int) -> Windows:
        return Windows(len(self.train_rows), self.batch, self.accumulation, self.world.size, rank)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run, if it is not stopped early."""
        steps = self.windows(0).steps * self.args.num_train_epochs
        return min(steps, self.args.max_steps or steps)

    @property
    def warmup(self) -> int:
        """Optimizer steps of warm-up."""
        asked = self.args.warmup_steps
        return round(asked if asked >= 1 else asked * self.steps)

    def halve(self) -> int:
        """Half the rows at once, twice the accumulation: the optimizer step stays what it was. Gives the new batch.

        Raises InputError where the rows cannot be halved.
        """
        if self.batch % 2:
            raise InputError(
                f"{self.batch} rows at once do not fit the memory of each rank, and cannot be halved",
                "--max_length shorter, a smaller model, or --per_device_train_batch_size of a power of two",
            )
        self.batch //= 2
        self.accumulation *= 2
        self.notices.append(f"out of memory: {self.batch} rows at once, accumulated {self.accumulation} times")
        return self.batch

    def must_get(self) -> dict[str, Any]:
        """What record.compare holds the run to."""
        facts = {
            "world_size": self.world.size,
            "device": self.world.accelerator,
            "dtype": {"no": "fp32"}.get(self.args.mixed_precision, self.args.mixed_precision),
            "compiled": self.args.torch_compile_backend is not None,
            "global_batch": self.windows(0).global_batch,
            "trained": "all but the table of words" if self.model is None else "all",
        }
        return facts | ({"engine": "DistributedDataParallel"} if self.world.size > 1 else {})

    def decides(self) -> dict[str, Any]:
        """What decides the weights that come of the run: a checkpoint of another run differs in it."""
        asked = {key: value for key, value in bert_arguments.as_dict(self.args).items() if key not in _FREE}
        model = {"name": self.model.name, "weights": encoders.fingerprint(self.model)} if self.model else "dummy"
        return asked | {
            "ranks": self.world.size,
            "model": model,
            "rows": self.data.fingerprint if self.data else "dummy",
        }

    def hyperparameters(self) -> dict[str, Any]:
        """What the trackers show beside the curves."""
        return {key: value for key, value in bert_arguments.as_dict(self.args).items() if value is not None}

    def as_asked(self) -> dict[str, Any]:
        """The "asked" part of run.json."""
        return {
            "recipe": RECIPE,
            "model": {"name": self.model.name if self.model else "dummy"},
            "data": {
                "source": self.data.source if self.data else "dummy",
                "train_rows": len(self.train_rows),
                "held_out_rows": len(self.held_out_rows),
                "classes": list(self.classes),
            },
            "must_get": self.must_get(),
            "arguments": bert_arguments.as_dict(self.args),
            "seeds": {"seed": self.args.seed},
            "resumed_from": str(self.resume.path) if self.resume else None,
        }


def check(argv: list[str], world: World) -> BertPlan:
    """Check the arguments for `world`. Raises InputError at the first thing that will not do."""
    began = time.time()
    args = bert_arguments.read(argv)
    topology.precision(world, args.mixed_precision == "bf16", args.mixed_precision == "fp16", "--mixed_precision")
    folder, resume, notices = _check_output(args)
    notices += _demonstrate(args, bert_arguments.typed(argv), world)
    if args.data and not args.model:
        raise InputError(
            f"DATA={args.data} needs a MODEL", "MODEL=minilm needs no hub; a folder or a hub id will do too"
        )
    model = encoders.resolve(args.model) if args.model else None
    data = None
    if model:
        encoders.check_length(model, args.max_length)
        data = labelled.prepare(
            args.data or labelled.EMBEDDED,
            text=args.text_column,
            label=args.label_column,
            held_out=args.held_out,
            eval_source=args.eval_data,
            max_rows=args.max_rows,
        )
        notices += data.notes
    plan = BertPlan(began, args, world, folder, model, data, resume, notices)
    if resume:
        checkpoints.must_agree(resume, plan.decides())
    if os.environ.get("RANK", "0") == "0":
        memory.check_disk(folder, plan.size, args.save_total_limit + 1 if args.save_steps else 0)
    return plan


def _demonstrate(args: BertArguments, typed: set[str], world: World) -> list[str]:
    """Shortens a run on the embedded texts where there is no GPU; a line that says so."""
    if world.on_gpu or not args.model or (args.data or labelled.EMBEDDED) != labelled.EMBEDDED:
        return []
    if "num_train_epochs" in typed or "max_steps" in typed:
        return []
    changed = {key: value for key, value in DEMONSTRATION.items() if key not in typed}
    for key, value in changed.items():
        setattr(args, key, value)
    said = ", ".join(f"--{key} {value}" for key, value in changed.items())
    return [f"no GPU, embedded texts: a demonstration, with {said}"]


def _check_output(args: BertArguments) -> tuple[Path, manifest.Checkpoint | None, list[str]]:
    """The run's folder, the checkpoint to go on from if there is one, and what is to be said about it."""
    asked = Path(args.output_dir or Path("outputs") / RECIPE).expanduser().absolute()
    # The launcher starts the same command again; until there is a checkpoint in OUTPUT, it starts where it did before.
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if again and (not args.resume or manifest.newest(asked, checksums=False)[0]):
        args.resume = "auto"
    if not args.resume:
        folder = output.choose(args.output_dir, RECIPE)
        ways = ", or RESUME=auto (--resume auto)" if any(folder.glob("checkpoint-*")) else ""
        output.check(folder, goes_on=False, ways=ways)
        return folder, None, []
    found, notices = checkpoints.choose(args.resume, asked)
    folder = found.path.parent if found and not args.output_dir else asked
    own = found is None or found.path.parent == folder
    output.check(folder, goes_on=own or again, ways="")
    if own and (record.read(folder) or {}).get("status") == "finished":
        raise InputError(f"the run in {folder} is finished: nothing is left to resume", "name another OUTPUT")
    return folder, found, notices
