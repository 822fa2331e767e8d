"""`make bench` to its end, with a model of seconds: all that it promises is printed, with figures that can be."""

import re

import pytest
from harness import ROOT, run_python


@pytest.mark.timeout(700)
def test_the_table_and_what_saving_and_resuming_take_are_printed():
    done = run_python(ROOT / "scripts/bench.py", "--model_name_or_path", "tiny-llama", "--steps", 1, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    shares = dict(re.findall(r"│ (recipe|plain|bare) .*│ +([\d.]+)% │", done.stdout))
    assert shares["recipe"] == shares["bare"]  # the same packed rows
    assert float(shares["plain"]) < float(shares["recipe"]) <= 100
    for line in (
        r"recipe / plain Trainer: +[\d.]+x",
        r"recipe / bare loop: +[\d.]+x",
        r"launch to the end of the first step, warm: ([\d.]+) s",
        r"a checkpoint of (0\.00[1-9]) GiB: training stands still for [\d.]+ s \([\d.]+ GiB/s\)",
        r"resume: ([\d.]+) s from launch to the end of the first step \([\d.]+ s at the first start\)",
    ):
        found = re.search(line, done.stdout)
        assert found, f"{line!r} is not in:\n{done.stdout}"
        assert all(float(number) > 0 for number in found.groups())


def test_no_steps_are_refused():
    done = run_python(ROOT / "scripts/bench.py", "--steps", 0)
    assert done.returncode == 2 and "--steps 0" in done.stderr and "Traceback" not in done.stderr
