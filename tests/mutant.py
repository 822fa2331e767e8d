"""Runs the LLaMA recipe with one thing broken behind its back, named in $MUTANT; started by torchrun in test_guards."""

import os
import runpy
import signal
import sys
from pathlib import Path

import trl
from harness import FINETUNE

from slipway import finite, manifest, record
from slipway.plan import Plan

asked_for = Plan.for_trainer


def dropped(plan):
    asked = asked_for(plan)
    asked.set("deepspeed", None, "mutant")
    return asked


def other_stage(plan):
    plan.ds_config["zero_optimization"]["stage"] = int(os.environ["STAGE"])
    return asked_for(plan)


def adapter_forgotten(plan):
    asked = asked_for(plan)
    asked.set("use_peft", False, "mutant")
    return asked


def saved_without_gathering(trainer):
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(trainer.args.output_dir)


save_optimizer = trl.SFTTrainer._save_optimizer_and_scheduler


def manifest_first(trainer, folder):
    """Seals what there is before the optimizer is saved, and dies there: what an order of steps must not allow."""
    if trainer.is_world_process_zero():
        output = Path(folder).parent
        names = manifest.listing(Path(folder))
        run_id = record.read(output)["run_id"]
        manifest.seal(Path(folder), {"run_id": run_id, "asked": {}}, manifest.digest(Path(folder), names))
        os.kill(os.getpid(), signal.SIGKILL)
    save_optimizer(trainer, folder)


sees_the_step = finite.Finite.on_step_begin


def spoiled(callback, args, state, control, **kwargs):
    """What a bad row or a bit that flipped may do to the weights, in the middle of a run."""
    if state.global_step == 8:
        for parameter in callback.trainer.model.parameters():
            parameter.data.mul_(30)
    sees_the_step(callback, args, state, control, **kwargs)


match os.environ["MUTANT"]:
    case "ds_config dropped":
        Plan.for_trainer = dropped
    case "other stage":
        Plan.for_trainer = other_stage
    case "adapter forgotten":
        Plan.for_trainer = adapter_forgotten
    case "saved without gathering":
        trl.SFTTrainer.save_model = saved_without_gathering
    case "no room to gather":
        Plan.room_to_gather = lambda _: False
    case "manifest first":
        trl.SFTTrainer._save_optimizer_and_scheduler = manifest_first
    case "weights spoiled":
        finite.Finite.on_step_begin = spoiled
    case "nothing":
        pass
    case other:
        raise SystemExit(f"no mutant {other}")

sys.argv[0] = str(FINETUNE)
runpy.run_path(str(FINETUNE), run_name="__main__")
