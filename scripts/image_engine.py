"""The Docker engine that builds and runs the image: find its client, or install and start one on a fresh machine.

python3 scripts/image_engine.py       as root on Debian or Ubuntu: leaves an engine running
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from slipway.errors import InputError, stop_on_bad_input

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["docker.io", "debootstrap"]
LOG = ROOT / "build" / "dockerd.log"
ALSO = "/usr/bin"  # where docker.io puts its client, behind which another may stand on PATH
START_S = 60
FIX = "start it (sudo systemctl start docker), or let scripts/image_engine.py install one on Debian or Ubuntu, as root"


def client() -> str:
    """A docker client that can build with BuildKit and whose engine answers. Raises InputError if there is none.

    A newer client without its buildx plugin cannot; one below 23 has BuildKit inside.
    """
    found = clients()
    able = [path for path in found if has_buildkit(path)]
    if not able:
        what = f"{', '.join(found)} cannot build with BuildKit" if found else "there is no docker client on PATH"
        raise InputError(what, "install Docker Engine 23 or later with buildx, or Debian's package docker.io")
    if answer(able[0]).returncode:
        raise InputError(f"no Docker engine answers {able[0]}: {last_line(answer(able[0]).stderr)}", FIX)
    return able[0]


def clients() -> list[str]:
    folders = [*os.environ.get("PATH", "").split(os.pathsep), ALSO]
    return list(dict.fromkeys(path for path in (shutil.which("docker", path=folder) for folder in folders) if path))


def has_buildkit(path: str) -> bool:
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    number = re.search(r"version (\d+)\.", version)
    if number and int(number[1]) < 23:
        return True
    return subprocess.run([path, "buildx", "version"], capture_output=True).returncode == 0


def answer(path: str) -> subprocess.CompletedProcess:
    return subprocess.run([path, "info"], capture_output=True, text=True, timeout=60)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1]


def start() -> str:
    """`client()`, after an engine was installed and started where there was none."""
    able = [path for path in clients() if has_buildkit(path)]
    if able and not answer(able[0]).returncode and shutil.which("debootstrap"):
        return able[0]
    if os.geteuid() or not shutil.which("apt-get"):
        raise InputError("no Docker engine runs, and this is not root on Debian or Ubuntu", FIX)
    install()
    able = [path for path in clients() if has_buildkit(path)]
    if answer(able[0]).returncode:
        LOG.parent.mkdir(exist_ok=True)
        with LOG.open("w") as log:
            subprocess.Popen(["dockerd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        wait(able[0])
    return client()


def install() -> None:
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", *command], env=environ, capture_output=True, text=True)
        if done.returncode:
            raise InputError(f"apt-get {command[0]} failed: {last_line(done.stderr)}", "mend it, then try again")


def wait(path: str) -> None:
    for _ in range(START_S):
        if not answer(path).returncode:
            return
        time.sleep(1)
    end = "\n  ".join(LOG.read_text().splitlines()[-5:])
    raise InputError(f"dockerd did not answer within {START_S} s; the end of {LOG}:\n  {end}", "mend what it names")


if __name__ == "__main__":
    with stop_on_bad_input():
        print(f"engine: {start()}", file=sys.stderr)
