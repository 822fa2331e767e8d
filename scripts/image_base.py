"""A stand-in for the public base image, made with debootstrap, for machines that reach no image registry.

`make image BASE=standin` uses it. It is the same Debian release as the public one, from the same packages.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from slipway.errors import InputError

SUITE = "trixie"
NAME = f"slipway-standin:{SUITE}"


def standin(docker: str) -> str:
    """The image's name; made in a minute if the engine does not have it. Raises InputError where it cannot be made."""
    if subprocess.run([docker, "image", "inspect", NAME], capture_output=True).returncode == 0:
        return NAME
    if os.geteuid() or not shutil.which("debootstrap"):
        raise InputError("BASE=standin needs root and debootstrap", "apt-get install debootstrap, and run it as root")
    with tempfile.TemporaryDirectory() as folder:
        print(f"making {NAME} with debootstrap", flush=True)
        command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", SUITE, folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = "\n  ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
            raise InputError(f"debootstrap failed:\n  {last}", "check the network and the proxy, then try again")
        load(docker, Path(folder))
    return NAME


def load(docker: str, root: Path) -> None:
    # 60 MB of packages that are unpacked already, and as much of lists: the public image has neither.
    for folder in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(root / folder)
        (root / folder).mkdir()
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run([docker, "import", "-", NAME], stdin=tar.stdout, check=True, stdout=subprocess.DEVNULL)
