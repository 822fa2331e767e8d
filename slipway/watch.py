"""torchrun's agent, as one that lets ranks save before they end, and finds those that are dead or stand still.

    code = watch.run(command, output, watch.Limits(stop_s=300, silence_s=120, restarts=0, sigusr1=False))

A first signal is handed to the ranks, which save (slipway.stopping); a second one, or too long a wait, ends them.
When a rank fails, the others are ended at once: they would only wait for it, and their errors would hide its own.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous

from slipway import attached, record
from slipway.errors import EXIT_BAD_INPUT, EXIT_GO_ON

DEATHS = {  # what a rank that dies so has most often met
    signal.SIGKILL: "it was killed, most often because host memory ran out (`dmesg | grep -i oom` tells): "
    "fewer ranks, a smaller --max_length, RECIPE=lora, or no offload to the CPU",
    signal.SIGBUS: "most often /dev/shm is too small: start the container with --shm-size 16g",
    signal.SIGILL: "a compiled op was built for another CPU: remove ~/.cache/torch_extensions",
    signal.SIGSEGV: "a compiled op or driver crashed: the lines above name it",
}
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SAME_SIGNAL_S = 1.0  # `make` hands on what its whole process group got: twice at once is once
_ENDED_BY_SIGNAL = {*(128 + number for number in STOPS), *(-number for number in STOPS)}
# Seconds that the other ranks have to end by themselves when one ended with this code; with others they have none.
_PATIENCE = {EXIT_BAD_INPUT: 5.0, EXIT_GO_ON: 30.0} | dict.fromkeys(_ENDED_BY_SIGNAL, 5.0)


@dataclass(frozen=True)
class Limits:
    """stop_s: from a signal to the end of all ranks, at most. silence_s: without a sign of life, 0 for no limit."""

    stop_s: float
    silence_s: float
    restarts: int
    sigusr1: bool


class Agent(LocalElasticAgent):
    """The agent of one machine. What it found: `stopped_by` (a signal), `first` ((rank, exit code)), `said` (why)."""

    def __init__(self, spec: WorkerSpec, limits: Limits, beats: Path, **kwargs: Any):
        super().__init__(spec, **kwargs)
        self.limits, self.beats = limits, beats
        self.stopped_by: signal.Signals | None = None
        self.first: tuple[int, int] | None = None
        self.said = ""
        self._first_signal = self._deadline = self._killing_at = float("inf")
        self._silent: dict[int, tuple[int, float]] = {}  # of each rank: its last beat, and the seconds since
        self._looked = time.monotonic()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.first, self.said, self._killing_at, self._silent = None, "", float("inf"), {}
        shutil.rmtree(self.beats, ignore_errors=True)
        self.beats.mkdir()
        pids = super()._start_workers(worker_group)  # which installs handlers that end the ranks after 30 s
        for number in STOPS[:2] + ((signal.SIGUSR1,) if self.limits.sigusr1 else ()):
            signal.signal(number, self._on_signal)
        return pids

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.stopped_by and now - self._first_signal < _SAME_SIGNAL_S:
            return
        again, self.stopped_by = self.stopped_by is not None, signal.Signals(number)
        if again:
            self._kill()
            raise SignalException(f"a second {self.stopped_by.name}", self.stopped_by)
        self._first_signal, self._deadline = now, now + self.limits.stop_s
        self._remaining_restarts = 0
        for process in self._running().values():
            process.send_signal(number)

    def _processes(self) -> dict[int, Any]:
        return {rank: handler.proc for rank, handler in self._pcontext.subprocess_handlers.items()}

    def _running(self) -> dict[int, Any]:
        return {rank: process for rank, process in self._processes().items() if process.poll() is None}

    def _kill(self) -> None:
        for process in self._running().values():
            process.kill()
        for process in self._processes().values():
            process.wait()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        now = time.monotonic()
        running = self._running()
        failed = [(rank, process.returncode) for rank, process in self._processes().items() if process.poll()]
        if failed and not self.first:
            # Of two that ended since the last look, one that a signal ended is the cause: the other lost its peer.
            self.first = min(failed, key=lambda found: found[1] >= 0)
            spoken = self.first == (0, EXIT_BAD_INPUT)  # the others would say nothing more
            self._killing_at = now + (0.0 if spoken else _PATIENCE.get(self.first[1], 0.0))
        if self._find_silent(running, now):
            self._killing_at = now
        if now > self._deadline:
            self.said = (
                f"the ranks had not saved {self.limits.stop_s:.0f} s after {self.stopped_by.name} (--stop_seconds)"
            )
            self._killing_at = now
        if now >= self._killing_at:
            self._kill()
        elif self.first and running:
            return RunResult(state=WorkerState.HEALTHY)  # the others are about to end
        result = super()._monitor_workers(worker_group)
        if result.failures and not self.first:  # one that ended after the look above
            ended = [(rank, failure.exitcode) for rank, failure in result.failures.items()]
            self.first = min(ended, key=lambda found: found[1] >= 0)
        if self.first and self.first[1] in _PATIENCE:
            self._remaining_restarts = 0
        return result

    def _find_silent(self, running: dict[int, Any], now: float) -> bool:
        """Whether a rank that had given signs of life has given none for too long. Sets `said` and `first`.

        Only time in which this process itself ran counts, or a paused container would end at its first second.
        """
        passed, self._looked = min(now - self._looked, 1.0), now
        for rank in running if self.limits.silence_s else ():
            file = self.beats / str(rank)
            if not file.exists():
                continue
            beat = file.stat().st_mtime_ns
            last, silent = self._silent.get(rank, (0, 0.0))
            self._silent[rank] = (beat, 0.0 if beat != last else silent + passed)
            if self._silent[rank][1] > self.limits.silence_s:
                self.said = f"rank {rank} gave no sign of life for {self.limits.silence_s:.0f} s (--heartbeat_seconds)"
                self.first = self.first or (rank, -signal.SIGKILL)
                return True
        return False


def run(command: list[str], output: Path, limits: Limits, last_good: Callable[[], int | None]) -> int:
    """Run torchrun's `command` on this machine; the launcher's exit code, with one message where it is not 0.

    last_good: tells the step of the newest complete checkpoint in `output`, once the ranks have ended.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # _explain says it, once
    with tempfile.TemporaryDirectory(prefix="slipway-") as folder:
        os.environ[attached.BEATS] = str(Path(folder) / "beats")
        agent = _agent(command, limits, Path(os.environ[attached.BEATS]))
        try:
            failed = agent.run().is_failed()
        except SignalException as stop:  # a second signal, or one before the ranks were started
            agent.stopped_by, failed = stop.sigval, True
        finally:
            agent._worker_group.spec.rdzv_handler.shutdown()
    return _explain(agent, output, last_good) if failed else 0


