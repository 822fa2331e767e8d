"""The built image from outside: who it runs as, what it has, how it stops, what is not in it."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import image
import image_engine
import pytest
from containers import AS_ROOT, IMAGE, ROOT, STRICT, docker, inside, python, shell
from harness import run

pytestmark = pytest.mark.image
USERS = [("1000:0", ()), ("12345:0", ("--user", "12345:0")), ("12345:12345", ("--user", "12345:12345"))]
PROVES = "import torch, getpass; getpass.getuser(); print(torch.ones(2).sum().item())"


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads(docker("image", "inspect", IMAGE).stdout)[0]["Config"]


@pytest.fixture(scope="module")
def environ(config) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in config["Env"])


def test_started_alone_it_prints_help():
    done = inside(flags=())
    assert done.returncode == 0 and "finetune-llama" in done.stdout and "RECIPE=zero3" in done.stdout, done.stderr


@pytest.mark.parametrize(("who", "flags"), USERS)
def test_any_user_can_run_it_and_write_where_runs_write(who, flags):
    line = "id -u; id -g; touch $HOME/x $XDG_CACHE_HOME/x outputs/x"
    assert shell(line, flags=flags).split() == who.split(":")


@pytest.mark.parametrize("extra", [("--user", "12345:0"), ("--user", "12345:12345")])
def test_a_read_only_root_moves_the_caches_and_says_so_once_each(extra):
    done = inside("python", "-c", PROVES, flags=(*STRICT[2:], *extra))
    assert done.returncode == 0 and done.stdout == "2.0\n", done.stderr
    moved = [line for line in done.stderr.splitlines() if "is not writable for user 12345; using /tmp/" in line]
    assert len(moved) == 2, done.stderr


def test_without_any_place_to_write_it_says_what_to_mount():
    done = inside("true", flags=("--read-only", "--user", "12345:0", "--network", "none"))
    assert done.returncode == 2 and "--tmpfs /tmp" in done.stderr and "Traceback" not in done.stderr


def test_files_in_a_mounted_folder_belong_to_the_caller(tmp_path):
    tmp_path.chmod(0o777)
    shell("touch made", flags=("--user", "12345:54321", "--volume", f"{tmp_path}:/work", "--workdir", "/work"))
    made = (tmp_path / "made").stat()
    assert (made.st_uid, made.st_gid) == (12345, 54321)


def test_nothing_on_path_is_under_roots_home():
    line = "for d in ${PATH//:/ }; do readlink -f $d/* $d; done; readlink -f /opt/venv/bin/python"
    found = shell(line).split()
    assert len(found) > 300 and [path for path in found if path.startswith("/root")] == []


TOOLS = ["nvcc", "g++", "gcc", "c++", "ninja", "htop", "nvtop", "tensorboard", "curl", "make", "tini", "uv", "pip"]


def test_the_tools_that_people_expect_are_there():
    line = f"for tool in {' '.join(TOOLS)}; do command -v $tool >/dev/null || echo $tool; done"
    assert shell(line) == ""


def test_the_environment_is_what_tools_look_for(environ):
    assert environ["CUDA_HOME"] == "/usr/local/cuda"
    assert environ["TORCH_CUDA_ARCH_LIST"].replace("+PTX", "").split() == ["8.0", "8.6", "8.9", "9.0"]
    assert environ["NVIDIA_VISIBLE_DEVICES"] == "all" and environ["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert not [name for name in environ if "SKIP" in name], "no check is switched off"
    shell("test -x $CUDA_HOME/bin/nvcc -a -e $CUDA_HOME/lib64/libcudart.so -a -e $CUDA_HOME/include/cuda.h")


@pytest.mark.parametrize(
    ("cuda", "driver", "brand", "starts"),
    [
        ("12.4", 550, "geforce", True),
        ("12.8", 570, "geforce", True),
        ("12.0", 525, "tesla", True),
        ("12.2", 535, "tesla", True),
        ("12.2", 535, "geforce", False),
        ("11.4", 470, "tesla", False),
    ],
)
def test_the_drivers_that_may_start_it(environ, cuda, driver, brand, starts):
    """NVIDIA's rule: alternatives apart by spaces, each a list of conditions with commas."""
    known = {"cuda": tuple(map(int, cuda.split("."))), "driver": (driver,), "brand": brand}

    def holds(condition: str) -> bool:
        name, sign, value = re.fullmatch(r"(\w+)(>=|<|=)(\S+)", condition).groups()
        if name == "brand":
            return known[name] == value
        wanted = tuple(map(int, value.split(".")))
        return known[name] >= wanted if sign == ">=" else known[name] < wanted

    rule = environ["NVIDIA_REQUIRE_CUDA"]
    assert any(all(map(holds, one.split(","))) for one in rule.split()) is starts


def test_labels_tell_version_revision_and_pins(config):
    labels = config["Labels"]
    pins = dict(line.split()[0].split("==") for line in image_pins())
    told = {name.removeprefix("slipway.pin."): v for name, v in labels.items() if name.startswith("slipway.pin.")}
    assert told == pins
    assert f'version = "{labels["org.opencontainers.image.version"]}"' in (ROOT / "pyproject.toml").read_text()
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", labels["org.opencontainers.image.revision"])


def image_pins() -> list[str]:
    lines = (ROOT / "docker/requirements.in").read_text().splitlines()
    return [line for line in lines if re.match(r"[\w.-]+==", line)]


