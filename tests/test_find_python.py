"""Which Python `make venv` builds on and what it says without one; what of pip's settings it hands to uv."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pip_settings
import pytest
from make_venv import find_python, probe
from venv_state import Stop

ROOT = Path(__file__).resolve().parent.parent
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def python_that(folder: Path, name: str, does: str) -> Path:
    """An executable that stands for an interpreter which this machine does not have."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{does}\n")
    file.chmod(0o755)
    return file


def test_the_one_that_runs_is_used_and_never_one_inside_an_environment():
    used = find_python(sys.executable, "")
    assert Path(used).samefile(sys._base_executable) and probe(used) == (HERE, True, used)
    assert not (Path(used).parent.parent / "pyvenv.cfg").exists()


def test_another_on_path_is_found_behind_a_shim_that_does_not_run(tmp_path):
    python_that(tmp_path, "python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    old = python_that(tmp_path, "python3", "echo 3.9 1 /usr/bin/python3.9")
    python_that(tmp_path, f"python{HERE}", f'exec {sys.executable} "$@"')
    assert Path(find_python(str(old), str(tmp_path))).samefile(sys._base_executable)


def test_none_that_serves_is_said_with_what_was_found(tmp_path):
    old = python_that(tmp_path, "python3", "echo 3.9 1 /usr/bin/python3.9")
    with pytest.raises(Stop, match=r"no Python 3.11 to 3.13 on PATH \(found: 3.9\)\n  fix: install one"):
        find_python(str(old), f"{tmp_path}:/nowhere")


def test_a_missing_venv_module_is_said_with_the_package_that_brings_it(tmp_path):
    bare = python_that(tmp_path, "python3", "echo 3.12 0 /usr/bin/python3.12")
    with pytest.raises(Stop, match=r"Python 3.12 is here, but.*\n  fix: apt-get install python3.12-venv"):
        find_python(str(bare), str(tmp_path))


@pytest.mark.parametrize("name", ["make_venv.py", "venv_state.py", "help.py"])
def test_an_old_python_can_read_what_it_has_to_read(name):
    tree = ast.parse((ROOT / "scripts" / name).read_text(), feature_version=(3, 6))
    for node in ast.walk(tree):
        for note in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            assert not isinstance(note, ast.BinOp | ast.Subscript), f"{name}:{note.lineno}: quote this"


@pytest.mark.parametrize("named", ["", "own.conf", os.devnull])
def test_settings_are_read_as_pip_reads_them(tmp_path, named):
    files = {
        "xdg/pip/pip.conf": "[global]\ntimeout = 7\nproxy = http://proxy:1\ncert = /a\n",
        ".pip/pip.conf": "[global]\nextra-index-url =\n    http://one/s\n    http://two/s\ncert = /b\n",
        ".config/pip/pip.conf": "[install]\nindex-url = http://i/s\n[global]\nindex_url = http://g/s\n",
        "own.conf": "[global]\nretries = 2\ncert = /c\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "XDG_CONFIG_DIRS": str(tmp_path / "xdg"),
        "PIP_TRUSTED_HOST": "a b",
        "PIP_TIMEOUT": "9",
        "PIP_PROXY": "",
    }
    if named:
        environ["PIP_CONFIG_FILE"] = named if named == os.devnull else str(tmp_path / named)
    pip = [sys._base_executable, "-m", "pip", "config", "list"]
    answer = subprocess.run(pip, env=environ, capture_output=True, text=True)
    if "No module named pip" in answer.stderr:
        pytest.skip("the Python under .venv has no pip to compare with")
    lines = [line.split("=", 1) for line in answer.stdout.splitlines()]
    said = {key: ast.literal_eval(value) for key, value in lines if value != "''"}  # pip skips what is empty
    for section in ("global", "install", ":env:"):
        said |= {key[len(section) + 1 :]: said[key] for key in list(said) if key.startswith(section + ".")}
    wanted = {key: value for key, value in said.items() if "." not in key}
    found = pip_settings.read(environ)
    assert "timeout" in found and found == wanted
    assert ("retries" in found, "cert" in found) == (named == "own.conf", named != os.devnull)


def test_settings_reach_uv_in_its_words(tmp_path):
    settings = {
        "index-url": "http://u:p@mirror/simple",
        "extra-index-url": f"http://more/simple file://{tmp_path} file:///not/there",
        "find-links": f"{tmp_path}\n/not/here",
        "trusted-host": "mirror\nmore",
        "cert": "/ca.pem",
        "client-cert": "/me.pem",
        "proxy": "http://proxy:1",
        "timeout": "9",
        "retries": "2",
        "no-index": "true",
    }
    environ, flags, notes = pip_settings.for_uv(settings, {"https_proxy": "http://mine:1"})
    assert environ == {
        "UV_DEFAULT_INDEX": "http://u:p@mirror/simple",
        "UV_INDEX": f"http://more/simple file://{tmp_path}",
        "UV_FIND_LINKS": str(tmp_path),
        "UV_INSECURE_HOST": "mirror more",
        "UV_HTTP_TIMEOUT": "9",
        "UV_HTTP_RETRIES": "2",
        "UV_SYSTEM_CERTS": "1",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/ca.pem",
        "SSL_CLIENT_CERT": "/me.pem",
        "HTTP_PROXY": "http://proxy:1",
    }
    assert flags == ["--no-index"]
    assert notes == [
        "pip's extra-index-url file:///not/there does not exist: left out",
        "pip's find-links /not/here does not exist: left out",
    ]


def test_what_was_set_for_uv_itself_stays():
    own = {"UV_DEFAULT_INDEX": "http://own/simple", "SSL_CERT_DIR": "/own"}
    environ, flags, notes = pip_settings.for_uv({"index-url": "http://pip/simple", "cert": "/ca.pem"}, own)
    assert set(environ) == {"UV_SYSTEM_CERTS", "UV_INDEX_STRATEGY"} and not flags and not notes


def test_no_password_is_shown():
    text = "fetching https://user:hunter2@mirror/simple and http://token@other:81/x, see https://plain/x@y"
    shown = "fetching https://***@mirror/simple and http://***@other:81/x, see https://plain/x@y"
    assert pip_settings.without_secrets(text) == shown
