"""The steps that make .venv: room on disk, a bare environment, uv by pip, all else by uv, a stamp.

pip installs one package only, since it is what every Python brings; uv takes seconds where pip takes minutes.
"""

import fcntl
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pip_settings
from venv_state import LOCK, MAKING, ROOT, STAMP, Stop, inputs, say, to_do, write_stamp

INSTALLED = 8_100_000_000  # bytes that the lock takes, unpacked: du of a cold uv cache after a first run
SHARED = 200_000_000  # bytes that it takes beside a uv cache on the same filesystem, whose files are linked
FROM_TAIL = 12  # lines of a failed command's output that are shown


def fill(venv: Path, python: str) -> None:
    """Does what to_do says, by one process at a time. `python` is the interpreter to build on."""
    try:
        venv.mkdir(parents=True, exist_ok=True)
        making = (venv / MAKING).open("a")
    except OSError as error:
        fix = "name a folder that can be written: SLIPWAY_VENV=... make ..."
        raise Stop(f"cannot write {venv} ({error.strerror})", fix) from error
    with making:
        try:
            fcntl.flock(making, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"venv: another make is at work on {venv}: waiting")
            fcntl.flock(making, fcntl.LOCK_EX)
        what, why = to_do(venv)
        if what:
            say(f"venv: {'making' if what == 'make' else 'bringing up to date'} {venv}, since {why}")
            Steps(venv, making.fileno()).run(what, python)


class Steps:
    """One making of `venv`. Its children inherit the lock, so none outlives a killed parent unnoticed."""

    def __init__(self, venv: Path, lock: int):
        self.venv, self.lock, self.python = venv, lock, venv / "bin" / "python"
        self.settings = pip_settings.read(os.environ)
        self.uv_environ, self.uv_flags, notes = pip_settings.for_uv(self.settings, os.environ)
        cache = uv_cache()
        if "UV_LINK_MODE" not in os.environ and device(cache) != device(venv):
            self.uv_environ["UV_LINK_MODE"] = "copy"  # uv would find that links cannot, and warn
        self.needs = room_needed(venv, cache)
        for note in notes:
            say(f"venv: {note}")

    def run(self, what: str, python: str) -> None:
        start, made_from = time.monotonic(), inputs(self.venv)
        if what == "make":
            clear(self.venv)
            check_room(self.needs)
            self.step("a bare environment", [python, "-I", "-m", "venv", str(self.venv)])
            self.install_uv()
        (self.venv / STAMP).unlink(missing_ok=True)
        if what != "install":
            self.sync()
        self.uv("this project", "install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
        write_stamp(self.venv, made_from)
        say(f"venv: ready in {time.monotonic() - start:.0f} s")

    def sync(self) -> None:
        packages = len(re.findall(r"^[\w.-]+==", LOCK.read_text(), re.MULTILINE))
        text = f"up to {packages} packages (about 4 GB to load the first time)"
        # Compiled here once, not at each start. DeepSpeed comes as source: what builds it is held to the lock too.
        flags = ("--require-hashes", "--compile-bytecode", "--build-constraints", str(LOCK))
        self.uv(text, "sync", *flags, str(LOCK))

    def install_uv(self) -> None:
        requirement = self.venv / "uv.txt"
        requirement.write_text(locked("uv"))
        pip = [str(self.python), "-I", "-m", "pip", "install", "--quiet", "--no-input", "--no-deps"]
        command = [*pip, "--require-hashes", "--only-binary=:all:", "--requirement", str(requirement)]
        # A pip.conf may say user = true, which pip refuses inside an environment.
        self.step("uv", command, {"PIP_USER": "0"})
        requirement.unlink()

    def uv(self, text: str, command: str, *arguments: str) -> None:
        uv = [str(self.venv / "bin" / "uv"), "pip", command, "--python", str(self.python)]
        self.step(text, [*uv, *self.uv_flags, *arguments], {**self.uv_environ, "UV_NO_PROGRESS": "1"})

    def step(self, text: str, command: list[str], environ: dict[str, str] | None = None) -> None:
        """Runs one command and prints one line. Raises Stop with the end of its output if it fails."""
        start = time.monotonic()
        say(f"venv: {text} ...", end="")
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=[self.lock],
        )
        say(f" {time.monotonic() - start:.1f} s")
        if done.returncode:
            raise Stop(f"making {self.venv} failed at {text}:\n{tail(done.stdout)}", self.advice(done.stdout))

    def advice(self, output: str) -> str:
        if "No space left" in output or "os error 28" in output or "Disk quota" in output:
            return f"make room ({describe(self.needs)}), then run make again"
        used = [key for key in ("index-url", "extra-index-url", "proxy", "cert") if key in self.settings]
        return (
            "if the package index was not reached, check the network, the proxy (HTTPS_PROXY), the CA file "
            "(PIP_CERT) and the index (PIP_INDEX_URL, pip.conf; pip's settings on this machine: "
            f"{', '.join(used) or 'none'}), then run make again"
        )


def locked(package: str) -> str:
    """The lines of the lock that pin `package`, hashes included."""
    return re.search(rf"^{re.escape(package)}==.*\n(?:[ ]+--hash.*\n)+", LOCK.read_text(), re.MULTILINE)[0]


def clear(venv: Path) -> None:
    """Empties the folder, but for the lock that this process holds in it."""
    for entry in venv.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != MAKING:
            entry.unlink()


def tail(output: str) -> str:
    lines = [line for line in pip_settings.without_secrets(output).splitlines() if line.strip()]
    return "\n".join(f"  | {line}" for line in lines[-FROM_TAIL:])


def uv_cache() -> Path:
    """The folder where uv keeps what it loaded and unpacked."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(os.environ.get("UV_CACHE_DIR") or Path(home) / "uv").absolute()


def existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def device(path: Path) -> int:
    return existing(path).stat().st_dev


def room_needed(venv: Path, cache: Path) -> dict[Path, int]:
    """Bytes that a new .venv will take, by folder; as if all that is in uv's cache were of use."""
    loads = max(INSTALLED - size(cache, INSTALLED), 0)
    if device(venv) == device(cache):
        return {venv: loads + SHARED}
    return {venv: INSTALLED, cache: loads}


def size(folder: Path, enough: int) -> int:
    """Bytes on disk under `folder`; stops counting at `enough`."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            total += os.lstat(Path(where) / name).st_blocks * 512
            if total >= enough:
                return total
    return total


def check_room(needs: dict[Path, int]) -> None:
    """Raises Stop if a folder's filesystem has less room than it needs."""
    for folder, bytes_ in needs.items():
        free = shutil.disk_usage(existing(folder)).free
        if free < bytes_:
            raise Stop(
                f"{free / 1e9:.1f} GB free for {folder}, and the set-up needs {bytes_ / 1e9:.1f} GB there",
                "make room, or name folders with more: SLIPWAY_VENV for the environment, UV_CACHE_DIR for "
                "what uv loads",
            )


def describe(needs: dict[Path, int]) -> str:
    return " and ".join(f"{bytes_ / 1e9:.1f} GB for {folder}" for folder, bytes_ in needs.items())
