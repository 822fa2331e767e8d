"""make scaling: ranks really run and are clocked, parts add up, a planted cause is named, bad flags are one message."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import scaling as script
from harness import ROOT, run

from slipway import bound, step_times, topology
from slipway.bound import PARTS, Run
from slipway.errors import stop_on_bad_input

SCRIPT = ROOT / "scripts" / "scaling.py"
TINY = ["--layers", 1, "--width", 64, "--length", 16, "--batch", 4, "--steps", 8]
JOB = step_times.Job(layers=1, width=64, length=16, batch=4, steps=8, num_workers=0)
SLOW = """
import time, torch
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, row):
        time.sleep(0.05)
        return {"inputs_embeds": torch.full((1, 64), float(row)), "labels": row % 2}
"""


def scaling(*words: object, **env: str) -> subprocess.CompletedProcess:
    return run(sys.executable, SCRIPT, *words, CUDA_VISIBLE_DEVICES="", **env)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(completed process, scaling.json, folder) of a tiny run on 1 and 2 CPU ranks."""
    folder = tmp_path_factory.mktemp("scaling") / "out"
    done = scaling(*TINY, "--output", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done, json.loads((folder / "scaling.json").read_text()), folder


def test_one_and_two_ranks_really_ran(measured):
    _, content, _ = measured
    assert [run["ranks"] for run in content["runs"]] == [1, 2]
    one, two = content["runs"]
    assert one["gradient_mib"] == one["all_reduce_alone_ms"] == one["parts_ms"]["all_reduce"] == 0
    assert two["all_reduce_alone_ms"] > 0
    # What is sent, as DDP itself says, is one fp32 gradient a parameter.
    assert two["gradient_mib"] == pytest.approx(4 * two["parameters"] / 2**20, rel=1e-3)


def test_the_parts_add_up_to_the_step(measured):
    for one in measured[1]["runs"]:
        assert set(one["parts_ms"]) == {"data", "forward_backward", "all_reduce", "optimizer", "other"}
        assert min(one["parts_ms"].values()) >= 0
        assert sum(one["parts_ms"].values()) == pytest.approx(one["step_ms"], rel=0.05)
        assert one["steps_per_s"] == pytest.approx(1000 / one["step_ms"], rel=0.01)
        assert one["rows_per_s"] == pytest.approx(one["ranks"] * 4 * one["steps_per_s"], rel=0.01)


def test_table_and_bound_are_printed_in_100_columns(measured):
    done, content, folder = measured
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) == 100
    for text in (*PARTS.values(), "steps/s", "2 ranks", f"efficiency {content['efficiency']:.0%}"):
        assert text in done.stdout
    assert f"bound: {content['bound']['name']}. " in done.stdout
    assert " ".join(content["bound"]["sentence"].split()) in " ".join(done.stdout.split())
    one, two = content["runs"]
    assert content["efficiency"] == pytest.approx(two["rows_per_s"] / 2 / one["rows_per_s"], rel=1e-3)
    assert (folder / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_what_output_holds_is_kept(measured):
    _, _, folder = measured
    before = (folder / "scaling.json").read_bytes()
    again = scaling(*TINY, "--output", folder)
    assert again.returncode == 2 and "is not empty" in again.stderr
    assert (folder / "scaling.json").read_bytes() == before


def test_a_slow_dataset_is_named_as_the_bound(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    done = scaling(*TINY, "--steps", 4, "--dataset", f"{tmp_path}/slow.py:Rows", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert content["bound"]["name"] == "data loading"
    assert "raise --num_workers (now 0" in content["bound"]["sentence"]
    assert all(one["parts_ms"]["data"] >= 4 * 50 for one in content["runs"])  # 4 rows a batch, 50 ms each


BAD = {
    "no layers": (["--layers", 0], "--layers 0 is too small"),
    "no row": (["--batch", 0], "--batch 0 is too small"),
    "negative workers": (["--num_workers", -1], "--num_workers -1"),
    "odd width": (["--width", 100], "--width 100 is no multiple of 64"),
    "no rank": (["--nproc", 0], "NPROC=0"),
    "unknown flag": (["--layer", 3], "unrecognized arguments: --layer 3"),
    "no file": (["--dataset", "none.py:Rows"], "no file none.py"),
    "no such name": (["--dataset", "{d}/rows.py:Row"], "rows.py has no Row"),
    "too few rows": (
        ["--dataset", "{d}/slow.py:Rows", "--batch", 65],
        "slow.py:Rows has 64 rows, a step takes 2 ranks x --batch 65",
    ),
    "no dicts": (["--dataset", "{d}/rows.py:Rows"], "rows are no dicts of labels"),
    "output is a file": (["--output", "{d}/rows.py"], "rows.py is a file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_flags_are_one_message(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.py").write_text("def Rows():\n    return [1, 2, 3]\n")
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(topology, "_count_gpus", lambda: 0)
    words, message = BAD[name]
    with pytest.raises(SystemExit) as stopped, stop_on_bad_input():
        script.main([str(word).replace("{d}", str(tmp_path)) for word in words])
    shown = capsys.readouterr()
    assert (stopped.value.code, shown.out) == (2, "") and message in shown.err
    assert shown.err.count("error: ") == 1


def test_the_command_ends_with_2_on_bad_input():
    done = scaling("--layers", 0)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --layers 0 is too small\n  fix: give 1 or more\n"


def test_a_rank_that_fails_is_shown_and_leaves_nothing(tmp_path):
    (tmp_path / "rows.py").write_text("Rows = lambda: [{'labels': 0, 'input_ids': 'words'}] * 64\n")
    done = scaling(*TINY, "--dataset", f"{tmp_path}/rows.py:Rows", "--output", tmp_path / "out")
    assert done.returncode == 1 and "a rank of 1 failed" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_all_ranks_end_with_it(number, code, tmp_path):
    words = [sys.executable, SCRIPT, *TINY, "--steps", 10**6, "--output", tmp_path / "out"]
    process = subprocess.Popen([str(word) for word in words], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not _ranks(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        ranks, family = _ranks(process.pid), psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert ranks and process.returncode == code and "Traceback" not in err, err
    assert psutil.wait_procs(family, timeout=10)[1] == []


def _ranks(pid: int) -> list[psutil.Process]:
    return [one for one in psutil.Process(pid).children(recursive=True) if "slipway.step_times" in one.cmdline()]


# --- which bound, from times


def of(ranks: int, fixed: float = 10, **parts: float) -> Run:
    """A run whose step is 100 ms of forward and backward, but for `parts`."""
    times = dict.fromkeys(PARTS, 0.0) | {"forward_backward": 100.0} | parts
    step = sum(times.values())
    return Run(ranks, step, step, 1e3 / step, ranks * 4e3 / step, times, fixed, 20.0, 400.0, 10**8, 2, "fp32", "CPU")


@pytest.mark.parametrize(
    ("many", "name", "words"),
    [
        (of(2, data=50), "data loading", "50.0 of 150.0 ms (33%)"),
        (of(2, all_reduce=60), "communication", "(400.0 MiB of gradients, 20.0 ms alone, 19.5 GiB/s)"),
        (of(2, forward_backward=180), "shared machine", "180.0 ms beside 1 other, and 100.0 ms alone"),
        (of(2, fixed=60, optimizer=20), "too small a step", "80.0 of 120.0 ms (67%)"),
        (of(2, fixed=5), "compute", "100% of a step is forward and backward"),
    ],
)
def test_the_largest_cost_is_the_bound(many, name, words):
    found, sentence = bound.name_bound(of(1), many, JOB, cores=4)
    assert found == name and words in sentence


def test_more_threads_than_cores_are_counted():
    _, sentence = bound.name_bound(of(1), of(2, forward_backward=180), JOB, cores=2)
    assert "2 ranks x 2 threads on 2 cores; set OMP_NUM_THREADS=1" in sentence


def rank(step: list[float], alone: float, other: float) -> dict:
    """What a rank gives whose steps take `step` seconds, a tenth of each the optimizer."""
    plain = [{"data": 0, "forward_backward": 0.9 * s, "optimizer": 0.1 * s, "other": 0, "step": s} for s in step]
    split = [{"forward_backward": alone, "all_reduce": 0.05}] * len(step)
    got = {"gradient_bytes": 4, "parameters": 1, "threads": 1, "precision": "fp32", "card": "CPU"}
    return {"plain": plain, "split": split, "other_batch": [{"forward_backward": other}] * len(step)} | got


def test_all_reduce_is_what_backward_does_not_hide_and_outliers_are_left_out():
    found = bound.summary([rank([1, 1, 1, 1, 1, 1, 50, 90], alone=0.6, other=0.3)] * 2, JOB)
    assert (found.step_ms, found.rows_per_s) == (pytest.approx(1000), pytest.approx(8))
    assert found.parts_ms["all_reduce"] == pytest.approx(300) and found.parts_ms["forward_backward"] == 600
    assert found.fixed_ms == pytest.approx(200)  # 4 rows 0.6 s, 1 row 0.3 s: 0.1 s a row


def test_a_slow_rank_is_waited_for_in_all_reduce():
    found = bound.summary([rank([1] * 8, alone=0.8, other=0.3), rank([1] * 8, alone=0.4, other=0.3)], JOB)
    assert found.parts_ms["all_reduce"] == pytest.approx((100 + 500) / 2)


def test_clocked_parts_leave_no_time_out(monkeypatch):
    """Whatever is slow lands in its own part: here the optimizer."""
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    training = step_times.Training(JOB, topology.World(1, 1, "cpu", 0), "cpu")
    real = training.optimizer.step
    training.optimizer.step = lambda *words: (time.sleep(0.3), real(*words))
    times = training.plain()
    assert times["optimizer"] >= 0.3
    assert sum(value for key, value in times.items() if key != "step") == pytest.approx(times["step"], rel=0.05)
