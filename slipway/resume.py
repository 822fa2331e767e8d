"""Which checkpoint a run goes on from, whether it is this run's, and what to say where it is not.

The launcher looks at names and sizes only, so that it refuses in a second; then rank 0 reads every byte, and all ranks
go on from what it found (`agree`).
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway import ds_schema, manifest, memory, record, topology, universal
from slipway.arguments import Asked, as_plain
from slipway.errors import InputError

if TYPE_CHECKING:
    from slipway.plan import Plan

AUTO = "auto"
# Arguments that change no weight and no loss, or are compared as what they come to: rows, ds_config, precision.
_FREE_PREFIXES = ("save_", "logging_", "log_", "eval_", "hub_", "push_to_hub", "ddp_", "nvme_", "report_", "stop_",
                  "heartbeat_")  # fmt: skip
_FREE = {
    "output_dir", "overwrite", "on_full_disk", "resume", "resume_from_checkpoint", "run_name", "project", "samples",
    "sample_tokens", "merge", "disable_tqdm", "model_revision", "dataset_name", "deepspeed",
    "restore_callback_states_from_checkpoint",
    "include_num_input_tokens_seen", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    "per_device_eval_batch_size", "remove_unused_columns", "use_cpu", "accelerator_config", "skip_memory_metrics",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_persistent_workers",
    "dataset_config", "dataset_train_split", "shape", "columns", "loss_on", "held_out_rows", "max_rows",
}  # fmt: skip
_DATA = ("dataset_name", "dataset_config", "dataset_train_split", "shape", "columns", "loss_on", "eval_data",
         "held_out_rows", "max_rows")  # fmt: skip


@dataclass
class Start:
    """Where a run starts: at a checkpoint, or at step 0. lines: what to tell of those passed over; conversion: what is
    to be said of one that has to be converted (see slipway.universal), empty if none; converted: where it then lies."""

    checkpoint: manifest.Checkpoint | None = None
    earlier: dict[str, Any] | None = None  # the run's record up to here
    lines: list[str] = field(default_factory=list)
    conversion: str = ""
    converted: Path | None = None

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def path(self) -> str | None:
        return str(self.checkpoint.path) if self.checkpoint else None

    @property
    def read_from(self) -> str | None:
        """The folder that the Trainer loads."""
        return str(self.converted) if self.converted else self.path


def wanted(asked: Asked) -> str | None:
    """ "auto", the path of a checkpoint, or None, out of --resume and the Trainer's own --resume_from_checkpoint."""
    ours, trainers = asked.get("resume"), asked.get("resume_from_checkpoint")
    if ours and trainers:
        raise InputError(
            f"{asked.origin('resume')} and {asked.origin('resume_from_checkpoint')} are both given", "keep one"
        )
    as_word = {"true": AUTO, "false": None, "none": None}
    path = ours or as_word.get(str(trainers).lower(), trainers)
    if path and asked.get("overwrite"):
        raise InputError(f"{asked.origin('overwrite')}: a run is gone on with or overwritten", "leave one out")
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        return AUTO  # the agent starts the same command again
    return path


def output_of(asked: Asked) -> str | None:
    """The folder of the run whose checkpoint was asked for by its path; InputError if the path is none, or another's.

    Optimizer and random states are pickles, which can hold any code: they are read from a run's own folder only.
    """
    path = wanted(asked)
    if path in (None, AUTO):
        return None
    folder = Path(path).expanduser().absolute()
    if folder not in manifest.folders(folder.parent):
        raise InputError(f"--resume {path} is no checkpoint's folder", "--resume auto, or OUTPUT/checkpoint-STEP")
    output = asked.get("output_dir")
    if output and Path(output).expanduser().absolute() != folder.parent:
        raise InputError(
            f"--resume {path} is not in OUTPUT {output}: a run goes on in its own folder",
            f"OUTPUT={folder.parent}, or start a new run from its weights with MODEL={path}",
        )
    return str(folder.parent)


def can_go_on(output: Path, asked: Asked) -> bool:
    """Whether what OUTPUT holds is an unfinished run, and going on with it was asked for."""
    return bool(wanted(asked)) and (record.read(output) or {}).get("status") != "finished"


