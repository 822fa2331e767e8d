"""Train BERT to tell classes apart: a plain Accelerate loop, for one process, many GPUs, or many machines.

make train-bert                                  # the dummy job: random embeddings, two classes, 4 layers
make train-bert MODEL=minilm DATA=docstrings     # a real model, real texts: which package is a docstring from?
accelerate launch recipes/bert/train.py --model google-bert/bert-base-uncased --data reviews.csv
"""

import math
import sys

from slipway import attached, report

attached.attach()
report.quiet()

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DataLoaderConfiguration, find_executable_batch_size, set_seed  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import get_linear_schedule_with_warmup  # noqa: E402

from slipway import bert_preflight as preflight  # noqa: E402
from slipway import bert_run, checkpoints, labelled, record, topology  # noqa: E402
from slipway.errors import stop_on_bad_input  # noqa: E402


def main(argv: list[str]) -> None:
    world = topology.current(deepspeed=False)
    topology.prepare_environment(world)
    plan = preflight.check(argv, world)  # files, columns, classes, model, precision, room: all that can be known now
    args = plan.args
    topology.join(world, deepspeed=False, timeout_s=1800)
    accelerator = Accelerator(
        cpu=not world.on_gpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=plan.accumulation,
        # The scheduler steps below, once an optimizer step; accelerate would step it once for each rank.
        step_scheduler_with_optimizer=False,
        # The order of rows follows from seed and epoch alone: alike on all ranks, and after a resume.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
        log_with=None if args.report_to == "none" else args.report_to,
        project_dir=plan.output / "tensorboard",
    )
    run = record.Record(plan.output, plan.as_asked())
    run.add()  # a run that ends badly leaves what was asked of it
    accelerator.init_trackers("slipway-bert", plan.hyperparameters(), {"wandb": {"dir": str(plan.output)}})

    @find_executable_batch_size(starting_batch_size=plan.batch, reduce_batch_size_fn=plan.halve)
    def model_that_fits(batch_size: int) -> torch.nn.Module:
        """The model, tried with `batch_size` rows at once: with half of them, if memory is short on any rank."""
        set_seed(args.seed)
        model = plan.build_model().to(accelerator.device)
        bert_run.rehearse(accelerator, model, plan)
        return model

    model = model_that_fits()
    accelerator.gradient_accumulation_steps = plan.accumulation
    set_seed(args.seed, device_specific=True)  # each rank drops out others

    usual = {"collate_fn": plan.collate, "num_workers": args.dataloader_num_workers, "pin_memory": world.on_gpu}
    # A generator of its own: starting an epoch would take a number from dropout's, and a resume start one more.
    loader = DataLoader(plan.train_rows, plan.batch, shuffle=True, generator=torch.Generator(), **usual)
    held_out = DataLoader(plan.held_out_rows, args.per_device_eval_batch_size, generator=torch.Generator(), **usual)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    scheduler = get_linear_schedule_with_warmup(optimizer, plan.warmup, plan.steps)
    if args.torch_compile_backend:
        model.compile(backend=args.torch_compile_backend)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loader, held_out = accelerator.prepare(loader, held_out)
    progress = bert_run.Progress()
    accelerator.register_for_checkpointing(progress)
    run.add(got=record.compare(plan.must_get(), bert_run.got(accelerator, model, plan)))
    bert_run.show_start(plan, run.content["got"])
    if plan.resume:
        accelerator.load_state(str(plan.resume.path))

    window, clock = plan.windows(accelerator.process_index), bert_run.Clock()  # which rows count, in which step
    while progress.epoch < args.num_train_epochs and progress.step < plan.steps:
        model.train()
        loader.set_epoch(progress.epoch)
        clock.start()
        done = progress.step_in_epoch * plan.accumulation  # micro-batches before a resume
        batches = accelerator.skip_first_batches(loader, done) if done else loader
        step_loss = torch.zeros((), device=accelerator.device)
        for micro, batch in enumerate(batches, start=done):
            with accelerator.accumulate(model):
                labels = batch.pop("labels")
                losses = cross_entropy(model(**batch).logits.float(), labels, reduction="none")
                share = window.share(losses, micro)  # of the mean over all rows of this optimizer step
                # backward divides by the accumulation steps, and DDP by the ranks: the share is divided already.
                accelerator.backward(share * plan.accumulation * accelerator.num_processes)
                step_loss += share.detach()
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                    scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue

            progress.made_step(norm, accelerator.optimizer_step_was_skipped)  # stops on all ranks at a NaN
            clock.stop()
            if progress.step % args.logging_steps == 0 or progress.step in (1, plan.steps):
                logs = {"loss": accelerator.reduce(step_loss, "sum").item(), "grad_norm": float(norm)}
                logs["learning_rate"] = scheduler.get_last_lr()[0]
                progress.losses.append({"step": progress.step, **logs})
                accelerator.log(logs, step=progress.step)
                if accelerator.is_local_main_process:
                    print(f"step {progress.step}/{plan.steps}  loss {logs['loss']:.4f}", flush=True)
            if args.save_steps and progress.step % args.save_steps == 0:
                keep, size = args.save_total_limit, plan.size.checkpoint
                checkpoints.save(accelerator, plan.output, progress.step, plan.decides(), keep, size)
            if progress.step == plan.steps:
                break
            step_loss.zero_()
            clock.start()

        found = evaluate(accelerator, model, held_out)
        accelerator.log({f"held_out_{key}": value for key, value in found.items()}, step=progress.step)
        if progress.evaluated(found) >= (args.patience or math.inf):
            accelerator.set_trigger()  # one rank is enough,
        progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
        if accelerator.check_trigger():  # and all ranks stop
            break

    accelerator.unwrap_model(model).save_pretrained(plan.output, is_main_process=accelerator.is_main_process)
    bert_run.finish(accelerator, plan, run, progress, clock)
    accelerator.end_training()


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> dict[str, float]:
    """Held-out loss, accuracy and macro-F1 over all ranks, each row counted once; the same on every rank."""
    model.eval()
    found = []
    for batch in loader:
        labels = batch.pop("labels")
        with torch.no_grad():
            logits = model(**batch).logits.float()
        losses = cross_entropy(logits, labels, reduction="none")
        # The last batch was filled up so that all ranks have as many rows: gather_for_metrics takes those out again.
        found.append(accelerator.gather_for_metrics((losses, logits.argmax(dim=-1), labels)))
    losses, predicted, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    return {"loss": losses.mean().item(), **labelled.scores(predicted.tolist(), labels.tolist())}


if __name__ == "__main__":
    with stop_on_bad_input():
        main(sys.argv[1:])
