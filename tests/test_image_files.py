"""The image before it is built: Dockerfile, the scripts it runs, how an engine is found, how a build is read."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import image
import image_base
import image_engine
import image_log
import pytest

from slipway.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
# An instruction with its continued lines, comments between them left out.
INSTRUCTIONS = re.findall(
    r"^([A-Z]+) ((?:.*\\\n)*.*)$", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE), re.MULTILINE
)


def instructions(name: str) -> list[str]:
    found = [text for word, text in INSTRUCTIONS if word == name]
    assert found, f"no {name} in the Dockerfile"
    return found


def test_every_arg_is_used():
    for text in instructions("ARG"):
        name = text.partition("=")[0]
        used = re.findall(rf"\$\{{{name}\}}", DOCKERFILE)
        # debconf reads this one from the environment
        assert used or name == "DEBIAN_FRONTEND", name


def test_every_copied_file_exists_and_is_sent_to_the_engine():
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    missing = []
    for text in instructions("COPY"):
        if "--from" in text:
            continue
        for source in text.split()[:-1]:
            missing += [] if (ROOT / source).exists() else [source]
            assert source == "." or source.split("/")[0] in sent, f"{source} is ignored by .dockerignore"
    assert missing == []


def test_every_stage_that_is_copied_from_exists():
    stages = re.findall(r" AS (\S+)", DOCKERFILE)
    assert set(re.findall(r"from=([\w-]+)", DOCKERFILE)) <= set(stages) and len(stages) == len(set(stages)) > 4


def test_every_run_has_a_reason_above_it():
    lines = DOCKERFILE.splitlines()
    runs = [number for number, line in enumerate(lines) if line.startswith("RUN ")]
    assert len(runs) > 5
    assert [lines[number] for number in runs if not lines[number - 1].startswith("# ")] == []


def test_the_public_base_is_pinned_by_digest():
    assert re.search(r"^ARG BASE=debian:trixie-slim@sha256:[0-9a-f]{64}$", DOCKERFILE, re.MULTILINE)


def test_no_frontend_is_downloaded_and_no_heredoc_is_used():
    assert "syntax=" not in DOCKERFILE.partition("\nFROM")[0].replace("`# syntax=`", "") and "<<" not in DOCKERFILE


def test_the_builds_output_is_summed_by_stage():
    reader = image_log.Reader()
    lines = ["#8 [toolkit 2/3] RUN --mount=type=cache,target=/x a tool", "#8 0.5 it says", "#8 DONE 12.5s"]
    lines += ["#9 [toolkit 3/3] COPY a b", "#9 CACHED", "#4 [1/2] FROM x", "#4 DONE 0.5s", "#7 DONE 9.9s"]
    printed = [text for line in lines for text in reader.read(line)]
    assert reader.stages == {"toolkit": 12.5, "last": 0.5}
    assert printed[0].split() == ["12.5", "s", "toolkit", "2/3", "RUN", "a", "tool"] and "cached" in printed[1]
    assert reader.last() == ["it says"]


@pytest.fixture
def no_docker(tmp_path, monkeypatch) -> str:
    """A PATH on which there is a shell and no docker; the place that is looked at besides PATH is empty too."""
    (tmp_path / "sh").symlink_to("/bin/sh")
    monkeypatch.setattr(image_engine, "ALSO", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    return str(tmp_path)


def test_a_missing_client_is_said_with_what_to_install(no_docker):
    with pytest.raises(InputError, match="no docker client on PATH") as stop:
        image_engine.client()
    assert "docker.io" in stop.value.fix


@pytest.mark.parametrize(("says", "able"), [("20.10.24+dfsg1", True), ("28.2.2", False)])
def test_a_client_that_cannot_use_buildkit_is_passed_over(no_docker, says, able):
    stub = Path(no_docker) / "docker"
    stub.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "Docker version {says}, build 1" && exit 0\nexit 1\n')
    stub.chmod(0o755)
    assert image_engine.has_buildkit(str(stub)) is able
    said = "no Docker engine answers" if able else "cannot build with BuildKit"
    with pytest.raises(InputError, match=said):
        image_engine.client()


@pytest.mark.parametrize(("text", "said"), [(None, "No such file"), ("hello", "no BEGIN CERTIFICATE")])
def test_a_ca_that_is_none_is_refused_before_the_build(tmp_path, text, said):
    file = tmp_path / "ca.pem"
    if text:
        file.write_text(text)
    with pytest.raises(InputError, match=said):
        image.checked_ca(file)


def test_standin_says_what_it_needs(no_docker):
    (Path(no_docker) / "docker").symlink_to("/bin/false")
    with pytest.raises(InputError, match="needs root and debootstrap"):
        image_base.standin("/bin/false")


def script(name: str):
    """A script of docker/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docker" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_flash_attn_that_cannot_be_had_names_the_other_choices(tmp_path, capsys, monkeypatch):
    builder = script("build_flash_attn")
    wheel = tmp_path / "flash.whl"
    wheel.write_bytes(b"not the wheel")
    pin = json.loads(builder.PIN.read_text())
    for url, said in ((f"file://{wheel}.gone", "was not reached"), (f"file://{wheel}", "has sha256")):
        (tmp_path / "pin.json").write_text(json.dumps(pin | {"url": url}))
        monkeypatch.setattr(builder, "PIN", tmp_path / "pin.json")
        assert builder.main("wheel", tmp_path / said) == 2
        printed = capsys.readouterr().err
        assert said in printed and "FLASH_ATTN=source" in printed and "FLASH_ATTN=none" in printed
        assert list((tmp_path / said).glob("*.whl")) == []
    assert builder.main("whel", tmp_path / "typo") == 2 and "FLASH_ATTN=whel" in capsys.readouterr().err