def ways(output: Path) -> str:
    """What else than another folder can be done with OUTPUT, which holds a run; of an unfinished one, where it is."""
    over = "ARGS='--overwrite true' starts over"
    earlier = record.read(output)
    if earlier is None or earlier["status"] == "finished":
        return over
    found, _ = manifest.newest(output, earlier.get("run_id"), checksums=False)
    steps = earlier["asked"]["arguments"].get("max_steps", -1)
    last = f"step {found.step}{f' of {steps}' if steps > 0 else ''}" if found else "none"
    return f"RESUME=auto (--resume auto) goes on with it: last good checkpoint: {last}; {_ended(earlier)}; {over}"


def _ended(earlier: dict[str, Any]) -> str:
    last = (earlier.get("history") or [{}])[-1]
    if last.get("event") != "stop":
        return "it was killed, or still runs"
    after = "" if last["step"] is None else f" after step {last['step']}"
    return f"it was stopped{after}: {last['cause']}"


def identity(plan: "Plan") -> dict[str, Any]:
    """All that decides a run's losses, as JSON holds it; a resumed run must have the same."""
    values = {key: plan.asked.get(key) for key in sorted(plan.asked.defaults) if not _is_free(key)}
    facts = {
        "world_size": plan.world.size,
        "zero_stage": plan.ds_facts["zero_stage"],
        "offload_optimizer": plan.ds_facts["offload_optimizer"],
        "offload_param": plan.ds_facts["offload_param"],
        "ds_config": plan.ds_config,
        "precision": plan.precision,
        "attention": plan.attention.name,
        "parameters": plan.parameters,
        "model_revision": plan.model.revision,
        "data": plan.data.facts["fingerprint"],
        "held_out": plan.data.facts["held_out_fingerprint"],
        "data_arguments": {key: plan.asked.get(key) for key in _DATA},
        "arguments": as_plain(values),
    }
    return json.loads(json.dumps(facts, default=str))


def _is_free(key: str) -> bool:
    return key in _FREE or key.startswith(_FREE_PREFIXES) or key.endswith("token")


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Each thing that is not as it was, and a line that says so."""
    before, now = dict(before), dict(now)
    rows = [before.pop("data_arguments"), now.pop("data_arguments")]
    before |= before.pop("arguments")
    now |= now.pop("arguments")
    if all(before[key] == now[key] for key in ("data", "held_out")):
        rows = [{}, {}]  # the same rows in the same order, whatever they were called
    pairs = [(key, before.get(key), now.get(key)) for key in [*before, *(set(now) - set(before))]]
    pairs += [(key, rows[0].get(key), rows[1].get(key)) for key in rows[0]]
    return {key: "\n  ".join(_changes(key, was, is_)) for key, was, is_ in pairs if was != is_}


def _changes(key: str, was: Any, is_: Any) -> list[str]:
    """A line of each value that is not as it was; of a config, each of its keys, unless there was or is none."""
    if isinstance(was, dict) and isinstance(is_, dict):
        before, now = (dict(ds_schema.leaves(config)) for config in (was, is_))
        names = [name for name in before | now if before.get(name) != now.get(name)]
        return [line for name in names for line in _changes(f"{key}: {name}", before.get(name), now.get(name))]
    was, is_ = ("a config" if isinstance(value, dict) else value for value in (was, is_))
    return [f"{key}: {was} then, {is_} now"]


def find(plan: "Plan", checksums: bool = False) -> Start:
    """Where the planned run starts; InputError if it is to go on with a run that differs from it."""
    path = wanted(plan.asked)
    if not path or (plan.asked.get("overwrite") and not _begun(plan.output)):
        return Start()
    earlier = record.read(plan.output)
    found, lines = manifest.newest(plan.output, (earlier or {}).get("run_id"), checksums)
    if path != AUTO:
        found, lines = _asked_for(path, found, checksums), []
    if found is None:
        return Start(None, earlier, lines)
    was, now = found.facts["asked"], identity(plan)
    wrong = differences(was, now)
    if wrong and not universal.bridges(was, now, set(wrong)):
        raise _refusal(found, list(wrong.values()))
    conversion = ""
    if wrong:
        universal.check_room(found)
        conversion = universal.describe(was, now)
    # The record that was saved with the weights, with a history that may have gone on since.
    saved = record.read(found.path) or {}
    return Start(found, saved | {"history": (earlier or saved).get("history", [])}, lines, conversion)


def newest(output: Path, asked: Asked) -> manifest.Checkpoint | None:
    """The checkpoint that will be gone on from, judged by names and sizes; None for a new run."""
    path = wanted(asked)
    if not path or (asked.get("overwrite") and not _begun(output)):
        return None
    found, _ = manifest.newest(output, (record.read(output) or {}).get("run_id"), checksums=False)
    return found if path == AUTO else _asked_for(path, found, checksums=False)


def rows(plan: "Plan") -> list[tuple[str, str]]:
    """(what, value) lines: from which checkpoint the planned run would go on, what is converted for it, and what that
    takes, by the rate of the last save."""
    start = find(plan)
    told = [("passed over", line) for line in start.lines]
    if not start.checkpoint:
        return [*told, ("goes on", f"from nowhere: there is no complete checkpoint in {plan.output}")]
    steps, here = plan.asked.get("max_steps"), start.checkpoint
    last = f" of {steps}" if steps > 0 else ""
    told += [("goes on", f"after step {start.step}{last}, from {here.path} ({here.bytes / memory.GIB:.3f} GiB)")]
    told += [("note", notice) for notice in plan.notices]
    told += [("goes over", start.conversion or "nothing: ranks, ZeRO stage and offload are as they were")]
    seconds = [
        event["seconds"] for event in start.earlier["history"] if event["event"] == "saved" and "seconds" in event
    ]
    moved, need = here.bytes, universal.size(here) if start.conversion else 0
    if need:
        free = memory.free_disk(plan.output)
        moved += need
        told += [("disk", f"{need / memory.GIB:.3f} GiB more in {plan.output} for the time of the start; "
                          f"{free / memory.GIB:.1f} are free")]  # fmt: skip
    if seconds:
        rate = here.bytes / seconds[-1]
        told += [("time", f"about {moved / rate:.0f} s to read and convert it, at the {rate / memory.GIB:.2f} GiB/s of "
                          "the last save; then what a first start takes")]  # fmt: skip
    return told


def _begun(output: Path) -> bool:
    """Whether OUTPUT's record is of the run that this launcher started, and not of the one that is overwritten."""
    file = output / record.FILE
    return file.exists() and file.stat().st_mtime >= topology.launched_at(began=0)


