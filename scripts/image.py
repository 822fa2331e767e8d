"""Builds the image, tests it, tells its size, opens a shell in it. Needs Python 3.9 or later and a Docker engine.

PYTHONPATH=. python3 scripts/image.py build|test|size|shell [flags]     what `make image`, `image-test` ... run

Behind a proxy: --ca takes its CA as a build secret, and http_proxy, https_proxy, no_proxy are handed on; neither is
in a layer or in the image's history.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import image_base
import image_engine
import image_log

from slipway.errors import InputError, stop_on_bad_input

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "build" / "image.log"
TAG = os.environ.get("SLIPWAY_IMAGE") or "slipway"
# What `make image-test` runs in the container: all that depends on the image's Python, packages and compiled ops. The
# others test the repository, its .venv and its messages, and run outside; the whole takes a quarter of an hour.
INSIDE = ["tests/test_recipes.py", "tests/test_models.py", "tests/test_attention.py", "tests/test_encode.py"]
PROXIES = [name for upper in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY") for name in (upper, upper.lower())]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build")
    build.add_argument("--base", help="another base image than the Dockerfile's; standin: made here by debootstrap")
    build.add_argument("--ca", type=Path, help="PEM file of the CAs to trust while building")
    build.add_argument("--flash-attn", help="wheel (the default), source or none")
    build.add_argument("--build-arg", action="append", default=[], help="NAME=VALUE, such as MAX_JOBS=8")
    for name in ("test", "size", "shell"):
        commands.add_parser(name)
    asked, rest = parser.parse_known_args(argv)
    if rest and asked.command != "test":
        parser.error(f"unknown: {' '.join(rest)}")
    docker = image_engine.client()
    if asked.command == "build":
        return build_image(docker, asked)
    require(docker)
    if asked.command == "size":
        return print_size(docker)
    if asked.command == "shell":
        return shell(docker)
    return run_tests(docker, rest)


def require(docker: str) -> None:
    if subprocess.run([docker, "image", "inspect", TAG], capture_output=True).returncode:
        raise InputError(f"there is no image {TAG}", "make image (SLIPWAY_IMAGE names another)")


def build_image(docker: str, asked: argparse.Namespace) -> int:
    """Builds, and ends with the seconds of each stage and the size of each layer."""
    command = [docker, "build", "--progress=plain", "--tag", TAG, *labels(asked)]
    command += [word for name in PROXIES if os.environ.get(name) for word in ("--build-arg", name)]
    command += [word for pair in asked.build_arg for word in ("--build-arg", pair)]
    if asked.base:
        base = image_base.standin(docker) if asked.base == "standin" else asked.base
        command += ["--build-arg", f"BASE={base}"]
    if asked.flash_attn:
        if asked.flash_attn not in ("wheel", "source", "none"):
            raise InputError(f"FLASH_ATTN={asked.flash_attn}", "FLASH_ATTN=wheel, source or none")
        command += ["--build-arg", f"FLASH_ATTN={asked.flash_attn}"]
    if asked.ca:
        command += ["--secret", f"id=ca,src={checked_ca(asked.ca)}"]
    start = time.monotonic()
    code, stages = follow([*command, str(ROOT)])
    if code:
        print(f"error: the build failed; all of its output is in {LOG.relative_to(ROOT)}", file=sys.stderr)
        return 1
    print_size(docker)
    print(image_log.table(stages))
    print(f"built {TAG} in {time.monotonic() - start:.0f} s")
    return 0


def checked_ca(file: Path) -> Path:
    """The absolute path. Raises InputError if it is not a PEM file: the build would only say that it trusts no one."""
    try:
        if "BEGIN CERTIFICATE" in file.read_text(errors="replace"):
            return file.resolve()
        found = "has no BEGIN CERTIFICATE in it"
    except OSError as error:
        found = str(error.strerror)
    raise InputError(f"CA_BUNDLE={file}: {found}", "give the PEM file of your proxy's CA")


def labels(asked: argparse.Namespace) -> list[str]:
    """OCI labels: what it is, from which revision, on which pins, and what was asked when it was built."""
    pins = [line.split()[0] for line in (ROOT / "docker/requirements.in").read_text().splitlines() if "==" in line[:40]]
    project = (ROOT / "pyproject.toml").read_text()
    values = {
        "title": "slipway",
        "description": project.partition('description = "')[2].partition('"')[0],
        "version": project.partition('version = "')[2].partition('"')[0],
        "licenses": project.partition('license = "')[2].partition('"')[0],
        "revision": revision(),
    }
    found = [f"org.opencontainers.image.{name}={value}" for name, value in values.items()]
    found += [f"slipway.pin.{name}={version}" for name, _, version in (pin.partition("==") for pin in pins)]
    found += [f"slipway.asked.{name}={getattr(asked, name) or ''}" for name in ("base", "flash_attn")]
    return [word for label in found for word in ("--label", label)]


def revision() -> str:
    """The commit, with -dirty where files differ from it; unknown where there is no git."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def follow(command: list[str]) -> tuple[int, dict[str, float]]:
    """Runs the build; prints its steps as they end, keeps all in LOG. (exit code, seconds by stage)."""
    LOG.parent.mkdir(exist_ok=True)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with (
        LOG.open("w", buffering=1) as log,
        subprocess.Popen(command, env=os.environ | {"DOCKER_BUILDKIT": "1"}, **pipes) as build,
    ):
        reader = image_log.Reader()
        for line in build.stdout:
            log.write(line)
            for text in reader.read(line):
                print(text, flush=True)
    if build.returncode:
        print("\n".join(reader.last()), file=sys.stderr)
    return build.returncode, reader.stages


