"""pip, and after a failed install one line on the pins of this image: pip names the pin, but not the way out."""

import os
import subprocess
import sys

HINT = """slipway: the versions in {file} hold in this image and in its children.
  fix: leave the package's version open, or lift the pins for one command: PIP_CONSTRAINT= pip install ...
  docs/base-image.md tells what is then no longer promised"""


def main(arguments: list[str]) -> int:
    code = subprocess.call([sys.executable, "-m", "pip", *arguments])
    file = os.environ.get("PIP_CONSTRAINT")
    if code and file and "install" in arguments:
        print(HINT.format(file=file), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
