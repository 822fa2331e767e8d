"""`make venv` for real, in a small copy of this project whose lock holds uv and setuptools only.

The wheels of those two are packed from what is installed here, so nothing is asked of an index. That the
whole lock installs is shown by CI itself: `make test` in a fresh clone starts with it.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import fill_venv
import pytest
from venv_state import MAKING, STAMP, Stop

ROOT = Path(__file__).resolve().parent.parent


def packed(name: str, folder: Path) -> str:
    """Packs an installed distribution into a wheel in `folder`; its line for a lock."""
    dist = importlib.metadata.distribution(name)
    tag = next(line for line in dist.read_text("WHEEL").splitlines() if line.startswith("Tag: "))[5:]
    wheel = folder / f"{name}-{dist.version}-{tag}.whl"
    left_out = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
    with zipfile.ZipFile(wheel, "w") as archive:
        record = []
        for file in dist.files:
            if file.name in left_out or file.suffix == ".pyc":
                continue
            script = f"{name}-{dist.version}.data/scripts/{file.name}"
            arc = script if ".." in file.parts else file.as_posix()
            archive.write(dist.locate_file(file), arc)
            record.append(f"{arc},,")
        archive.writestr(f"{name}-{dist.version}.dist-info/RECORD", "\n".join(record) + "\n")
    return f"{name}=={dist.version} \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


class Project:
    """A copy of this project's set-up with the small lock."""

    def __init__(self, root: Path):
        self.root, self.venv, self.lock = root, root / ".venv", root / "docker" / "requirements.lock"
        wheels = root / "wheels"
        for folder in (wheels, root / "docker", root / "scripts", root / "slipway"):
            folder.mkdir(parents=True)
        for file in ("fill_venv.py", "make_venv.py", "pip_settings.py", "venv_state.py"):
            shutil.copy(ROOT / "scripts" / file, root / "scripts")
        shutil.copy(ROOT / "pyproject.toml", root)
        (root / "slipway" / "__init__.py").touch()
        self.lock.write_text(packed("setuptools", wheels) + packed("uv", wheels))
        ours = ("PIP_", "UV_", "SLIPWAY_", "PYTHON", "VIRTUAL_ENV")
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith(ours)} | {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
            "UV_CACHE_DIR": str(root / "uv-cache"),
        }

    def start(self, **environ: str) -> subprocess.Popen:
        command = [sys.executable, "scripts/make_venv.py"]
        env = {k: v for k, v in (self.environ | environ).items() if v}
        return subprocess.Popen(command, cwd=self.root, env=env, stderr=subprocess.PIPE, text=True)

    def make(self, **environ: str) -> tuple[int, str]:
        """(exit code, what was printed) of one set-up."""
        process = self.start(**environ)
        _, printed = process.communicate(timeout=120)
        return process.returncode, printed

    @staticmethod
    def read_up_to(end: str, process: subprocess.Popen) -> str:
        printed = ""
        while not printed.endswith(end):
            letter = process.stderr.read(1)
            assert letter, f"ended without {end!r}: {printed}"
            printed += letter
        return printed

    def to_do(self) -> list[str]:
        code = "import json, venv_state as v; print(json.dumps(v.to_do(v.folder())))"
        env = self.environ | {"PYTHONPATH": str(self.root / "scripts")}
        return json.loads(subprocess.check_output([sys.executable, "-c", code], env=env))

    def change_lock(self) -> None:
        self.lock.write_text(self.lock.read_text() + "# changed\n")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    """The project with its .venv made, at the second try: the first is killed. Tests leave it made."""
    made = Project(tmp_path_factory.mktemp("setup") / "project")
    first = made.start()
    made.read_up_to("uv ...", first)
    while not Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text():  # until pip is at work
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    (made.venv / "debris").touch()
    code, made.second_try = made.make()
    assert code == 0, made.second_try
    return made


def test_one_that_was_killed_is_made_anew_once_its_children_have_ended(project):
    assert "another make is at work" in project.second_try and "half-made" in project.second_try
    assert not (project.venv / "debris").exists()


def test_a_new_venv_holds_the_lock_and_the_project_and_nothing_else(project):
    python = project.venv / "bin" / "python"
    code = "import importlib.metadata as m; print(*sorted(d.name for d in m.distributions()))"
    installed = subprocess.check_output([python, "-I", "-c", code], text=True).split()
    assert installed == ["pip", "setuptools", "slipway", "uv"]  # pip comes with every new environment
    code = "import slipway; print(slipway.__file__)"
    ours = subprocess.check_output([python, "-I", "-c", code], text=True).strip()
    assert ours == str(project.root / "slipway" / "__init__.py")
    assert (project.venv / STAMP).exists()


def test_with_nothing_to_do_it_is_silent_and_quick(project):
    seconds = []
    for _ in range(5):
        start = time.monotonic()
        assert project.make() == (0, "")
        seconds.append(time.monotonic() - start)
    assert min(seconds) < 0.2, seconds


