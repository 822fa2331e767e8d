"""The pins: docker/requirements.in -> docker/requirements.lock and the table in README.md and docs/pins.md.

    python scripts/pins.py write [--upgrade-package NAME]   what `make lock` runs
    python scripts/pins.py check                            exit 1 if the lock or the table has drifted

Further flags go to `uv pip compile`. Versions that are in the lock stay unless requirements.in or a flag says
otherwise, so a release made today changes nothing, and `check` gives the same answer every day.
"""

import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pip_settings

ROOT = Path(__file__).resolve().parent.parent
WANTED = ROOT / "docker" / "requirements.in"
LOCK = ROOT / "docker" / "requirements.lock"
EXCLUDED = ROOT / "docker" / "requirements.exclude"
PAGES = [ROOT / "README.md", ROOT / "docs" / "pins.md"]  # each has the table between the two markers below
BEGIN, END = "<!-- pins: written by make lock -->", "<!-- end of pins -->"
SHOWN = 12  # lines of a difference that are shown


@dataclass
class Pin:
    """One line of requirements.in."""

    name: str
    version: str
    why: str


def pins(text: str) -> list[Pin]:
    """The pins in the text of requirements.in, in order. Raises ValueError for a line that is none."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"([\w.-]+)==(\S+)\s+# (.+)", line)
        if not match:
            raise ValueError(f"{WANTED.name}:{number}: want `name==version  # why`, found {line!r}")
        found.append(Pin(*match.groups()))
    return found


def table(rows: list[Pin]) -> str:
    lines = ["| package | version | why |", "|---|---|---|"]
    return "\n".join(lines + [f"| {pin.name} | {pin.version} | {pin.why} |" for pin in rows])


def with_table(page: str, rows: list[Pin]) -> str:
    """`page` with the table between its two markers made new. Raises ValueError where a marker is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"a page has no line {BEGIN} with {END} after it")
    return f"{before}{BEGIN}\n{table(rows)}\n{END}{after}"


def compiled(wanted: Path, lock: Path, flags: list[str]) -> str:
    """The lock that uv makes of `wanted`, keeping the versions in `lock`. Raises RuntimeError if uv fails."""
    environ, index_flags, _ = pip_settings.for_uv(pip_settings.read(os.environ), os.environ)
    uv = Path(sys.executable).parent / "uv"
    options = ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-annotate", "--quiet"]
    options += ["--excludes", str(EXCLUDED), "--custom-compile-command", "make lock", *index_flags, *flags]
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder) / lock.name
        if lock.exists():
            shutil.copy(lock, new)  # uv reads the versions to keep from the file that it writes
        command = [str(uv), "pip", "compile", *options, str(wanted), "--output-file", str(new)]
        done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(pip_settings.without_secrets(done.stderr).strip())
        return new.read_text()


def drift(is_: str, should: str, name: str) -> list[str]:
    """What differs, as the first lines of a diff; empty where nothing does."""
    lines = difflib.unified_diff(is_.splitlines(), should.splitlines(), name, "made anew", lineterm="", n=0)
    return list(lines)[:SHOWN]


def check(flags: list[str]) -> list[str]:
    """All that has drifted, in lines to print."""
    found = drift(LOCK.read_text(), compiled(WANTED, LOCK, flags), str(LOCK.relative_to(ROOT)))
    for file in PAGES:
        page = file.read_text()
        found += drift(page, with_table(page, pins(WANTED.read_text())), file.name)
    return found


def main(argv: list[str]) -> int:
    if argv[:1] not in (["write"], ["check"]):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        if argv[0] == "check":
            found = check(argv[1:])
            print("\n".join(found))
            if found:
                print("run `make lock` and commit what it changes")
            return 1 if found else 0
        pages = {file: with_table(file.read_text(), pins(WANTED.read_text())) for file in PAGES}
        LOCK.write_text(compiled(WANTED, LOCK, argv[1:]))
        for file, page in pages.items():
            file.write_text(page)
        return 0
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
