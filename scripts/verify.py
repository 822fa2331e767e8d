"""Say whether this machine can train, check by check, and what to do where it cannot.

    make verify                       the table; exit code 1 if a check failed
    make verify JSON=1                one JSON document on stdout, described by docs/verify.schema.json
    make verify ONLY=shm,pins         these checks alone; `ONLY=gpu` takes all whose names begin with gpu-

Exit codes: 0 no check failed, 1 one did, 2 bad input, 130 Ctrl-C, 143 SIGTERM; no process of a check is left.
"""

import argparse
import contextlib
import json
import signal
import sys
import time
from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slipway import verify, verify_run
from slipway.errors import stop_on_bad_input

WIDTH = 100
COLOURS = {"passed": "green", "failed": "bold red", "skipped": "yellow"}
DOCUMENT_VERSION = 1


def document(rows: list[verify.Row], seconds: float) -> dict:
    """All that was found, as docs/verify.schema.json describes it. `seconds`: wall clock, of all checks together."""
    counts = Counter(row.state for row in rows)
    states = {state: counts[state] for state in COLOURS}
    checks = [row.as_dict() for row in rows]
    return {"version": DOCUMENT_VERSION, **states, "seconds": round(seconds, 1), "checks": checks}


def show(rows: list[verify.Row], out: Console) -> None:
    """The table: state, name, fact; under a failure its fix."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=WIDTH - 25)
    for row in rows:
        table.add_row(f"[{COLOURS[row.state]}]{row.state}[/]", row.name, escape(row.fact))
        if row.fix:
            table.add_row("", "", f"[bold]fix:[/] {escape(row.fix)}")
    out.print(table)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON document and no table")
    parser.add_argument("--only", help="names of checks, with commas between")
    asked = parser.parse_args(argv)
    chosen = verify.checks(asked.only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the checks' processes are ended first
    began = time.monotonic()
    progress = Console(stderr=True)
    # Says what is at work, on a terminal alone: a log would hold every frame of it.
    working = progress.status("") if progress.is_terminal else contextlib.nullcontext()
    with working as status:
        rows = verify_run.run_all(chosen, lambda one: status.update(f"{one.name}: {one.sentence}") if status else None)
    found = document(rows, time.monotonic() - began)
    if asked.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        terminal = Console(highlight=False)
        show(rows, terminal if terminal.is_terminal else Console(highlight=False, width=WIDTH))
        print(f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    with stop_on_bad_input():
        sys.exit(main(sys.argv[1:]))
