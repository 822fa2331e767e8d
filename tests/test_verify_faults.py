"""Plant a fault, and see its check go red with the fix for it. Each is real: a mount, a limit, a file, a dead network.

Faults in packages and in the tree are planted in copies that stand first on Python's path. What the kernel gives
(mounts, networks) is taken away in a namespace of its own, which needs root.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from harness import ROOT, run

VERIFY = [sys.executable, ROOT / "scripts" / "verify.py", "--json", "--only"]


def can_unshare() -> bool:
    return subprocess.run(["unshare", "-m", "-n", "true"], capture_output=True).returncode == 0


namespaces = pytest.mark.skipif(not can_unshare(), reason="no right to make namespaces (unshare -m -n)")


def red(done: subprocess.CompletedProcess, finding: str, *words: str) -> dict:
    """The one row, which must have failed by `finding`, with `words` in its fact or its fix."""
    assert done.returncode == 1, done.stdout + done.stderr
    [row] = json.loads(done.stdout)["checks"]
    assert (row["state"], row["finding"]) == ("failed", finding), row
    for word in words:
        assert word in row["fact"] + "\n" + row["fix"], (word, row)
    return row


def within(setting: str, check: str, *unshare: str, **environ: str) -> subprocess.CompletedProcess:
    """The check after the shell words `setting`, in a namespace of its own."""
    command = " ".join(map(str, [*VERIFY, check]))
    return run("unshare", *unshare, "sh", "-c", f"{setting} && exec {command}", timeout=150, **environ)


# --- packages


def overlay(folder: Path, name: str) -> Path:
    """A copy of a distribution's metadata, which stands before the installed one."""
    source = Path(metadata.distribution(name)._path)
    shutil.copytree(source, folder / source.name)
    return folder / source.name


def test_a_wrong_version_is_named(tmp_path):
    info = overlay(tmp_path, "rich") / "METADATA"
    info.write_text(info.read_text().replace(f"Version: {metadata.version('rich')}", "Version: 1.2.3", 1))
    done = run(*VERIFY, "pins", PYTHONPATH=str(tmp_path))
    red(done, "pins", "rich is 1.2.3, pinned ", "make venv")


def copy_of_xformers(folder: Path) -> Path:
    """xformers as links to the installed one, but for its compiled library, which is a copy to be broken."""
    source = Path(metadata.distribution("xformers").locate_file("xformers"))
    (folder / "xformers").mkdir()
    for entry in source.iterdir():
        if entry.name != "_C.so":
            (folder / "xformers" / entry.name).symlink_to(entry)
    shutil.copy(source / "_C.so", folder / "xformers" / "_C.so")
    return folder / "xformers" / "_C.so"


