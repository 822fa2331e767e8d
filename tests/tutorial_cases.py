"""What the blocks of docs/from-the-tutorials.md find when they run, and what is claimed of each: heading -> Case."""

import copy
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import model_zoo
import torch
import tutorial_checks as checks
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification
from tutorial_checks import Names

from slipway import topology

ZERO3 = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_param_persistence_threshold": 0,  # small tensors too: none is left whole between steps
    },
    "zero_allow_untested_optimizer": True,
}


@dataclass(frozen=True)
class Case:
    """Checks get what the block left, on each rank, in the block's own folder."""

    right: Callable[[Names], None]
    wrong: Callable[[Names], None] | None = None  # None: the error that the page names says it all
    ranks: int = 1
    deepspeed: bool = False
    told_cpu: bool = True  # as `accelerate launch --cpu` does
    fails_somewhere: bool = False  # on some ranks; the check is given the words
    not_run: str = ""  # why the wrong block cannot be run here
    spare_memory: int | None = None  # bytes that the block may take
    rows: int = 40
    length: int = 8
    pad: str | None = "<pad>"

    @property
    def launched(self) -> bool:
        return self.ranks > 1 or self.deepspeed


def set_up(case: Case) -> Names:
    """A classifier of two classes with random weights, its rows, and what goes with them."""
    if case.deepspeed:
        topology.join(topology.current(), deepspeed=True, timeout_s=15)
    elif case.ranks > 1 and case.told_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": case.pad}
    tokenizer = model_zoo.tokenizer(["<s>", "</s>", "<pad>"][: 3 if case.pad else 2], **special)
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **small, **still))
    labels = torch.randint(2, (case.rows,))
    ids = torch.randint(10, 120, (case.rows, case.length)) + 120 * labels[:, None]  # a class, a range of ids
    rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names = {"model": model, "rows": rows, "optimizer": optimizer, "tokenizer": tokenizer}
    names |= {"loader": DataLoader(rows, batch_size=4), "epochs": 3, "steps": 15 if case.ranks == 2 else 9}
    names |= {"texts": ["a ship", "a harbour", "the tide", "salt"] * 4, "zero3": copy.deepcopy(ZERO3)}
    names |= {"__name__": "__main__", "_case": case, "_model": model, "_start": copy.deepcopy(model), "_taken": []}
    if not case.deepspeed:  # which keeps gradients elsewhere
        optimizer.register_step_pre_hook(
            lambda *_: names["_taken"].append((checks.gradient(model), checks.rate(optimizer)))
        )
    if case.spare_memory:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + case.spare_memory, resource.RLIM_INFINITY))
    return names


CASES = {
    "GradScaler beside accelerate": Case(checks.scaler_right, checks.scaler_wrong),
    "if step % accumulation == 0: optimizer.step()": Case(checks.steps_right, checks.steps_astray),
    "The same inside accumulate": Case(checks.steps_clipped, checks.no_steps),
    "loss / accumulation before accelerator.backward": Case(
        checks.steps_right, lambda names: checks.steps_on(names, 1 / 4, 16, 3)
    ),
    "loss.backward()": Case(checks.steps_right, lambda names: checks.steps_on(names, 4, 16, 3)),
    "scheduler.step() for each micro-batch": Case(checks.linear, checks.decays_too_fast),
    "prepare(scheduler) on several ranks": Case(checks.linear, checks.decays_twice_as_fast, ranks=2),
    "Accelerator() under torchrun, without a GPU": Case(
        checks.two_processes, checks.one_process, ranks=2, told_cpu=False
    ),
    "DistributedSampler beside prepare": Case(checks.half_each, checks.a_part_each, ranks=2),
    "accelerator.prepare, and then Trainer": Case(checks.one_model, ranks=2),
    "gather for metrics": Case(checks.each_label_once, checks.two_labels_too_many, ranks=2),
    "Trainer(tokenizer=)": Case(checks.tokenizer_saved),
    "evaluation_strategy": Case(checks.evaluated_twice),
    "overwrite_output_dir, no_cuda, logging_dir, warmup_ratio": Case(
        checks.arguments_taken, checks.each_argument_is_gone
    ),
    "from transformers import AdamW": Case(checks.decays_nothing),
    "scheduler in the ds_config, beside Trainer's": Case(
        checks.rate_follows_the_cosine, checks.rate_stays, deepspeed=True
    ),
    "save_pretrained under ZeRO-3": Case(checks.saved_whole, checks.saved_empty, ranks=2, deepspeed=True),
    "save_state on rank 0, under ZeRO": Case(
        checks.went_on_from_the_checkpoint, checks.rank_0_left_alone, ranks=2, deepspeed=True, fails_somewhere=True
    ),
    "save_pretrained of a prepared model": Case(checks.saved_by_one, ranks=2),
    "torch.load of a whole model": Case(checks.loads_the_same),
    "torch.load of pytorch_model.bin": Case(checks.the_same_tensors),
    "empty_cache against out of memory": Case(
        checks.one_step_of_all, not_run="does nothing without a GPU", spare_memory=2**28, rows=1024, length=128
    ),
    'mixed_precision="fp16" on any machine': Case(checks.full_precision, checks.half_precision_only_by_name),
    "TrainingArguments(fp16=True) on any machine": Case(
        checks.full_precision_in_trainer, checks.half_precision_only_by_name
    ),
    "TrainingArguments(bf16=True) on any machine": Case(checks.full_precision_in_trainer),
    "A tokenizer in forked workers": Case(checks.all_texts, checks.all_texts),
    "torch.randn(768) as input_ids": Case(checks.has_a_loss),
    "tokenizer.pad_token = tokenizer.eos_token": Case(checks.ends_with_the_end_token, checks.no_end_token, pad=None),
}