def print_size(docker: str) -> int:
    """Size by layer, as the engine counts it, and in all."""
    command = [docker, "history", "--no-trunc", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}", TAG]
    layers = [line.split("\t", 1) for line in subprocess.check_output(command, text=True).splitlines()]
    for size, made_by in reversed(layers):
        if int(size) > 100_000:
            print(f"{int(size) / 1e6:9.1f} MB  {image_log.short(made_by)}")
    print(f"{sum(int(size) for size, _ in layers) / 1e9:9.2f} GB  in all, uncompressed")
    return 0


def shell(docker: str) -> int:
    """A shell in the image as the caller, with this folder mounted; with the GPUs where the engine can give them."""
    here = ["--volume", f"{Path.cwd()}:/work", "--workdir", "/work", "--user", f"{os.getuid()}:{os.getgid()}"]
    # Locked memory is for InfiniBand and NVMe beside GPUs; an engine without the right to raise limits would refuse.
    gpus = ["--gpus", "all", "--ulimit", "memlock=-1"] if "nvidia" in image_engine.answer(docker).stdout else []
    command = [docker, "run", "--rm", "-it", "--shm-size", "16g", *gpus, *here, TAG, "bash"]
    os.execv(docker, command)


def run_tests(docker: str, arguments: list[str]) -> int:
    """The tests with the mark `image`, from outside; then, if they were not narrowed, the project's own inside it.

    The last lines say what ran where, and how many passed.
    """
    code, outside = pytest([sys.executable, "-m", "pytest", "-q", "-m", "image", *arguments])
    if arguments:
        return code
    flags = ["--network", "none", "--shm-size", "2g", "--user", "12345:0", "--env", "SLIPWAY_CACHE=/tmp/cache"]
    tests = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *INSIDE]
    print(f"inside the image: {' '.join(tests)}", flush=True)
    worst, inside = pytest([docker, "run", "--rm", *flags, TAG, *tests])
    print(f"outside the image, -m image: {outside}\ninside the image, {' '.join(INSIDE)}: {inside}", flush=True)
    return max(code, worst)


def pytest(command: list[str]) -> tuple[int, str]:
    """(exit code, closing line) of a run of pytest, whose output goes on as it comes."""
    last = "it said nothing"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return process.returncode, last


if __name__ == "__main__":
    with stop_on_bad_input():
        sys.exit(main(sys.argv[1:]))