def test_flash_attns_wheel_is_for_the_torch_python_and_abi_of_the_image():
    pin = json.loads((ROOT / "docker/flash_attn.json").read_text())
    torch = re.search(r"^torch==(\d+\.\d+)", (ROOT / "docker/requirements.in").read_text(), re.MULTILINE)[1]
    assert f"flash_attn-{pin['version']}%2Bcu12torch{torch}cxx11abiTRUE-cp313-cp313-linux_x86_64" in pin["url"]


def test_the_ops_builder_promises_each_op_once_for_an_accelerator():
    text = (ROOT / "docker/build_ops.py").read_text()
    assert "-march=x86-64-v3" in text and "native" not in text


def test_record_follows_what_the_build_changes_and_nothing_else(tmp_path):
    record = tmp_path / "x-1.dist-info" / "RECORD"
    record.parent.mkdir()
    kept, changed, gone, added = (tmp_path / "x" / name for name in ("kept.py", "changed.py", "gone.so", "a, b.so"))
    changed.parent.mkdir()
    record.write_text(
        "x/changed.py,sha256=old,3\nx/gone.so,sha256=old,9\nx/kept.py,sha256=as,5\nx-1.dist-info/RECORD,,\n"
    )
    changed.write_text("")
    added.write_bytes(b"abc")
    script("dist_record").update(record, [changed, gone, added])
    assert record.read_text().splitlines() == [
        "x-1.dist-info/RECORD,,",
        '"x/a, b.so",sha256=ungWv48Bz-pBQUDeXa4iI7ADYaOWF3qctBD_YfIAFa0,3',
        "x/changed.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0",
        "x/kept.py,sha256=as,5",
    ], "kept.py is missing, and RECORD still says so"
    assert not kept.exists()


ENTRY = [sys.executable, "-I", str(ROOT / "docker/entry.py")]


def entry(*command: str, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run([*ENTRY, *command], env=os.environ | environ, capture_output=True, text=True)


def test_a_cache_that_cannot_be_written_is_replaced_with_one_line(tmp_path):
    gone, other = tmp_path / "gone", tmp_path / "tmp"
    other.mkdir()
    show = "import os; print(os.environ['XDG_CACHE_HOME'], os.environ['HF_HOME'], os.environ['HOME'])"
    values = {"XDG_CACHE_HOME": str(gone), "HF_HOME": f"{gone}/hf", "HOME": str(tmp_path), "TMPDIR": str(other)}
    done = entry(sys.executable, "-c", show, **values)
    cache, hub, home = done.stdout.split()
    assert cache.startswith(str(other)) and hub == f"{cache}/hf" and home == str(tmp_path)
    assert done.stderr.splitlines() == [f"slipway: {gone} is not writable for user {os.getuid()}; using {cache}"]


def test_the_entry_point_names_a_command_that_is_not_there(tmp_path):
    done = entry("no-such-command", XDG_CACHE_HOME=str(tmp_path), HOME=str(tmp_path))
    assert done.returncode == 127 and "error: no-such-command: No such file" in done.stderr
    done = entry("false", XDG_CACHE_HOME=str(tmp_path), HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
