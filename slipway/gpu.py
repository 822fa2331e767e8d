"""The thin layer under every GPU check: one question, one plain answer, from NVML, torch.cuda or the host.

    machine = Live()
    machine.ask("nvml.nvmlDeviceGetName", 0)        # "NVIDIA H100 80GB HBM3"; a device is named by its number
    machine.ask("cuda.get_device_capability", 0)    # [9, 0]
    machine.ask("host.nvidia_devices")              # on the PCI bus, whatever driver or container

Refused is raised where a library or the system gives an error instead. Tests answer the same questions from
recordings (tests/recorded): JSON of question -> answer, which `python -m slipway.gpu FILE` writes on a real machine.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

NVIDIA = "0x10de"  # PCI vendor
DISPLAY = "0x03"  # PCI class: 0x0300 VGA, 0x0302 3D controller
TWO_DEVICES = ("nvmlDeviceGetP2PStatus", "nvmlDeviceGetTopologyCommonAncestor")
# Libraries with kernels of their own, by distribution; torch tells its architectures itself.
BINARIES = {
    "xformers": ("xformers/_C.so", "xformers/flash_attn_3/_C.so"),
    "flash-attn": ("flash_attn_2_cuda*.so",),
    "deepspeed": ("deepspeed/ops/**/*.so",),
    "bitsandbytes": ("bitsandbytes/libbitsandbytes_cuda{cuda}.so",),
}


class Refused(Exception):
    """An error for an answer: NVML's or CUDA's number (None where there is none) and its text."""

    def __init__(self, code: int | None, text: str):
        super().__init__(text)
        self.code, self.text = code, text


class Live:
    """This machine. `answers` keeps every answer given, as a recording holds it."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}

    def ask(self, question: str, *arguments: Any) -> Any:
        """The plain answer (numbers, strings, lists, dicts). Raises Refused."""
        source, function = question.split(".")
        key = spell(question, *arguments)
        try:
            self.answers[key] = {"nvml": _nvml, "cuda": _cuda, "host": _host}[source](function, *arguments)
        except Refused as error:
            self.answers[key] = {"refused": [error.code, error.text]}
            raise
        return self.answers[key]


def spell(question: str, *arguments: Any) -> str:
    """A question as recordings spell it: "nvml.nvmlDeviceGetName(0)"."""
    return f"{question}({', '.join(map(str, arguments))})"


def plain(value: Any) -> Any:
    """A library's answer as JSON can hold it."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, ctypes.Structure):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_ if not name.startswith("reserved")}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool | dict | type(None)) else str(value)


def _nvml(function: str, *arguments: Any) -> Any:
    import pynvml

    try:
        pynvml.nvmlInit()
        if function == "nvmlInit":
            return True
        devices = 2 if function in TWO_DEVICES else 1 if function.startswith("nvmlDeviceGet") and arguments else 0
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in arguments[:devices]]
        return plain(getattr(pynvml, function)(*handles, *arguments[devices:]))
    except pynvml.NVMLError as error:
        raise Refused(error.value, str(error)) from error


def _cuda(function: str, *arguments: Any) -> Any:
    import torch

    try:
        return plain(getattr(torch.cuda, function)(*arguments))
    except (RuntimeError, AssertionError) as error:
        number = re.search(r"[Ee]rror (\d{2,3})", str(error))
        raise Refused(int(number[1]) if number else None, " ".join(str(error).split())[:300]) from error


def _host(function: str, *arguments: Any) -> Any:
    return {
        "nvidia_devices": nvidia_devices,
        "device_files": lambda: sorted(map(str, Path("/dev").glob("nvidia*"))),
        "in_container": in_container,
        "environ": lambda name: os.environ.get(name),
        "xids": xids,
        "architectures": architectures,
    }[function](*arguments)


def nvidia_devices() -> list[str]:
    """PCI addresses of NVIDIA's cards. sysfs shows them in a container too, with or without --gpus."""
    found = []
    for folder in sorted(Path("/sys/bus/pci/devices").glob("*")):
        vendor, kind = ((folder / name).read_text().strip() for name in ("vendor", "class"))
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            found.append(folder.name)
    return found


def in_container() -> bool:
    """Whether this is a container: Docker, Podman and Kubernetes each leave one of these."""
    marks = (Path("/.dockerenv"), Path("/run/.containerenv"))
    return any(mark.exists() for mark in marks) or "KUBERNETES_SERVICE_HOST" in os.environ


def xids() -> list[str]:
    """The kernel log's Xid lines of NVIDIA's driver. Refused where this user may not read the log."""
    done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise Refused(None, done.stderr.strip())
    return [line for line in done.stdout.splitlines() if "NVRM: Xid" in line]


def architectures(distribution: str) -> dict[str, list[str]]:
    """{"sm": [...], "ptx": [...]}: what machine code and PTX a distribution's libraries hold, by cuobjdump.

    Refused where it is not installed or brings no CUDA code. cuobjdump comes with Triton's wheel.
    """
    try:
        root = Path(metadata.distribution(distribution).locate_file(""))
    except metadata.PackageNotFoundError as error:
        raise Refused(None, f"{distribution} is not installed") from error
    import torch

    cuda = (torch.version.cuda or "").replace(".", "")
    files = [file for pattern in BINARIES[distribution] for file in sorted(root.glob(pattern.format(cuda=cuda)))]
    found = {kind: sorted({arch for file in files for arch in _listed(file, kind)}) for kind in ("sm", "ptx")}
    if not any(found.values()):
        raise Refused(None, f"{distribution} brings no CUDA code of its own")
    return found


def _listed(library: Path, kind: str) -> set[str]:
    import triton.backends

    tool = Path(triton.backends.__file__).parent / "nvidia" / "bin" / "cuobjdump"
    flag = {"sm": "--list-elf", "ptx": "--list-ptx"}[kind]
    done = subprocess.run([tool, flag, library], capture_output=True, text=True)
    return set(re.findall(r"\.(sm_\d+a?)\.", done.stdout))


if __name__ == "__main__":
    from slipway import verify

    live = Live()
    for judge in verify.judges():
        try:
            judge(live)
        except verify.Skip as reason:
            print(f"{judge.__name__}: {reason}", file=sys.stderr)
    Path(sys.argv[1]).write_text(json.dumps(live.answers, indent=1) + "\n", encoding="utf-8")
