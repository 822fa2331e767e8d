"""Run commands in the built image, as a user does: `docker run` with flags, output as text."""

import os
import subprocess
import uuid
from pathlib import Path

import image_engine
from harness import run
from image import TAG

ROOT = Path(__file__).resolve().parent.parent
IMAGE = TAG
# The strictest way that the image is promised to run in: a user it does not know, nothing writable, no network.
STRICT = ("--user", "12345:0", "--read-only", "--tmpfs", "/tmp:exec", "--network", "none", "--shm-size", "1g")

# For looking at every file there is: nothing is closed to root, so an error of find or du is an error of the test.
AS_ROOT = ("--user", "0:0", "--read-only", "--tmpfs", "/tmp:exec", "--network", "none")

# With the network and, behind a proxy, with the CA that built the image, mounted as docs/base-image.md says.
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
CA = os.environ.get("SLIPWAY_CA_BUNDLE")
ONLINE = ("--user", "0:0", *(("--volume", f"{CA}:{BUNDLE}:ro") if CA else ()))


def docker(*words: object, timeout: int = 280) -> subprocess.CompletedProcess:
    return run(image_engine.client(), *words, timeout=timeout)


def inside(
    *command: object, flags: tuple = STRICT, timeout: int = 280, image: str = IMAGE
) -> subprocess.CompletedProcess:
    """`docker run --rm FLAGS IMAGE COMMAND`; the container is removed also when the time is over."""
    name = f"slipway-test-{uuid.uuid4().hex[:12]}"
    try:
        return docker("run", "--rm", "--name", name, *flags, image, *command, timeout=timeout)
    except AssertionError:
        docker("rm", "--force", name)
        raise


def python(code: str, *, flags: tuple = STRICT, timeout: int = 280) -> str:
    """What a Python program prints in the container; fails the test if it fails."""
    done = inside("python", "-W", "ignore", "-c", code, flags=flags, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def shell(line: str, *, flags: tuple = STRICT, timeout: int = 280) -> str:
    done = inside("bash", "-euo", "pipefail", "-c", line, flags=flags, timeout=timeout)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def writable(folder: Path, uid: int, gid: int) -> Path:
    """`folder`, made for a user of the container; where root makes it, handed over."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        os.chown(folder, uid, gid)
    return folder