def test_versions_are_those_of_requirements_in():
    code = "import importlib.metadata as m; [print(d.name, d.version) for d in m.distributions()]"
    rows = map(str.split, python(code).splitlines())
    have = {name.lower().replace("_", "-"): version.partition("+")[0] for name, version in rows}
    want = dict(line.split()[0].split("==") for line in image_pins())
    assert {name: have.get(name) for name in want} == want


def test_no_git_cache_or_output_is_in_it():
    unwanted = "-name .git -o -name '*.whl' -o -name '*.deb' -o -name .venv -o -name id_rsa"
    venv_modules = "! -path '/usr/share/python-wheels/*'"  # Debian's own, for `python -m venv`
    assert shell(f"find / -xdev {venv_modules} \\( {unwanted} \\) -print", flags=AS_ROOT) == ""


def test_the_list_of_contents_names_every_package_with_its_licence():
    sbom = json.loads(shell("cat /usr/share/slipway/sbom.cdx.json"))
    assert sbom["bomFormat"] == "CycloneDX" and len(sbom["components"]) > 200
    named = {component["purl"].split("@")[0] for component in sbom["components"]}
    assert {"pkg:pypi/torch", "pkg:deb/debian/g++-13", "pkg:generic/nvidia-cuda-toolkit"} <= named
    assert [component["name"] for component in sbom["components"] if not component["licenses"]] == []
    assert len(shell("cat /usr/share/slipway/licences.txt").splitlines()) == len(sbom["components"])


def test_docker_stop_ends_a_command_at_once_and_leaves_no_zombie():
    name, engine = f"slipway-stop-{uuid.uuid4().hex[:8]}", image_engine.client()
    # A child that dies unwaited-for becomes the zombie of process 1, if that does not collect it.
    orphan = "(sleep 0.1 &) ; exec python -c 'import time; time.sleep(600)'"
    docker("run", "--detach", "--name", name, IMAGE, "bash", "-c", orphan)
    try:
        time.sleep(2)
        states = docker("exec", name, "ps", "-A", "-o", "stat=,comm=").stdout
        assert "python" in states and not re.search(r"^Z", states, re.MULTILINE), states
        start = time.monotonic()
        subprocess.run([engine, "stop", "--time", "30", name], check=True, capture_output=True)
        assert time.monotonic() - start < 10
        assert docker("inspect", "--format", "{{.State.ExitCode}}", name).stdout.strip() == "143"
    finally:
        docker("rm", "--force", name)


def build_copy(copy: Path, config: dict, **asked: str) -> subprocess.CompletedProcess:
    """`make image` as this image was built, or as `asked`, in a copy of the project; what is unchanged is cached."""
    asked = {name: config["Labels"][f"slipway.asked.{name}"] for name in ("base", "flash_attn")} | asked
    flags = [word for name, value in asked.items() if value for word in (f"--{name.replace('_', '-')}", value)]
    environ = {"SLIPWAY_IMAGE": "slipway-touched", "PYTHONPATH": "."}
    return run(sys.executable, "scripts/image.py", "build", *flags, cwd=copy, **environ)


@pytest.fixture
def copy(tmp_path) -> Path:
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "outputs", "__pycache__", ".*_cache")
    return shutil.copytree(ROOT, tmp_path / "slipway", ignore=ignored)


def test_a_touched_recipe_is_rebuilt_within_half_a_minute(config, copy):
    """All but the last steps are cached."""
    recipe = copy / "recipes/llama/zero3.yaml"
    recipe.write_text(f"{recipe.read_text()}# touched {uuid.uuid4()}\n")
    start = time.monotonic()
    done = build_copy(copy, config)
    seconds = time.monotonic() - start
    docker("image", "rm", "slipway-touched")
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"cached +venv \d/\d RUN", done.stdout) and seconds < 30, f"{seconds:.0f} s\n{done.stdout}"


def test_a_wheel_of_flash_attn_that_is_not_reached_names_the_other_choices(config, copy):
    pin = copy / "docker/flash_attn.json"
    closed = json.loads(pin.read_text()) | {"url": "https://127.0.0.1:9/flash_attn.whl"}
    pin.write_text(json.dumps(closed))
    done = build_copy(copy, config, flash_attn="wheel")
    assert done.returncode == 1 and "error: flash-attn's wheel was not reached: " in done.stderr, done.stderr[-3000:]
    assert "FLASH_ATTN=source compiles it" in done.stderr and "FLASH_ATTN=none leaves it out" in done.stderr


def test_make_shell_is_a_shell_in_the_image_with_this_folder():
    typed = "echo $((6 * 7)) $(id -u) $(stat -c %u .) $PWD; nvcc --version; exit\n"
    words = ["script", "--quiet", "--return", "--command", "make shell", "/dev/null"]  # on a terminal
    done = subprocess.run(words, cwd=ROOT, input=typed, capture_output=True, text=True, timeout=120)
    said = f"42 {os.getuid()} {ROOT.stat().st_uid} /work"
    assert said in done.stdout and "release 12.4" in done.stdout, done.stdout


def test_image_size_prints_layers_and_their_sum(capfd):
    assert image.print_size(image_engine.client()) == 0
    printed = capfd.readouterr().out
    assert re.search(r"[\d.]+ GB  in all", printed) and "build_venv.py" in printed
