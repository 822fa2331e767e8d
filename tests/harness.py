"""Start the real commands, as a user does, and read what they left."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from forking import Forked, run_forked

from slipway import manifest, topology
from slipway.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
FINETUNE = ROOT / "recipes" / "llama" / "finetune.py"
TRAIN = ROOT / "recipes" / "bert" / "train.py"
RECIPES = sorted(path.stem for path in FINETUNE.parent.glob("*.yaml"))
NOT_HERE = {"qlora": "4-bit weights need a GPU", "zero3_nvme": "needs libaio and an NVMe disk"}
SECRET = "hf_" + "Secret" * 5


def run(*command: object, timeout: int = 280, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    """Run a command to its end with output as text; kills its whole session at the timeout."""
    words = [str(word) for word in command]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | env
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        raise AssertionError(f"not done after {timeout} s: {words}\n{out[-3000:]}\n{err[-3000:]}") from None
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def start(*words: object, forked: bool = False, **kwargs) -> subprocess.CompletedProcess:
    """A script and its arguments, to its end: by a python of its own, or as a fork of one (ForkServer)."""
    return run_forked(*words, **kwargs) if forked else run(sys.executable, *words, **kwargs)


def launch(
    *arguments: object, recipe: str = "zero3", nproc: int | None = None, **kwargs
) -> subprocess.CompletedProcess:
    """scripts/launch.py on a shipped recipe."""
    ranks = ["--nproc", nproc] if nproc else []
    config = FINETUNE.parent / f"{recipe}.yaml"
    return start(ROOT / "scripts/launch.py", *ranks, FINETUNE, "--config", config, *arguments, **kwargs)


def launch_bert(*arguments: object, **kwargs) -> subprocess.CompletedProcess:
    """scripts/launch.py on the BERT recipe."""
    return start(ROOT / "scripts/launch.py", TRAIN, *arguments, **kwargs)


def run_python(script: Path, *arguments: object, **kwargs) -> subprocess.CompletedProcess:
    """A recipe by plain python: one process."""
    return run(sys.executable, script, *arguments, **kwargs)


class Running:
    """scripts/launch.py, started and not waited for: on a shipped recipe, or on the BERT recipe if none is named.

    Its output goes to files in `folder`. forked: see start().
    """

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        recipe: str | None = None,
        restarts: int = 0,
        forked: bool = False,
        **env: str,
    ):
        self.folder, script = folder, FINETUNE if recipe else TRAIN
        config = ["--config", FINETUNE.parent / f"{recipe}.yaml"] if recipe else []
        words = [ROOT / "scripts/launch.py", "--restarts", restarts, script, *config, *arguments]
        words = [str(word) for word in words]
        folder.mkdir(exist_ok=True)
        if forked:
            self.process = Forked(words, folder, env)
            return
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                stdout=out,
                stderr=err,
                env=os.environ | env,
                start_new_session=True,
            )

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.family(), psutil.Process(self.process.pid)] if self.process.poll() is None else []:
            process.kill()
        self.process.wait()

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def until(self, what: Callable[[], object], timeout: float = 200, look_s: float = 0.05) -> None:
        """Looks every `look_s` until `what()`; fails if the run ends before, or at the timeout."""
        deadline = time.monotonic() + timeout
        while not what():
            assert self.process.poll() is None, f"ended: {self.out[-2000:]}\n{self.err[-3000:]}"
            assert time.monotonic() < deadline, f"waited {timeout} s: {self.out[-2000:]}\n{self.err[-3000:]}"
            time.sleep(look_s)

    def family(self) -> list[psutil.Process]:
        """All processes below the launcher."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def ranks(self) -> list[psutil.Process]:
        """The ranks' processes, rank 0 first: those of the launcher's children that lead a session."""
        return [child for child in psutil.Process(self.process.pid).children() if os.getsid(child.pid) == child.pid]

    def shared(self, name: str) -> set[str]:
        """Files in /dev/shm of that name which rank 0 has mapped, as proc(5) tells them."""
        maps = Path(f"/proc/{self.ranks()[0].pid}/maps").read_text()
        return {line.split(maxsplit=5)[5] for line in maps.splitlines() if f"/dev/shm/{name}" in line}

    def code(self, family: list[psutil.Process], timeout: float = 100) -> int:
        """The exit code; none of `family` may be left running."""
        code = self.process.wait(timeout)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, alive
        return code


