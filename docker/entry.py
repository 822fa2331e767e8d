"""The image's entry point: finds folders that this user can write, then becomes the command.

Any UID may run the image, and its root may be read-only. Where HOME or the caches cannot be written, a folder of the
user's own below /tmp takes their place, and one line says so.
"""

import os
import sys
import tempfile
from pathlib import Path


def main(command: list[str]) -> int:
    try:
        for folder in (os.environ.get("HOME", "/"), os.environ["XDG_CACHE_HOME"]):
            if not writable(folder):
                move(folder)
    except OSError as error:
        fix = "add --tmpfs /tmp:exec to docker run, or mount a folder that this user can write at /cache"
        print(f"error: nowhere to write: {error}\n  fix: {fix}", file=sys.stderr)
        return 2
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}\n  fix: `make help` lists what there is", file=sys.stderr)
        return 127


def writable(folder: str) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def move(folder: str) -> None:
    """Every variable that leads into `folder` leads into one below the temporary folder instead."""
    other = Path(tempfile.gettempdir()) / f"slipway-{os.getuid()}" / folder.strip("/").replace("/", "-")
    other.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not writable(str(other)):
        raise PermissionError(f"{folder} and {other} are not writable for user {os.getuid()}")
    print(f"slipway: {folder} is not writable for user {os.getuid()}; using {other}", file=sys.stderr)
    for name, value in os.environ.items():
        if value == folder or value.startswith(f"{folder}/"):
            os.environ[name] = f"{other}{value[len(folder) :]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