def test_a_changed_lock_is_brought_in_without_making_anew(project):
    mark = project.venv / "mark"
    mark.touch()
    project.change_lock()
    process = project.start()
    printed = project.read_up_to("packages", process)
    project.change_lock()  # while it is at work: that is for the next time
    process.communicate(timeout=120)
    assert process.returncode == 0 and "requirements.lock changed" in printed, printed
    assert project.to_do()[0] == "sync" and project.make()[0] == 0
    assert mark.exists() and project.make() == (0, "")


def test_two_at_once_do_the_work_once(project):
    project.change_lock()
    both = [project.start(), project.start()]
    printed = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], printed
    assert sum("ready in" in text for text in printed) == 1, printed


@pytest.mark.parametrize("gone", ["bin/python", "bin/uv"])
def test_a_missing_interpreter_or_uv_is_noticed(project, gone):
    file = project.venv / gone
    file.rename(file.with_suffix(".away"))
    try:
        assert project.to_do() == ["make", "its Python or uv is gone or is another one"]
    finally:
        file.with_suffix(".away").rename(file)
    assert project.to_do() == ["", ""]


@pytest.mark.parametrize(
    "key, what", [("python", "make"), ("folder", "make"), ("root", "make"), ("project", "install")]
)
def test_a_stamp_made_for_something_else_is_noticed(project, key, what):
    stamp = project.venv / STAMP
    right = stamp.read_text()
    stamp.write_text(json.dumps(json.loads(right) | {key: "other"}))
    try:
        assert project.to_do()[0] == what
    finally:
        stamp.write_text(right)


def test_a_folder_that_it_did_not_make_is_refused_and_kept(project, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    code, printed = project.make(SLIPWAY_VENV=str(tmp_path))
    assert code == 1 and f"error: {tmp_path} was not made by this project" in printed, printed
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_inside_the_image_nothing_is_made(project, tmp_path):
    assert project.make(SLIPWAY_PYTHON=sys.executable, SLIPWAY_VENV=str(tmp_path / "v")) == (0, "")
    assert not (tmp_path / "v").exists()


@pytest.fixture
def closed_index() -> str:
    """An index on this machine where nothing listens, with a password in its address."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        return f"http://user:hunter2@127.0.0.1:{port.getsockname()[1]}/simple"


def no_network(index: str) -> dict[str, str]:
    return {"PIP_NO_INDEX": "", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": index, "PIP_RETRIES": "0"}


def said_why(code: int, printed: str) -> None:
    assert code == 1, printed
    assert "check the network, the proxy (HTTPS_PROXY), the CA file (PIP_CERT)" in printed, printed
    assert "settings on this machine: index-url)" in printed and "hunter2" not in printed, printed
    assert "Traceback" not in printed and len(printed.splitlines()) < 20, printed


def test_without_network_pip_fails_with_one_message_and_no_stamp(project, tmp_path, closed_index):
    venv = tmp_path / "new"
    said_why(*project.make(SLIPWAY_VENV=str(venv), **no_network(closed_index)))
    assert not (venv / STAMP).exists() and (venv / MAKING).exists()


def test_without_network_uv_fails_with_one_message_and_no_stamp(project, closed_index):
    right, stamp = project.lock.read_text(), (project.venv / STAMP).read_text()
    project.lock.write_text(f"{right}absent==2 \\\n    --hash=sha256:{'0' * 64}\n")
    said_why(*project.make(**no_network(closed_index)))
    assert not (project.venv / STAMP).exists()
    project.lock.write_text(right)
    (project.venv / STAMP).write_text(stamp)


def test_too_little_room_is_said(tmp_path):
    with pytest.raises(Stop) as stop:
        fill_venv.check_room({tmp_path / "not" / "there": 10**18})
    assert f"GB free for {tmp_path}/not/there" in str(stop.value) and "1000000000.0 GB" in str(stop.value)
    fill_venv.check_room({tmp_path: 1})


def test_what_uv_has_loaded_already_is_not_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(fill_venv, "INSTALLED", 5_000_000)
    cache = tmp_path / "cache"
    assert fill_venv.room_needed(tmp_path / "v", cache) == {tmp_path / "v": 5_000_000 + fill_venv.SHARED}
    cache.mkdir()
    (cache / "wheel").write_bytes(os.urandom(2_000_000))
    need = fill_venv.room_needed(tmp_path / "v", cache)[tmp_path / "v"] - fill_venv.SHARED
    assert 2_900_000 < need <= 3_000_000
    monkeypatch.setattr(fill_venv, "device", str)  # as if the two were on two filesystems
    need = fill_venv.room_needed(tmp_path / "v", cache)
    assert need[tmp_path / "v"] == 5_000_000 and 2_900_000 < need[cache] <= 3_000_000
