"""docs/from-the-tutorials.md: every block is run as it stands, in a process of its own, and does what is said of it."""

import json
import sys

import pytest
import tutorial_page
from harness import ROOT, run
from tutorial_cases import CASES

ENTRIES = tutorial_page.entries()
NOT_RUN = [title for title, case in CASES.items() if case.not_run]
BLOCKS = [f"{entry.title}/{kind}" for entry in ENTRIES for kind in ("wrong", "right")]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, str]:
    """`title/kind` -> what went wrong with the block; empty if it does what the page says."""
    folder = tmp_path_factory.mktemp("tutorials")
    done = run(sys.executable, ROOT / "tests" / "tutorial_runner.py", folder, timeout=500, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads((folder / "results.json").read_text())


def test_each_entry_is_run_and_the_wrong_block_is_marked():
    assert len(ENTRIES) >= 12 and sorted(CASES) == sorted(entry.title for entry in ENTRIES)
    for entry in ENTRIES:
        assert entry.wrong.text.startswith("# wrong\n"), entry.title
        case = CASES[entry.title]
        assert case.wrong or entry.error or case.not_run, f"nothing is claimed of the wrong block: {entry.title}"
    assert NOT_RUN == ["empty_cache against out of memory"]


@pytest.mark.timeout(600)  # the first run compiles DeepSpeed's op
@pytest.mark.parametrize("block", [block for block in BLOCKS if block not in [f"{title}/wrong" for title in NOT_RUN]])
def test_a_block_does_what_the_page_says(block, results):
    assert results[block] == "", results[block]


BROKEN = """# Page

## One

```python wrong
1
```

On our pins: nothing.

```python
2
```

## Two

```python wrong
3
```
"""


def test_an_entry_without_its_parts_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(BROKEN)
    with pytest.raises(ValueError, match=r"`Two` has \['wrong'\], not wrong, seen, right"):
        tutorial_page.entries(page)