def test_a_library_that_was_cut_off_is_named(tmp_path):
    library = copy_of_xformers(tmp_path)
    os.truncate(library, library.stat().st_size // 2)
    overlay(tmp_path, "xformers")
    done = run(*VERIFY, "files", PYTHONPATH=str(tmp_path))
    red(done, "files", f"xformers/_C.so has {library.stat().st_size} bytes of ", "make venv")


def test_a_library_whose_bytes_are_corrupted_does_not_load(tmp_path):
    with copy_of_xformers(tmp_path).open("r+b") as file:
        file.write(b"\0" * 64)  # its ELF header
    overlay(tmp_path, "xformers")
    done = run(*VERIFY, "imports", timeout=120, PYTHONPATH=str(tmp_path))
    red(done, "imports", "_C.so: ", "invalid ELF header", "make venv")


def test_an_op_that_cannot_be_built_is_named(tmp_path):
    nothing = {
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
        "CXX": "no-such-compiler",
        "PATH": str(Path(sys.executable).parent),
    }
    done = run(*VERIFY, "ops", timeout=200, **nothing)
    red(done, "ops", "cannot be built", "install a C++ compiler")


def test_a_toolkit_of_another_major_version_is_refused(tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    done = run(*VERIFY, "cuda", timeout=120, CUDA_HOME=str(tmp_path))
    red(done, "cuda", "toolkit 11.8", "set CUDA_HOME to a toolkit of the major version")


# --- the tree


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of what verify reads of the tree; its own slipway is imported, which is first on the path."""
    for folder in ("slipway", "ds_configs", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "check", "words"),
    [
        (
            "ds_configs/zero2.json",
            "zero_optimization",
            "zero_optimisation",
            "ds-configs",
            ["zero2.json", "did you mean"],
        ),
        ("ds_configs/zero3.json", '"stage": 3,', '"stage": 3', "ds-configs", ["zero3.json:", "no valid JSON"]),
        (
            "recipes/llama/lora.yaml",
            "learning_rate:",
            "learning_rat:",
            "recipes",
            ["lora.yaml:", 'mean "learning_rate"'],
        ),
    ],
)
def test_a_typo_in_the_tree_is_named(tree, file, old, new, check, words):
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new, 1))
    red(run(*VERIFY, check, timeout=150, PYTHONPATH=str(tree)), check, *words)


# --- the machine


@namespaces
def test_64_mib_of_shm_are_too_few_and_the_flag_is_given():
    done = within("mount -t tmpfs -o size=64m none /dev/shm", "shm", "-m")
    red(done, "shm", "0.06 GiB free of 0.06", "docker run --shm-size=16g")


@namespaces
def test_a_cache_that_is_read_only_is_named(tmp_path):
    done = within(f"mount -t tmpfs -o ro none {tmp_path}", "caches", "-m", HF_HOME=str(tmp_path))
    red(done, "caches", f"HF_HOME: {tmp_path} (Read-only file system)", "set HF_HOME to folders", "docker run -v")


@namespaces
def test_a_full_disk_is_named(tmp_path):
    done = within(f"mount -t tmpfs -o size=50m none {tmp_path}", "disk", "-m", SLIPWAY_CACHE=str(tmp_path))
    red(done, "disk", f"{tmp_path}: 0.0 GiB free of 2.0 needed", "SLIPWAY_CACHE=")


@namespaces
def test_a_uid_without_a_name_is_named(tmp_path):
    (tmp_path / "passwd").touch()
    (tmp_path / "nsswitch.conf").write_text("passwd: files\n")  # else systemd's module knows root by heart
    mounts = " && ".join(f"mount --bind {tmp_path}/{name} /etc/{name}" for name in ("passwd", "nsswitch.conf"))
    nameless = {"USER": "", "LOGNAME": "", "LNAME": "", "USERNAME": ""}
    done = within(mounts, "user", "-m", **nameless)
    red(done, "user", "UID 0 has no line in /etc/passwd", "docker run -e USER=me -e HOME=/tmp")


@namespaces
def test_ranks_that_cannot_reach_each_other_are_named():
    done = within("true", "all-reduce", "-n")  # a new network, whose loopback is down
    red(done, "all-reduce", "127.0.0.1 cannot be reached: Network is unreachable", "let processes reach 127.0.0.1")


@pytest.mark.parametrize(
    ("limit", "check", "words"),
    [
        (resource.RLIMIT_MEMLOCK, "memlock", ["0.02 MiB may be locked", "docker run --ulimit memlock=-1"]),
        (resource.RLIMIT_NOFILE, "open-files", ["256 open files", "docker run --ulimit nofile=65536:65536"]),
    ],
)
def test_a_low_limit_is_named(limit, check, words):
    low = {resource.RLIMIT_MEMLOCK: 16 * 1024, resource.RLIMIT_NOFILE: 256}[limit]
    command = [str(word) for word in [*VERIFY, check]]
    lowered = (
        f"import resource, os, sys; resource.setrlimit({limit}, ({low}, {low})); os.execv(sys.argv[1], sys.argv[1:])"
    )
    red(run(sys.executable, "-c", lowered, *command), check, *words)


def test_a_clock_that_is_behind_is_named(tmp_path):
    overlay(tmp_path, "torch")
    far = 4_000_000_000  # in 2096: as if torch had been installed then
    os.utime(tmp_path, (far, far))
    red(run(*VERIFY, "clock", PYTHONPATH=str(tmp_path)), "clock", "days before torch was installed", "timedatectl")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("SSL_CERT_FILE", "{d}/none.pem", ["SSL_CERT_FILE={d}/none.pem"]),
        ("REQUESTS_CA_BUNDLE", "{d}/empty.pem", ["REQUESTS_CA_BUNDLE={d}/empty.pem"]),
        ("HTTPS_PROXY", "http://proxy:notaport", ["HTTPS_PROXY is no address"]),
    ],
)
def test_a_proxy_or_ca_file_that_is_none_is_named(variable, value, words, tmp_path):
    (tmp_path / "empty.pem").write_text("no certificate\n")
    value, words = value.format(d=tmp_path), [word.format(d=tmp_path) for word in words]
    red(run(*VERIFY, "proxy", **{variable: value}), "proxy", *words, f"correct {variable}")


def test_a_proxys_password_is_not_shown():
    done = run(*VERIFY, "proxy", HTTPS_PROXY="http://me:secret@proxy.corp:3128")
    assert "http://proxy.corp:3128" in done.stdout and "secret" not in done.stdout + done.stderr
