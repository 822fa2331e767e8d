"""How a process ends on bad input."""

import pytest
from harness import ROOT, run_python, torchrun

# What the end of the interpreter now and then does to a rank: a thread of the process group still runs, and C++ aborts.
ENDS = """
import atexit, os
from slipway.errors import InputError, stop_on_bad_input
atexit.register(os.abort)
with stop_on_bad_input():
    print("said before")
    raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("InputError('no such file', 'name another')", 2, "error: no such file\n  fix: name another\n"),
        ("KeyboardInterrupt", 130, "interrupted\n"),
    ],
)
def test_a_rank_ends_with_its_code_before_the_interpreter_can_abort(error, code, said, tmp_path):
    (tmp_path / "ends.py").write_text(ENDS.format(error=error))
    where = {"PYTHONPATH": str(ROOT)}
    done = run_python(tmp_path / "ends.py", TORCHELASTIC_RUN_ID="a", **where)
    assert (done.returncode, done.stdout, done.stderr) == (code, "said before\n", said)
    assert run_python(tmp_path / "ends.py", **where).returncode == -6  # which is what the rank is spared


SLOW_RANK_0 = """
import os, time
from slipway.errors import InputError, stop_on_bad_input
with stop_on_bad_input():
    time.sleep(2 * (os.environ["RANK"] == "0"))
    raise InputError("no such file")
"""


def test_rank_0_is_heard_where_another_rank_is_there_first(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_RANK_0)
    done = torchrun(tmp_path / "slow.py", PYTHONPATH=str(ROOT))
    assert done.stderr.count("error: no such file") == 1, done.stderr[-2000:]
