"""What the launcher makes of ranks that end."""

import sys

import pytest
from harness import run

# The launcher looks at its ranks, and then the agent below it does: in between a rank may end.
BETWEEN = """
import sys
from pathlib import Path
from slipway import watch

watch.Agent._processes = lambda agent: {}
words = ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", "1", *sys.argv[1:]]
limits = watch.Limits(stop_s=5, silence_s=0, restarts=0, sigusr1=False)
sys.exit(watch.run(words, Path.cwd(), limits, lambda: 7))
"""


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("sys.exit(2)", 2, ""),
        ("sys.exit(3)", 1, "error: rank 0 failed with exit code 3"),
        ("os.kill(os.getpid(), 9)", 1, "error: rank 0 was ended by SIGKILL"),
    ],
)
def test_a_rank_that_ends_between_two_looks_is_told_by_its_code(ends, code, said, tmp_path):
    (tmp_path / "rank.py").write_text(f"import os, sys\n{ends}\n")
    done = run(sys.executable, "-c", BETWEEN, tmp_path / "rank.py", cwd=tmp_path, timeout=100)
    assert done.returncode == code, done.stderr[-3000:]
    assert said in done.stderr and "rank None" not in done.stderr
