"""What `make lint` runs: every tool, over the files that git knows, one line each; exit 1 if one fails.

python scripts/lint.py
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from slipway import ds_config
from slipway.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def files(*patterns: str) -> list[Path]:
    """The project's files that match, tracked or new, none ignored. Raises FileNotFoundError if none do."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    found = sorted({ROOT / name for name in names if name and (ROOT / name).exists()})
    if not found:
        raise FileNotFoundError(f"no file matches {' '.join(patterns)}: nothing would be linted")
    return found


def run(tool: str, *arguments: object) -> list[str]:
    """The lines that a tool complains in; empty if it is content."""
    done = subprocess.run([BIN / tool, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    return (lines or [f"exit code {done.returncode}"]) if done.returncode else []


def bad_json() -> list[str]:
    found = []
    for file in files("*.json"):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            found.append(f"{file.relative_to(ROOT)}: {error}")
    return found


def bad_ds_configs() -> list[str]:
    found = []
    for file in files("ds_configs/*.json"):
        try:
            config = ds_config.load(file)
            if "nvme" in ds_config.facts_of(config).values():
                ds_config.set_nvme_path(config, "/nvme")  # as --nvme_path does: each machine has its own
            ds_config.check(config, str(file.relative_to(ROOT)))
        except InputError as error:
            found += str(error).splitlines()
    return found


CHECKS: dict[str, Callable[[], list[str]]] = {
    "ruff check": lambda: run("ruff", "check", "--quiet", "--output-format", "concise"),
    "ruff format": lambda: run("ruff", "format", "--check", "--quiet", "--output-format", "concise"),
    "yamllint": lambda: run("yamllint", "--strict", *files("*.yaml", "*.yml")),
    "json": bad_json,
    "ds_configs": bad_ds_configs,
    "shellcheck": lambda: run("shellcheck", *files(".ci/run", "*.sh")),
    "pins": lambda: run("python", "scripts/pins.py", "check"),
}
if (ROOT / "Dockerfile").exists():
    CHECKS["hadolint"] = lambda: run("hadolint", *files("Dockerfile", "*.Dockerfile"))


def main() -> int:
    failed = 0
    for name, check in CHECKS.items():
        start = time.monotonic()
        try:
            found = check()
        except (OSError, subprocess.CalledProcessError) as error:
            found = [str(error)]
        failed += bool(found)
        print(f"{name:<12} {'FAILED' if found else 'ok':<6} {time.monotonic() - start:4.1f} s", flush=True)
        for line in found:
            print(f"    {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