def _agent(command: list[str], limits: Limits, beats: Path) -> Agent:
    """As torch.distributed.launcher.api.launch_agent makes one for --standalone."""
    if limits.restarts:
        # The agent's store outlives a restart: ranks would read in it where those before them listened (torch 2.8).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    config, entrypoint, words = torchrun.config_from_args(torchrun.parse_args(command))
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(words),
        rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
        max_restarts=limits.restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
    )
    return Agent(spec, limits, beats, logs_specs=config.logs_specs, start_method=config.start_method)


def _explain(agent: Agent, output: Path, last_good: Callable[[], int | None]) -> int:
    """One message about how the run ended, in run.json too where no rank could write it; the exit code."""
    rank, code = agent.first or (None, 0)
    stopped_by = agent.stopped_by or (signal.Signals(abs(code) % 128) if code in _ENDED_BY_SIGNAL else None)
    if code == EXIT_BAD_INPUT and not stopped_by:
        return EXIT_BAD_INPUT
    step = last_good()
    go_on = "there is no checkpoint to go on from" if step is None else f"--resume auto goes on after step {step}"
    if stopped_by or code == EXIT_GO_ON:
        cause = stopped_by.name if stopped_by else (record.last_stop(output) or {}).get("cause", "a signal")
        record.note_stop(output, f"{cause}; {agent.said}" if agent.said else cause)
        print(f"stopped by {cause}; all ranks have ended; {agent.said or go_on}", file=sys.stderr)
        return 128 + (stopped_by or signal.SIGTERM) if step is None else EXIT_GO_ON
    if agent.said:
        cause, fix = agent.said, "look at that machine or card; a stopped process shows T in `ps`"
    elif code < 0:
        died = signal.Signals(-code)
        cause, fix = f"rank {rank} was ended by {died.name}", DEATHS.get(died, "see the lines above")
    else:
        cause, fix = f"rank {rank} failed with exit code {code}; its traceback is above", ""
    record.note_stop(output, cause)
    print(f"error: {cause}\n  fix: {fix}; {go_on}" if fix else f"error: {cause}; {go_on}", file=sys.stderr)
    return 1
