"""`make verify`: what is installed is what was pinned, whole, and fits together."""

import csv
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from slipway.verify import Finding, check, failed, passed, skipped

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "docker" / "requirements.in"
LOCK = ROOT / "docker" / "requirements.lock"
EXCLUDED = ROOT / "docker" / "requirements.exclude"
SET_UP = "make the set-up anew: `rm -rf .venv && make venv`; in a container, pull or build the image again"
SHOWN = 3  # offenders that a fact names; the others are in its figures


def listed(names: list[str]) -> str:
    """The first few of `names`, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def pins() -> dict[str, str]:
    """Name -> version of each line of requirements.in."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    return dict(re.match(r"([\w.-]+)==(\S+)", line).groups() for line in lines if line and not line.startswith("#"))


@check("pins", "each package that requirements.in pins is installed in that version", fix=SET_UP, limit_s=20)
def check_pins() -> Finding:
    wanted, other, installed = pins(), [], {}
    for name, version in wanted.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "not installed"
        installed[name] = found
        if found.partition("+")[0] != version:  # the index adds a local part to torch's: +cu128
            other.append(f"{name} is {found}, pinned {version}")
    if other:
        return failed("{text}", text=listed(other), other=other, pinned=len(wanted), installed=installed)
    return passed("{pinned} direct pins, all as pinned", pinned=len(wanted), installed=installed)


@check("packages", "what each package requires of the others is installed", fix=SET_UP, limit_s=30)
def check_packages() -> Finding:
    uv = Path(sys.executable).parent / "uv"
    command = [uv, "pip", "check", "--python", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    excluded = {line for line in EXCLUDED.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"}
    lines = [line for line in done.stderr.splitlines() if line.startswith("The package ")]
    # what requirements.exclude names is left out on purpose; everything else is a finding
    wrong = [line for line in lines if re.findall(r"requires `([\w.-]+)", line) not in [[name] for name in excluded]]
    counted = re.search(r"Checked (\d+) packages", done.stderr)
    if not counted or (done.returncode and not lines):
        return failed("uv pip check said: {said}", said=done.stderr.strip()[-300:])
    if wrong:
        return failed("{text}", text=listed(wrong), wrong=wrong, packages=int(counted[1]))
    return passed("{packages} packages agree with one another", packages=int(counted[1]))


@check("files", "every installed package is whole: its files are there, in their size", fix=SET_UP, limit_s=60)
def check_files() -> Finding:
    names = re.findall(r"^([\w.-]+)==", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    broken, count = [], 0
    for dist in (dist for name in sorted(set(names)) for dist in metadata.distributions(name=name)):
        # Not dist.files: since Python 3.12 it leaves out what is missing.
        for file, _, wanted in csv.reader((dist.read_text("RECORD") or "").splitlines()):
            if not wanted:  # byte code, and RECORD itself
                continue
            count += 1
            try:
                size = Path(dist.locate_file(file)).stat().st_size
            except OSError:
                size = None
            if size != int(wanted):
                found = "is missing" if size is None else f"has {size} bytes of {wanted}"
                broken.append(f"{file} {found}")
    if broken:
        return failed("{text}", text=listed(broken), broken=broken[:100], count=len(broken))
    return passed("{files} files, each there in its size", files=count)


@check(
    "python",
    "this Python is one that the lock was made for",
    fix="install one of the Pythons that pyproject.toml's requires-python names, then `rm -rf .venv && make venv`",
    limit_s=10,
)
def check_python() -> Finding:
    import tomllib

    from packaging.specifiers import SpecifierSet

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    have = "{}.{}.{}".format(*sys.version_info)
    said = passed if SpecifierSet(wanted).contains(have) else failed
    return said("Python {version} (wanted {wanted})", version=have, wanted=wanted)


@check(
    "imports",
    "the compiled packages load",
    fix="make the set-up anew (`rm -rf .venv && make venv`, or the image); `undefined symbol` means a wheel made for "
    "another torch: install the one that the lock names",
    limit_s=60,
)
def check_imports() -> Finding:
    import ctypes

    import torch

    # By name, as xformers and bitsandbytes import beside a library that does not load, with no more than a warning.
    kind = f"cuda{torch.version.cuda.replace('.', '')}" if torch.cuda.is_available() else "cpu"
    libraries = {"xformers": "xformers/_C.so", "bitsandbytes": f"bitsandbytes/libbitsandbytes_{kind}.so"}
    for name, file in libraries.items():
        path = str(metadata.distribution(name).locate_file(file))
        if name == "xformers":
            torch.ops.load_library(path)
        else:
            ctypes.CDLL(path)
    versions = {name: metadata.version(name) for name in libraries}
    text = "torch {torch}, xformers {xformers}, bitsandbytes {bitsandbytes}"
    return passed(text, torch=torch.__version__, **versions, libraries=libraries)


@check(
    "cuda",
    "torch and DeepSpeed accept the CUDA of the toolkit beside the CUDA of the wheels",
    fix="set CUDA_HOME to a toolkit of the major version that torch's wheel has, with a host compiler that it takes "
    "(CUDA 12.4, which the image has: gcc 13 or older)",
    limit_s=60,
)
def check_cuda() -> Finding:
    import torch
    from torch.utils import cpp_extension

    wheel, home = torch.version.cuda, cpp_extension.CUDA_HOME
    nvcc = Path(home, "bin", "nvcc") if home else None
    if nvcc is None or not nvcc.exists():
        return skipped("wheels bring CUDA {wheel}; no toolkit here (no nvcc), so nothing to compare", wheel=wheel)
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    toolkit = re.search(r"release (\d+\.\d+)", said)[1]
    refused = _refused()
    if not refused:
        return passed("wheels {wheel}, toolkit {toolkit}: both checks accept the pair", wheel=wheel, toolkit=toolkit)
    text = "wheels {wheel}, toolkit {toolkit} in {home}: {error}"
    figures = {"wheel": wheel, "toolkit": toolkit, "home": home, "error": refused}
    if os.environ.get("CUDA_HOME") or torch.cuda.is_available():
        return failed(text, **figures)
    return skipped("no GPU and no CUDA_HOME, so nothing is compiled for CUDA; " + text, **figures)


def _refused() -> str:
    """What DeepSpeed's and torch's own checks say against toolkit and compiler; empty if they accept them."""
    from deepspeed.ops.op_builder.builder import CUDAMismatchException, assert_no_cuda_mismatch
    from torch.utils import cpp_extension

    os.environ.pop("DS_SKIP_CUDA_CHECK", None)  # the check is to be passed, not skipped
    compiler = cpp_extension.get_cxx_compiler()
    try:
        assert_no_cuda_mismatch("verify")
        cpp_extension._check_cuda_version(
            compiler, cpp_extension.get_compiler_abi_compatibility_and_version(compiler)[1]
        )
    except (CUDAMismatchException, RuntimeError, OSError) as error:
        return " ".join(str(error).split())[:200]
    return ""
