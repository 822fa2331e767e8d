"""What holds of the whole tree: one place for versions, no machine's name, short files, arrows one way."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import lint
import pins
import pytest

ROOT = Path(__file__).resolve().parent.parent
PINS = pins.pins(pins.WANTED.read_text())
LOCK = pins.LOCK.read_text()


@cache
def pages() -> dict[str, str]:
    """Path from the root -> text, of each file that git knows or would take."""
    found = {}
    for file in lint.files("*"):
        try:
            found[file.relative_to(ROOT).as_posix()] = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture holds no line of text
    assert {"Makefile", "scripts/pins.py", "docker/requirements.in", "LICENSE"} <= set(found)
    return found


def python_files(folder: str) -> list[str]:
    found = [name for name in pages() if name.startswith(f"{folder}/") and name.endswith(".py")]
    assert found, f"no Python file in {folder}"
    return found


def lines_with(pattern: str) -> list[str]:
    found = []
    for name, text in pages().items():
        numbered = enumerate(text.splitlines(), 1)
        found += [f"{name}:{number}: {line}" for number, line in numbered if re.search(pattern, line)]
    return found


def test_no_pinned_version_stands_outside_requirements():
    versions = "|".join(re.escape(pin.version) for pin in PINS)
    literal = re.compile(rf"(?<![\w.])(?:{versions})(?![\w.]*\d)")
    requirement = re.compile(rf"\b(?:{'|'.join(re.escape(pin.name) for pin in PINS)})==\d")
    found = []
    for name, text in pages().items():
        if not name.startswith("docker/requirements."):
            own = text.replace(pins.table(PINS), "") if ROOT / name in pins.PAGES else text
            if name == "pyproject.toml":  # Slipway's own version, which may be the number of a pin
                own = own.replace(f'\nversion = "{tomllib.loads(own)["project"]["version"]}"\n', "\n")
            found += [f"{name}: {match[0]}" for match in literal.finditer(own)]
            # a test may make up a requirement, to see what is said of it
            found += [f"{name}: {match[0]}" for match in requirement.finditer(own) if not name.startswith("tests/")]
    assert not found


def test_requirements_pin_each_package_once_with_a_reason():
    names = [pin.name for pin in PINS]
    assert len(names) > 20 and len(names) == len(set(names))
    with pytest.raises(ValueError, match=r"requirements\.in:1"):
        pins.pins("torch>=2\n")


def test_the_lock_has_hashes_for_each_requirement_and_names_no_index():
    assert not re.search(r"://|--index|--find-links|--extra-index|\bfile:", LOCK)
    blocks = re.split(r"\n(?=\S)", LOCK.rstrip())
    requirements = [block for block in blocks if not block.startswith("#")]
    assert len(requirements) > 80
    pinned = re.compile(r"[\w.-]+==\S+(?: ; [^\n]+?)? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\\n)?)+")
    assert [block for block in requirements if not pinned.fullmatch(block)] == []


def test_the_lock_holds_each_pin():
    assert [pin.name for pin in PINS if f"\n{pin.name}=={pin.version} " not in LOCK] == []


def test_drift_is_found_in_the_table_and_in_the_lock():
    page = f"# x\n{pins.BEGIN}\nold\n{pins.END}\nrest\n"
    new = pins.with_table(page, PINS)
    assert new.endswith(f"{pins.END}\nrest\n") and f"| torch | {PINS[0].version} |" in new and "old" not in new
    assert pins.with_table(new, PINS) == new
    assert pins.drift(new, new, "x") == [] and "-old" in pins.drift(page, new, "README.md")
    with pytest.raises(ValueError, match=r"a page has no line"):
        pins.with_table("# x\n", PINS)


def test_no_registry_host_and_no_machine_path():
    dot = r"\."  # the names are put together here, so that this file holds none of them
    hosts = [f"{name}{dot}org" for name in ("py" + "pi", "python" + "hosted", "deb" + dot + "debian")]
    hosts += [f"registry{dot}" + "npmjs", "/" + r"work/(?:main|shared|\.)", "/" + "root/", "/" + r"home/\w"]
    assert lines_with("|".join(hosts)) == []


def test_no_file_is_over_300_lines():
    data = ("LICENSE", "docker/requirements.lock")
    code = {name: text for name, text in pages().items() if name not in data and not name.endswith(".md")}
    assert {name: text.count("\n") for name, text in code.items() if text.count("\n") > 300} == {}


def test_modules_are_named_after_what_they_hold():
    empty = ("utils", "helpers", "common", "core")
    assert [name for name in python_files("slipway") if Path(name).stem in empty] == []


def imported(name: str) -> set[str]:
    """The top-level names that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(pages()[name], name)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


ARROWS = {"slipway": ["scripts", "recipes", "tests"], "recipes": ["scripts", "tests"], "scripts": ["tests"]}


@pytest.mark.parametrize("folder", ARROWS)
def test_arrows_go_one_way(folder):
    """Makefile -> scripts, recipes -> slipway; nothing imports tests: not by folder, not by file name."""
    names = {*ARROWS[folder], *(Path(name).stem for far in ARROWS[folder] for name in python_files(far))}
    names -= sys.stdlib_module_names
    for name in python_files(folder):
        assert not imported(name) & names, f"{name} imports {imported(name) & names}"


def test_scripts_and_tests_shadow_no_module():
    """A script's folder comes first on its path: venv.py there would be taken for the standard library's."""
    taken = sys.stdlib_module_names | {pin.name.replace("-", "_") for pin in PINS}
    ours = python_files("scripts") + python_files("tests")
    assert [name for name in ours if Path(name).stem in taken] == []


def test_python_versions_agree():
    project = tomllib.loads(pages()["pyproject.toml"])["project"]
    low = re.match(r">=(3\.\d+),<3\.\d+$", project["requires-python"])[1]
    assert f'"{low}"' in pages()["scripts/pins.py"]
    assert f'target-version = "py{low.replace(".", "")}"' in pages()["pyproject.toml"]


@pytest.mark.parametrize("worst", ["lint", "image"])
def test_ci_runs_every_step_and_ends_with_the_worst_exit_code(worst, tmp_path):
    """The real .ci/run, with commands that only say that they were called."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    stubs = {
        "make": f"""case $1 in {worst}) exit 12;; test) echo "7 passed";;
image-test) echo "inside the image, tests: 8 passed"; exit 1;; esac""",
        "python3": "exit 2",
    }
    for name, rest in stubs.items():
        (tmp_path / name).write_text(f'#!/bin/sh\necho called {name} "$@"\n{rest}\n')
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SSL_CERT_FILE": "/a b.pem"}
    done = subprocess.run([tmp_path / ".ci/run"], env=env, capture_output=True, text=True)
    called = [line.removeprefix("called ") for line in done.stdout.splitlines() if line.startswith("called ")]
    assert called == [
        "make lint",
        "make test ARGS=-m 'not image'",
        "python3 scripts/image_engine.py",
        "make image BASE=standin FLASH_ATTN=none CA_BUNDLE=/a b.pem",
        "make image-test CA_BUNDLE=/a b.pem",
    ]
    assert (done.returncode, done.stderr) == (12, "")
    *steps, first, last = done.stdout.splitlines()[-7:]
    codes = {"lint": 0, "test": 0, "engine": 2, "image": 0, "image-test": 1} | {worst: 12}
    assert {re.match(r"(\S+) +exit code +(\d+) +\d+ s$", step).groups() for step in steps} == {
        (name, str(code)) for name, code in codes.items()
    }
    assert first == "tests, -m 'not image': 7 passed"
    assert last == "inside the image, tests: 8 passed"
