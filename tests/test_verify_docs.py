"""docs/troubleshooting.md: every fix that verify can print is there, and everything an entry names exists."""

import re
from dataclasses import dataclass

import pytest
from harness import ROOT

from slipway import verify, verify_run

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ENTRY = re.compile(
    r"^### (?P<texts>`.+`)\n\n(?P<cause>[^\n]+)\n\n- fix: (?P<fix>.+)\n- held by: `(?P<by>[^`]+)`$", re.M
)


@dataclass
class Entry:
    texts: list[str]
    cause: str
    fix: str
    by: str


ENTRIES = [
    Entry(re.findall(r"`([^`]+)`", one["texts"]), one["cause"], one["fix"], one["by"]) for one in ENTRY.finditer(PAGE)
]


def fixes() -> dict[str, str]:
    """Finding -> the fix that `make verify` prints for it."""
    found = {f"any.{key}": fix for key, fix in (verify_run.HUNG | verify_run.DEATHS).items()}
    for check in verify.checks():
        found |= {f"{check.name}.{key}" if key else check.name: fix for key, fix in check.fixes.items()}
    return found


def test_every_heading_is_an_entry_and_no_error_text_stands_twice():
    assert len(ENTRIES) == PAGE.count("\n### ") >= 40
    texts = [text.lower() for entry in ENTRIES for text in entry.texts]
    assert len(texts) == len(set(texts))


@pytest.mark.parametrize("finding", fixes())
def test_every_fix_of_verify_has_its_entry_word_by_word(finding):
    [entry] = [entry for entry in ENTRIES if entry.by == f"verify: {finding}"]
    assert entry.fix == fixes()[finding]


@pytest.mark.parametrize("by", sorted({entry.by for entry in ENTRIES}))
def test_what_holds_an_entry_exists(by):
    if by.startswith("verify: "):
        assert by.removeprefix("verify: ") in fixes()
        return
    file, _, name = by.partition("::")
    assert re.search(rf"^def {re.escape(name)}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_the_page_of_verify_names_every_check():
    page = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z0-9-]+)` \| (.+?) \| \d+ s \|$", page, re.MULTILINE))
    assert rows == {check.name: check.sentence for check in verify.checks()}
