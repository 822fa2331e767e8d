"""The image's last step: constraints for child images, compiled bytecode, the list of contents.

python docker/finish.py
"""

import compileall
import importlib.metadata
import re
import sys
from pathlib import Path

import dist_record
import write_sbom

ROOT = Path(__file__).resolve().parent.parent
SHARE = Path("/usr/share/slipway")
TOOLS = "# --- building and checking"  # from here on requirements.in pins what checks this project, not what trains


def main() -> None:
    pins = (ROOT / "docker/requirements.in").read_text()
    training, mark, _ = pins.partition(TOOLS)
    if not mark:
        raise SystemExit(f"docker/requirements.in has no line {TOOLS!r}")
    lines = [line for line in training.splitlines() if re.match(r"[\w.-]+==", line)]
    (ROOT / "docker/constraints.txt").write_text("\n".join(lines) + "\n")
    hinting_pip(Path(sys.executable).parent)
    # A read-only root cannot keep what Python compiles at each start.
    if not compileall.compile_dir(ROOT, quiet=1):
        raise SystemExit("a Python file of the project does not compile")
    write_sbom.main(SHARE)


def hinting_pip(folder: Path) -> None:
    """`pip` becomes docker/pip_with_hint.py; `python -m pip` stays as it is."""
    scripts = [folder / name for name in ("pip", "pip3")]
    for script in scripts:
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/docker/pip_with_hint.py "$@"\n')
        script.chmod(0o755)
    dist_record.update(Path(importlib.metadata.distribution("pip")._path) / "RECORD", scripts)


if __name__ == "__main__":
    sys.exit(main())
