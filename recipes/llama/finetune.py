"""Fine-tune a LLaMA-architecture model with TRL's SFTTrainer, under DDP or any ZeRO stage, whole or as an adapter.

    make finetune-llama RECIPE=zero3 MODEL=meta-llama/Llama-2-7b-hf DATA=my.jsonl
    torchrun --nproc_per_node 8 recipes/llama/finetune.py --config recipes/llama/zero3.yaml --dataset_name my.jsonl
    accelerate launch --use_deepspeed --deepspeed_config_file ds_configs/zero2.json recipes/llama/finetune.py \
        --model_name_or_path meta-llama/Llama-2-7b-hf --dataset_name my.jsonl --output_dir ./output
"""

import sys
import time

from slipway import attached, imports, report

attached.attach()
report.quiet()
imports.bitsandbytes()

from transformers import PrinterCallback  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402
from trl import SFTTrainer, get_peft_config, get_quantization_config  # noqa: E402
from trl.models.utils import unwrap_model_for_generation  # noqa: E402

from slipway import (  # noqa: E402
    arguments,
    attention,
    callbacks,
    cost,
    filling,
    finite,
    keeping,
    lm_head,
    models,
    preflight,
    record,
    resume,
    stopping,
    topology,
    universal,
)
from slipway.errors import refused_by_a_library, stop_on_bad_input  # noqa: E402
from slipway.plan import Plan  # noqa: E402


def main(argv: list[str]) -> None:
    began = time.time()
    disable_progress_bar()
    world = topology.current()
    topology.prepare_environment(world)
    plan = preflight.check(argv, world)
    report.show_plan(plan)

    topology.join(world, deepspeed=plan.ds_config is not None, timeout_s=plan.asked.get("ddp_timeout"))
    with refused_by_a_library():
        recipe_args, args, model_args = arguments.build(plan.for_trainer())
    plan.start = resume.agree(plan)
    loaded = universal.loading(args, plan.start.converted)
    args.eval_on_start &= not plan.start.step  # the first start has measured that
    run = record.Record(plan.output, plan.as_asked(), plan.start.earlier)
    run.start(plan.start)  # a run that ends badly leaves what was asked of it
    report.show_start(plan.start)

    attention.register(plan.attention.name)
    lm_head.score_fast_on_cpu()
    # After the arguments: under ZeRO-3 they tell from_pretrained to partition each layer as it is read.
    model = models.load(
        plan.model,
        plan.tokenizer,
        dtype=plan.load_dtype(),
        attn=plan.attention.name,
        quantization=get_quantization_config(model_args),
        trust_remote_code=args.trust_remote_code,
        zero3=plan.ds_facts["zero_stage"] == 3,
    )
    samples = run.content.get("samples") or [
        {"prompt": models.prompt_text(p), "reference": p["reference"]} for p in plan.prompts
    ]

    def answer(when: str) -> None:
        if samples:
            for sample, text in zip(samples, answers(trainer, plan, recipe_args.sample_tokens), strict=True):
                sample[when] = text
            run.add(samples=samples)

    compare = callbacks.Compare(plan.must_get(), run, before_training=lambda: answer("before"))
    watch = callbacks.Watch()
    stop = stopping.Stop(saves=args.save_strategy != "no", sigusr1=recipe_args.stop_on_sigusr1)
    limit, stop_on_full = plan.asked.get("save_total_limit"), recipe_args.on_full_disk == "stop"
    keep = keeping.Keep(run, plan.as_saved(), limit, plan.checkpoint_bytes(), stop_on_full)
    numbers = finite.Finite(run)
    with refused_by_a_library():
        trainer = SFTTrainer(
            model=model,
            args=args,
            train_dataset=plan.data.train,
            eval_dataset=plan.data.held_out if len(plan.data.held_out) else None,
            processing_class=plan.tokenizer,
            peft_config=get_peft_config(model_args),
            callbacks=[*loaded, watch, compare, numbers, stop, keep],
        )
    trainer.remove_callback(PrinterCallback)
    filling.fill(trainer)
    compare.trainer = trainer
    numbers.watch(trainer)

    try:
        trainer.train(resume_from_checkpoint=plan.start.read_from)
    except callbacks.AllStepsDone:
        pass  # what comes after the steps is still to be done
    finally:
        watch.close()
    stop.leave_if_agreed(run, trainer.state.global_step)
    if len(plan.data.held_out):
        trainer.evaluate()
        run.add(held_out=watch.held_out())
    answer("after")

    trainer.save_model()
    run.add(proof=record.proof(trainer, plan.data.train[0]["input_ids"][:32]))
    run.add(cost=cost.of_run(plan, trainer, watch, began), losses=watch.losses)
    if trainer.is_world_process_zero():
        models.check_saved(plan.output, trainer.accelerator.unwrap_model(trainer.model).config)
        if recipe_args.merge:
            models.merge(plan.output, plan.output / "merged")
        models.let_others_read(plan.output)
        title = f"{plan.model.name}, {plan.asked.recipe}"
        report.plot_losses(plan.output / "loss.png", watch.losses, watch.evaluations, title)
        report.write_card(plan.output / "README.md", run.content)
    run.add(status="finished", output=str(plan.output))
    run.event("finished", trainer.state.global_step)
    report.show_result(run.content, samples)
    trainer.end()


def answers(trainer: SFTTrainer, plan: Plan, length: int) -> list[str]:
    """Every rank's answers to the sample prompts (the same on all). Under ZeRO-3 the weights are gathered first if a
    rank has room for them; if not, the ranks go through each layer together until the longest answer ends."""
    gather = plan.room_to_gather()
    with unwrap_model_for_generation(
        trainer.model_wrapped, trainer.accelerator, gather_deepspeed3_params=gather
    ) as model:
        together = plan.ds_facts["zero_stage"] == 3 and not gather
        texts = models.answers(model, plan.tokenizer, plan.prompts, max_new_tokens=length, synced_gpus=together)
    if together:
        models.forget_order_of_layers(trainer.model_wrapped)
    return texts


if __name__ == "__main__":
    with stop_on_bad_input():
        main(sys.argv[1:])