def _asked_for(path: str, newest: manifest.Checkpoint | None, checksums: bool) -> manifest.Checkpoint:
    folder = Path(path).expanduser().absolute()
    try:
        found = manifest.read(folder, checksums)
    except manifest.Damaged as why:
        raise InputError(
            f"--resume {path} cannot be gone on from: {why}", "--resume auto takes the newest good one"
        ) from why
    if newest and newest.step > found.step:
        raise InputError(
            f"--resume {path}: {newest.path.name} is newer, and would be mistaken for what comes now",
            f"--resume auto, or move the checkpoints after step {found.step} elsewhere",
        )
    return found


def _refusal(found: manifest.Checkpoint, wrong: list[str]) -> InputError:
    was = found.facts["asked"]
    fix = "start it as it was started, or a new run from its weights in another OUTPUT with MODEL=" + str(found.path)
    if any(line.startswith(("world_size", "zero_stage", "offload")) for line in wrong):
        fix = (
            f"NPROC={was['world_size']} and a recipe of ZeRO stage {was['zero_stage']}, optimizer offload "
            f"{was['offload_optimizer']}, parameter offload {was['offload_param']}: its optimizer is divided like that"
        )
    return InputError(f"{found.path} was made by another run than this one:\n  " + "\n  ".join(wrong), fix)


def agree(plan: "Plan") -> Start:
    """Where the run starts, the same on all ranks: rank 0 looks, with checksums, and tells the others. Collective."""
    import torch

    found: list[Start | InputError | None] = [None]
    if os.environ["RANK"] == "0":
        try:
            found = [find(plan, checksums=True)]
            universal.remove(plan.output)
            if found[0].conversion:
                found[0].converted = universal.convert(found[0].checkpoint, plan)
        except InputError as error:
            found = [error]
    if plan.world.size > 1 and wanted(plan.asked):
        torch.distributed.broadcast_object_list(found, group=topology.cpu_group())
    if isinstance(found[0], InputError):
        raise InputError(found[0].message, found[0].fix)
    return found[0] or Start()
