"""What the Trainer is told to do besides training: compare, measure, show."""

import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from slipway import record


class Compare(TrainerCallback):
    """Before step 1: what was asked against what was got, then `before_training`, with the engine built and joined."""

    def __init__(self, must_get: dict[str, Any], run: record.Record, before_training: Callable[[], None]):
        self.must_get, self.run, self.before_training = must_get, run, before_training
        self.trainer: Any = None  # set by the recipe: a Trainer needs its callbacks first

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.add(got=record.compare(self.must_get, record.got(self.trainer)))
        self.before_training()


class Watch(TrainerCallback):
    """Times the steps, keeps the losses, and shows both: a bar on a terminal, a line per log elsewhere."""

    def __init__(self) -> None:
        self.losses: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        self.step_seconds: list[float] = []
        self.first_step_at: float | None = None
        self.tokens = self.useful_tokens = 0
        self._started = 0.0
        self._bar: Progress | None = None
        self._task: Any = None

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
        self.tokens = state.num_input_tokens_seen
        if state.global_step in (1, state.max_steps):  # a short run, and a slow one, are seen to train
            control.should_log = True
        if self._bar:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        self.useful_tokens = int(logs.get("num_tokens", self.useful_tokens))
        kept = ("loss", "learning_rate", "grad_norm", "num_tokens", "mean_token_accuracy")
        self.losses.append({"step": state.global_step} | {key: float(logs[key]) for key in kept if key in logs})
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

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **kwargs: Any) -> None:
        self.evaluations.append({"step": state.global_step, "loss": metrics["eval_loss"]})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back, also after an error."""
        if self._bar:
            self._bar.stop()
            self._bar = None
