"""What the Trainer is told to do besides training: compare, measure, show."""

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from slipway import record


class AllStepsDone(Exception):
    """A run was stopped after its last step: the Trainer, which would take one step more, is left before that."""


class Compare(TrainerCallback):
    """Before the first step: what was asked against what was got, with the engine built and joined; then, unless the
    run is resumed, `before_training`."""

    def __init__(self, must_get: dict[str, Any], run: record.Record, before_training: Callable[[], None]):
        self.must_get, self.run, self.before_training = must_get, run, before_training
        self.trainer: Any = None  # set by the recipe: a Trainer needs its callbacks first

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.add(got=record.compare(self.must_get, record.got(self.trainer)))
        if not state.global_step:
            self.before_training()
            return
        # TRL counts from 0 in each process; its log goes on where the checkpoint's ended.
        counted = [row["num_tokens"] for row in state.log_history if "num_tokens" in row]
        self.trainer._total_train_tokens = int(counted[-1]) if counted else 0
        if state.global_step >= state.max_steps:
            self.trainer.is_in_train = False
            raise AllStepsDone


class Watch(TrainerCallback):
    """Times the steps, keeps the losses, and shows both: a bar on a terminal, a line per log elsewhere."""

    def __init__(self) -> None:
        self.losses: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        self.step_seconds: list[float] = []
        self.first_step_at: float | None = None
        self.tokens = self.useful_tokens = 0  # of this start, as step_seconds are
        self._tokens_before = self._useful_before = 0
        self._started = 0.0
        self._bar: Progress | None = None
        self._task: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A resumed run shows its whole curve."""
        for row in state.log_history:
            if "loss" in row:
                self._keep(row["step"], row)
            elif "eval_loss" in row:
                self.evaluations.append({"step": row["step"], "loss": row["eval_loss"]})
        self._tokens_before = state.num_input_tokens_seen
        self._useful_before = int(self.losses[-1].get("num_tokens", 0)) if self.losses else 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is None and state.is_world_process_zero and sys.stderr.isatty():
            text = TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s")
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=state.max_steps, loss=float("nan"), rate=0.0)
            self._bar.start()
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_seconds.append(time.perf_counter() - self._started)
        self.first_step_at = self.first_step_at or time.time()
        self.tokens = state.num_input_tokens_seen - self._tokens_before
        if state.global_step in (1, state.max_steps):  # a short run, and a slow one, are seen to train
            control.should_log = True
        if self._bar:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        self._keep(state.global_step, logs)
        self.useful_tokens = int(self.losses[-1].get("num_tokens", 0)) - self._useful_before
        if not state.is_world_process_zero:
            return
        rate = self.useful_tokens / sum(self.step_seconds)
        if self._bar:
            self._bar.update(self._task, loss=logs["loss"], rate=rate)
            return
        left = (state.max_steps - state.global_step) * sum(self.step_seconds) / len(self.step_seconds)
        print(
            f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.3f}  lr {logs['learning_rate']:.1e}  "
            f"{rate:,.0f} tokens/s  {int(left) // 60}:{int(left) % 60:02} left",
            flush=True,
        )

    def _keep(self, step: int, logs: dict[str, Any]) -> None:
        kept = ("loss", "learning_rate", "grad_norm", "num_tokens", "mean_token_accuracy")
        self.losses.append({"step": step} | {key: float(logs[key]) for key in kept if key in logs})

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **kwargs: Any) -> None:
        self.evaluations.append({"step": state.global_step, "loss": metrics["eval_loss"]})

    def held_out(self) -> dict[str, dict[str, float]]:
        """Held-out loss and perplexity, before the run's first step and after its last."""
        ends = {"before": self.evaluations[0]["loss"], "after": self.evaluations[-1]["loss"]}
        return {name: {"loss": loss, "perplexity": math.exp(min(loss, 700))} for name, loss in ends.items()}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back, also after an error."""
        if self._bar:
            self._bar.stop()
            self._bar = None
