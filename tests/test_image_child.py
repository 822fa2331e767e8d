"""FROM slipway: the example builds, what it inherits holds, another torch is refused, popular packages move no pin."""

import json
import os
import subprocess

import image_engine
import pytest
from containers import BUNDLE, CA, IMAGE, ONLINE, ROOT, inside, shell

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]
CHILD = "slipway-child"
PIN = next(
    line for line in (ROOT / "docker/requirements.in").read_text().splitlines() if line.startswith("torch==")
).split()[0]
MAJOR, MINOR = PIN.removeprefix("torch==").split(".")[:2]
ANOTHER = f"{MAJOR}.{int(MINOR) + 1}.0"  # the torch that somebody will want next
POPULAR = [line for line in (ROOT / "docker/popular.txt").read_text().splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module", autouse=True)
def child():
    secret = ["--secret", f"id=ca,src={CA}"] if CA else []
    words = ["build", "--tag", CHILD, "--build-arg", f"SLIPWAY={IMAGE}", *secret, "--file"]
    command = [image_engine.client(), *words, "docker/downstream.Dockerfile", "."]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"DOCKER_BUILDKIT": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def in_child(line: str, **kwargs) -> subprocess.CompletedProcess:
    return inside("bash", "-c", line, flags=ONLINE, image=CHILD, **kwargs)


def test_a_child_has_what_it_added_and_what_it_inherits():
    done = in_child("git --version && python -c 'import orjson, deepspeed' && make help && id -u")
    assert done.returncode == 0 and "RECIPE=mine" in done.stdout, done.stderr
    assert inside("id", "-u", flags=(), image=CHILD).stdout.strip() == "1000"


def test_the_ops_of_the_image_load_in_a_child():
    done = inside("python", "/slipway/docker/prove_ops.py", image=CHILD)
    assert done.returncode == 0 and "cpu_adam" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize("installer", ["pip install", "uv pip install --python /opt/venv/bin/python"])
def test_another_torch_is_refused_and_the_pin_named(installer):
    done = in_child(f"{installer} --dry-run torch=={ANOTHER}")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert PIN in said and ANOTHER in said, said
    assert installer.startswith("uv") or "PIP_CONSTRAINT= pip install" in said, said


def test_the_documented_way_lifts_the_pins_for_one_command():
    done = in_child(f"PIP_CONSTRAINT= pip install --dry-run --no-deps --quiet --report - torch=={ANOTHER}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["install"][0]["metadata"]["version"].startswith(ANOTHER)


@pytest.mark.parametrize("package", POPULAR)
def test_a_popular_package_moves_no_pin(package):
    done = in_child(f"pip install --dry-run --quiet --report - {package}", timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    moved = {item["metadata"]["name"].lower() for item in json.loads(done.stdout)["install"]}
    pins = {line.split("==")[0] for line in shell("cat /slipway/docker/constraints.txt").splitlines()}
    assert package in moved and not moved & pins, moved & pins


def test_a_mounted_ca_is_the_one_that_every_client_reads():
    """The bundle that is mounted is where each client's own default leads: pip, requests, httpx's ssl, curl, uv."""
    code = (
        "import os, ssl, requests, requests.utils, pip._internal.cli.main_parser; s = requests.Session();"
        "print(ssl.get_default_verify_paths().cafile);"
        "print(s.merge_environment_settings('https://x', {}, None, None, None)['verify'])"
    )
    done = in_child(f'python -c "{code}"; echo $CURL_CA_BUNDLE $PIP_CERT')
    assert done.stdout.split() == [BUNDLE] * 4, done.stdout
