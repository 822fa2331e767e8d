"""A run that passed all checks: what the recipe builds from, and what the run is held to."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway import arguments, manifest, memory, ops, record, resume
from slipway.arguments import Asked
from slipway.topology import World

if TYPE_CHECKING:
    import torch

    from slipway import attention, encode, models


@dataclass
class Plan:
    """Filled by preflight.check."""

    asked: Asked
    world: World
    ds_config: dict[str, Any] | None
    ds_path: str | None
    ds_facts: dict[str, Any]
    ds_resolved: dict[str, Any] | None
    ds_origins: dict[str, str]
    precision: str
    attention: "attention.Choice"
    model: "models.Model"
    parameters: int
    tokenizer: Any
    data: "encode.Prepared"
    data_lines: list[str]
    output: Path
    notices: list[str]
    start: resume.Start = field(default_factory=resume.Start)

    @property
    def card(self) -> str:
        """The GPU's name, or "CPU"."""
        import torch

        return torch.cuda.get_device_name(0) if self.world.on_gpu else "CPU"

    @property
    def prompts(self) -> list[dict[str, Any]]:
        """The held-out prompts to answer before and after."""
        return self.data.prompts[: self.asked.get("samples")]

    def before_ranks(self) -> None:
        """What the launcher does once, before ranks would each do it: DeepSpeed's ops for a CPU are compiled."""
        if self.ds_config and not self.world.on_gpu:
            devices = self.ds_facts["offload_optimizer"], self.ds_facts["offload_param"]
            ops.prepare(offload="cpu" in devices, nvme="nvme" in devices)

    def must_get(self) -> dict[str, Any]:
        """What record.compare holds the run to."""
        facts = {
            "world_size": self.world.size,
            "device": self.world.accelerator,
            "dtype": self.precision,
            "attention": self.attention.name,
            "trained": "adapter" if self.asked.get("use_peft") else "all",
            **self.ds_facts,
        }
        if self.ds_config:
            facts["engine"] = "DeepSpeedEngine"
        elif self.world.size > 1:
            facts["engine"] = "DistributedDataParallel"
        return facts

    def load_dtype(self) -> "torch.dtype":
        """DeepSpeed keeps its own fp32 copy of half-precision weights; autocast wants them in fp32."""
        import torch

        if not self.ds_config:
            return torch.float32
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.precision]

    def room_to_gather(self) -> bool:
        """Whether a rank has room for all weights at once, on top of what it holds (ZeRO-3 gathers to generate)."""
        import psutil
        import torch

        free = torch.cuda.mem_get_info()[0] if self.world.on_gpu else psutil.virtual_memory().available
        share = 1 if self.world.on_gpu else self.world.local_size
        return self.parameters * (4 if self.precision == "fp32" else 2) * share < free / 2

    def for_trainer(self) -> Asked:
        """The asked values with those that follow from the plan: the Trainer's side of what slipway does."""
        asked = Asked(dict(self.asked.values), dict(self.asked.origins), self.asked.defaults, self.asked.config)
        set_by_us = {
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "eval_on_start": len(self.data.held_out) > 0,
            "save_total_limit": None,  # the Trainer removes before it is known that the new one is whole: see keeping
            "resume_from_checkpoint": None,  # start says
            "logging_nan_inf_filter": False,  # which would log a mean in the place of a NaN: see finite
            "disable_tqdm": True,
            "use_cache": True,  # what is saved with the model; TRL turns it off for each training forward
            "include_num_input_tokens_seen": "all",
            "deepspeed": self.ds_config,
        }
        for key, value in (("report_to", ["tensorboard"]), ("ddp_find_unused_parameters", False)):
            if key not in asked.values:
                set_by_us[key] = value
        if not self.world.on_gpu and (self.ds_config or self.world.size > 1):
            set_by_us["accelerator_config"] = {"use_configured_state": True}
        if not self.world.on_gpu and not self.ds_config:
            set_by_us["use_cpu"] = True
        for key, value in set_by_us.items():
            asked.set(key, value, "slipway")
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(self.output / "tensorboard"))
        return asked

    def limits(self) -> dict[str, Any]:
        """What the launcher watches the ranks by: slipway.watch.Limits, without the restarts."""
        return {
            "stop_s": self.asked.get("stop_seconds"),
            "silence_s": self.asked.get("heartbeat_seconds"),
            "sigusr1": self.asked.get("stop_on_sigusr1"),
        }

    def last_good(self) -> int | None:
        """The step of the newest complete checkpoint in OUTPUT, judged by sizes; None if there is none."""
        run_id = (record.read(self.output) or {}).get("run_id")
        found, _ = manifest.newest(self.output, run_id, checksums=False)
        return found.step if found else None

    def resume_rows(self) -> list[tuple[str, str]]:
        """(what, value) lines on the resume that was asked for, judged by names and sizes."""
        return resume.rows(self)

    def checkpoint_bytes(self) -> int:
        """What one checkpoint takes on disk: as the last one did, else by estimate."""
        if self.start.checkpoint:
            return self.start.checkpoint.bytes
        return memory.Size.of(self.parameters, self.precision, bool(self.asked.get("use_peft"))).checkpoint

    def as_saved(self) -> dict[str, Any]:
        """What a checkpoint's manifest tells of the run, besides its id."""
        facts = {"world_size": self.world.size, "zero_stage": self.ds_facts["zero_stage"]}
        return facts | {"asked": resume.identity(self)}

    def as_asked(self) -> dict[str, Any]:
        """The "asked" part of run.json."""
        return {
            "recipe": self.asked.recipe,
            "model": {"name": self.model.name, "parameters": self.parameters},
            "data": self.data.facts,
            "must_get": self.must_get(),
            "arguments": arguments.as_plain(self.asked.values),
            "origins": self.asked.origins,
            "ds_config": self.ds_resolved,
            "ds_config_file": self.ds_path,
            "ds_config_origins": self.ds_origins,
            "seeds": {"seed": self.asked.get("seed"), "data_seed": self.asked.get("data_seed")},
            "attention_reason": self.attention.reason,
        }
