"""run.json: what was asked, what was got, what it cost; and the comparison of the first two before step 1."""

import json
import os
import platform
import time
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

from slipway.errors import InputError

FILE = "run.json"
KEPT = ("run_id", "started", "history", "samples")  # of a resumed run's earlier record
PACKAGES = (
    "torch",
    "accelerate",
    "deepspeed",
    "transformers",
    "datasets",
    "trl",
    "peft",
    "xformers",
    "safetensors",
)


class Record:
    """The record of one run, kept by rank 0 in OUTPUT/run.json and rewritten whole at each change.

    `earlier`: the record that a resumed run goes on with. "history" tells each start, save and stop: event, time, step,
    and what else is known.
    """

    def __init__(self, folder: Path, asked: dict[str, Any], earlier: dict[str, Any] | None = None):
        self.path = folder / FILE
        self.content: dict[str, Any] = {
            "status": "started",
            "run_id": uuid.uuid4().hex,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "asked": asked,
            "got": {},
            "cost": {},
            "versions": {name: metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()},
            "history": [],
        }
        self.content |= {key: earlier[key] for key in KEPT if key in (earlier or {})}

    def start(self, at: Any) -> None:
        """A start goes into the history; before it, that the run had ended untold, where it had."""
        history = self.content["history"]
        if history and history[-1]["event"] != "stop":
            self.event("stop", None, cause="not recorded: it was killed, or the machine went down")
        resumed = {"checkpoint": at.path, "passed_over": at.lines} if history else {}
        self.event("start", at.step, **resumed, **({"conversion": at.conversion} if at.conversion else {}))

    def event(self, event: str, step: int | None, **more: Any) -> None:
        """Add a line to the run's history, and write the file."""
        self.content["history"].append(_event(event, step, **more))
        self.add()

    def add(self, **parts: Any) -> None:
        """Merge `parts` in (dicts one level deep) and write the file; on ranks other than 0 nothing is written."""
        for key, value in parts.items():
            if isinstance(value, dict):
                self.content.setdefault(key, {}).update(value)
            else:
                self.content[key] = value
        if os.environ.get("RANK", "0") != "0":
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _write(self.path, self.content)


def _write(path: Path, content: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _event(event: str, step: int | None, **more: Any) -> dict[str, Any]:
    return {"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step, **more}


def last_stop(folder: Path) -> dict[str, Any] | None:
    """The stop that the record of a run ends with; None where it ends with something else."""
    last = ((read(folder) or {}).get("history") or [{}])[-1]
    return last if last.get("event") == "stop" else None


def note_stop(folder: Path, cause: str) -> None:
    """For the launcher: write down why a run stopped, where its ranks had no time to."""
    content = read(folder)
    if content and content.get("history") and content["status"] != "finished" and not last_stop(folder):
        history = [*content["history"], _event("stop", None, cause=cause)]
        _write(folder / FILE, content | {"status": "stopped", "history": history})


def read(folder: Path) -> dict[str, Any] | None:
    """The record in a run's folder; None where there is none that can be read."""
    try:
        return json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def got(trainer: Any) -> dict[str, Any]:
    """What this rank really runs, read back from the process group, the engine and the model, not from arguments."""
    import torch

    engine, model = trainer.model_wrapped, trainer.accelerator.unwrap_model(trainer.model)
    facts: dict[str, Any] = {
        "world_size": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        "engine": type(engine).__name__,
        "zero_stage": 0,
        "offload_optimizer": "none",
        "offload_param": "none",
        "attention": model.config._attn_implementation,
        "device": str(trainer.args.device.type),
    }
    if facts["engine"] == "DeepSpeedEngine":
        facts["zero_stage"] = engine.zero_optimization_stage()
        facts["offload_optimizer"] = _device(engine.zero_offload_optimizer())
        facts["offload_param"] = _device(engine.zero_offload_param())
        facts["dtype"] = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    else:
        facts["dtype"] = {"no": "fp32"}.get(trainer.accelerator.mixed_precision, trainer.accelerator.mixed_precision)
    facts["gradient_accumulation_steps"] = trainer.args.gradient_accumulation_steps
    sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in model.named_parameters()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    adapter = {name for name in sizes if "lora_" in name or "modules_to_save" in name}
    facts["parameters"] = sum(sizes.values())
    facts["trainable"] = sum(sizes[name] for name in trained)
    facts["trained"] = "adapter" if adapter and trained == adapter else "all" if trained == set(sizes) else "some"
    return facts


def compare(asked: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Compare on every rank what was asked with the facts of what was got; the facts if they are equal.

    Raises InputError on all ranks, with all differences of all ranks in one message, where they are not.
    """
    import torch

    rank = int(os.environ.get("RANK", "0"))
    wrong = [
        f"{key}: asked {value}, got {facts.get(key)} (rank {rank})"
        for key, value in asked.items()
        if facts.get(key) != value
    ]
    if torch.distributed.is_initialized():
        all_wrong: list[list[str]] = [[] for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(all_wrong, wrong)
        wrong = [line for lines in all_wrong for line in lines]
    if wrong:
        raise InputError(
            "this run is not what was asked; stopped before step 1:\n  " + "\n  ".join(wrong),
            "start it with make or torchrun, and compare what is asked with run.json",
        )
    return facts


def proof(trainer: Any, input_ids: list[int]) -> dict[str, Any]:
    """The trained model's five largest next-token logits after `input_ids`, so that anyone can compare what was saved.

    Collective: under ZeRO-3 every rank must take part in a forward.
    """
    import torch

    engine = trainer.model_wrapped
    engine.eval()
    with torch.no_grad():
        ids = torch.tensor([input_ids], device=trainer.args.device)
        logits = engine(input_ids=ids, use_cache=False).logits[0, -1].float()
    values, tokens = logits.topk(5)
    return {"input_ids": list(input_ids), "tokens": tokens.tolist(), "logits": values.tolist()}


def _device(offload: Any) -> str:
    device = getattr(offload, "device", None)
    return str(getattr(device, "value", device) or "none")