def torchrun(script: Path, *arguments: object, nproc: int = 2, **kwargs) -> subprocess.CompletedProcess:
    """torchrun itself, without our launcher."""
    return run(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        nproc,
        script,
        *arguments,
        **kwargs,
    )


def selected(cases: dict[str, object], request: pytest.FixtureRequest) -> list[str]:
    """The names of `cases` that this run of pytest tests, in their order."""
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    return [name for name in cases if any(params.get("name") == name for params in calls)]


def write_files(folder: Path, files: dict[str, str | bytes | Path]) -> None:
    """Name -> content, or what a symbolic link points to; folders are made, `folder` too."""
    folder.mkdir()
    for file, content in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            path.symlink_to(content)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def assert_kept(folder: Path, files: dict[str, str | bytes | Path]) -> None:
    """What write_files made is still there, as it was."""
    for file, content in files.items():
        path = folder / file
        if isinstance(content, Path):
            assert path.readlink() == content
        else:
            assert path.read_bytes() == (content.encode() if isinstance(content, str) else content), file


def assert_refused(done: subprocess.CompletedProcess, words: list[str]) -> None:
    """Bad input: one message with all of `words` in it, what to do, exit code 2, no traceback."""
    assert done.returncode == 2, done.stdout[-1000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1
    assert "\n  fix: " in done.stderr
    for word in words:
        assert word in done.stderr, f"{word!r} is not in: {done.stderr}"


def forks(folder: Path, jobs: list[dict], **env: str) -> list[tuple[list[int], str]]:
    """Runs of the BERT recipe as tests/bert_runs.py has them: (exit statuses of the ranks, their output) of each."""
    path = folder / f"jobs-{len(list(folder.glob('jobs-*.json')))}.json"
    path.write_text(json.dumps(jobs, default=str))
    # One thread: such small matrices need none, and wait for one another where the machine is busy.
    done = run(sys.executable, ROOT / "tests" / "bert_runs.py", path, OMP_NUM_THREADS="1", **env)
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        (codes, "".join((folder / f"{path.name}.{n}.{rank}").read_text() for rank in range(len(codes))))
        for n, codes in enumerate(json.loads(done.stdout.splitlines()[-1]))
    ]


def record(folder: Path) -> dict:
    """run.json of a run's folder."""
    return json.loads((folder / "run.json").read_text())


# A small run of tiny-llama on the embedded data: 20 steps, everything that changes a loss said here.
SMALL = [
    "--model_name_or_path", "tiny-llama", "--max_length", 256, "--max_steps", 20, "--learning_rate", 1e-2,
    "--gradient_accumulation_steps", 2, "--per_device_train_batch_size", 1, "--max_rows", 400,
    "--held_out_rows", 8, "--samples", 1, "--sample_tokens", 8, "--logging_steps", 1, "--save_strategy", "no",
]  # fmt: skip

# The same, saved now and then; epochs of an odd number of sequences, so that a resume falls in a shuffled one's middle.
STEPS = 48
SAVING = [*SMALL, "--max_rows", 150, "--max_steps", STEPS, "--save_strategy", "steps", "--save_steps", 16]


def newest(folder):
    """manifest.newest(); asserts that every rank's part is in a checkpoint that is complete."""
    found, passed_over = manifest.newest(folder)
    if found:
        optimizer = [f"global_step{found.step}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
        missing = {"rng_state_0.pth", "rng_state_1.pth", "trainer_state.json", *optimizer} - set(found.files)
        assert not missing, missing
    return found, passed_over


def ended_at(step, run, folder):
    """`folder` as the run would have left it, had it been killed just after it saved at `step`."""
    folder.mkdir()
    for checkpoint in run.glob("checkpoint-*"):
        if int(checkpoint.name.split("-")[1]) <= step:
            shutil.copytree(checkpoint, folder / checkpoint.name)
    shutil.copyfile(run / f"checkpoint-{step}" / "run.json", folder / "run.json")


def check(out, *arguments, recipe="ddp", nproc=2):
    """What the launcher checks before it starts anything."""
    from slipway import preflight  # here: it imports transformers, which takes seconds

    words = ["--config", FINETUNE.parent / f"{recipe}.yaml", *SAVING, "--output_dir", out, *arguments]
    return preflight.check([str(word) for word in words], topology.plan(nproc))


def refusal(*args, **kwargs):
    with pytest.raises(InputError) as found:
        check(*args, **kwargs)
    return str(found.value)
