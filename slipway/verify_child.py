"""One check, in this process: `python -m slipway.verify_child NAME FILE` writes its finding to FILE as JSON."""

import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from slipway import verify


def find(name: str) -> verify.Finding:
    """The finding of the check `name`; whatever it raises is its failure, with the usual fix."""
    [one] = [one for one in verify.checks() if one.name == name]
    try:
        return one.run()
    except verify.Skip as reason:
        return verify.Finding("skipped", str(reason))
    except Exception as error:  # a broken package may raise anything at import; the process's output holds it whole
        traceback.print_exc()
        said = " ".join(str(error).split())
        return verify.Finding("failed", f"{type(error).__name__}: {said}"[:300], {"error": said[:2000]})


def main(name: str, file: str) -> None:
    found = find(name)
    part = Path(f"{file}.part")
    part.write_text(json.dumps(asdict(found)), encoding="utf-8")
    part.replace(file)  # whole or not at all: the process may be killed at any time


if __name__ == "__main__":
    main(*sys.argv[1:])
