"""`make verify`: the driver, CUDA, and the cards that a run would see.

Each check judges the answers of slipway.gpu, so tests hold its exact finding against recorded machines. Sources of the
rules: NVIDIA's CUDA Toolkit release notes ("CUDA Toolkit and Minimum Required Driver Version for CUDA Minor Version
Compatibility") and CUDA Compatibility guide; nvml.h for the numbers of errors.
"""

from typing import Any

from slipway.gpu import Live, Refused
from slipway.verify import Finding, Skip, check, failed, passed, skipped

GIB = 2**30
NEEDED = (525, 60, 13)  # the first driver that runs any CUDA 12.x program, by minor-version compatibility
# First driver that has a CUDA version natively, and so compiles its PTX too; 12.4 is the toolkit's, 12.8 the wheels'.
NATIVE = {"12.4": (550, 54, 14), "12.8": (570, 26)}

NO_CARD = "no NVIDIA card on the PCI bus"
RESTART = "restart this container"
NVML_FIXES = {
    "gpus-flag": "docker run --gpus all (Compose: deploy.resources.reservations.devices with capabilities: [gpu]; "
    "Kubernetes: resources.limits nvidia.com/gpu); the host needs nvidia-container-toolkit",
    "no-driver": "install NVIDIA's driver on the host, 550 or newer, and load it: `modprobe nvidia`",
    "capabilities": "docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility: the driver's libraries were left out",
    "mismatch": "reboot the host: its driver was updated while the old one stayed loaded; then restart the container",
    "cgroup": f"{RESTART}: it lost its GPUs, as after `systemctl daemon-reload`; for good, on the host: `nvidia-ctk "
    "system create-dev-char-symlinks --create-all`, or Docker's native.cgroupdriver=cgroupfs",
    "permission": "let this user read and write /dev/nvidia* (docker run --group-add with the group of those files)",
    "visible": "set NVIDIA_VISIBLE_DEVICES to all, or to cards that `nvidia-smi -L` lists on the host: docker run "
    "--gpus all -e NVIDIA_VISIBLE_DEVICES=all",
    "old": "install driver 550 or newer on the host (any from 525.60.13 on will do); a container cannot bring its own",
}
# nvml.h: NVML_ERROR_NO_PERMISSION, DRIVER_NOT_LOADED, OPERATING_SYSTEM (cgroup), LIB_RM_VERSION_MISMATCH, UNKNOWN
NVML_KEYS = {4: "permission", 9: "no-driver", 17: "cgroup", 18: "mismatch", 999: "cgroup"}
NO_LIBRARY = 12  # NVML_ERROR_LIBRARY_NOT_FOUND: libnvidia-ml.so.1 comes with the driver, not with an image


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


@check(
    "gpu-driver",
    "the driver answers, and runs CUDA 12.x",
    fix="run `nvidia-smi` on the host: if it fails too, reboot the host; if not, " + RESTART,
    fixes=NVML_FIXES,
    limit_s=30,
)
def check_driver(machine: Live | None = None) -> Finding:
    machine = machine or Live()
    try:
        machine.ask("nvml.nvmlInit")
        driver = machine.ask("nvml.nvmlSystemGetDriverVersion")
    except Refused as error:
        return no_driver(machine, error)
    if version(driver) < NEEDED:
        return failed(
            "driver {driver} is too old: CUDA 12 needs {needed} or newer",
            "old",
            driver=driver,
            needed=".".join(map(str, NEEDED)),
        )
    if not machine.ask("nvml.nvmlDeviceGetCount"):
        chosen = machine.ask("host.environ", "NVIDIA_VISIBLE_DEVICES")
        return failed(
            "driver {driver} shows no card (NVIDIA_VISIBLE_DEVICES={chosen})", "visible", driver=driver, chosen=chosen
        )
    native = [cuda for cuda, first in NATIVE.items() if version(driver) >= first]
    how = f"CUDA {native[-1]} natively" if native else "CUDA 12.0 to 12.3 natively"
    if "12.8" not in native:
        how += ", 12.8 by minor-version compatibility (machine code only, no PTX)"
    return passed("driver {driver}: {how}", driver=driver, how=how, native=native)


def no_driver(machine: Live, error: Refused) -> Finding:
    """Why NVML does not start: no card at all (skipped), no --gpus, no driver, or a broken one."""
    cards, files = machine.ask("host.nvidia_devices"), machine.ask("host.device_files")
    inside = machine.ask("host.in_container")
    figures = {"cards": cards, "count": len(cards), "code": error.code, "said": error.text, "files": files}
    if error.code != NO_LIBRARY:
        key = NVML_KEYS.get(error.code, "")
        return failed("Failed to initialize NVML: {said} (code {code})", key, **figures)
    if files:
        return failed(
            "{listed} are here, but libnvidia-ml.so.1 is not", "capabilities", listed=", ".join(files), **figures
        )
    if not cards:
        return skipped(NO_CARD)
    chosen = machine.ask("host.environ", "NVIDIA_VISIBLE_DEVICES")
    if inside and chosen in ("none", "void"):
        text = "{count} NVIDIA card(s) on the PCI bus; NVIDIA_VISIBLE_DEVICES={chosen} keeps them out"
        return failed(text, "visible", chosen=chosen, **figures)
    if inside:
        return failed("{count} NVIDIA card(s) on the PCI bus, none in this container", "gpus-flag", **figures)
    return failed("{count} NVIDIA card(s) on the PCI bus, and no driver", "no-driver", **figures)


def cards(machine: Live) -> list[int]:
    """The numbers of the cards that NVML shows. Raises Skip where there are none, or no driver answers."""
    try:
        machine.ask("nvml.nvmlInit")
        found = list(range(machine.ask("nvml.nvmlDeviceGetCount")))
    except Refused as error:
        alone = error.code == NO_LIBRARY and not machine.ask("host.nvidia_devices")
        raise Skip(NO_CARD if alone else "no driver answers: see gpu-driver") from error
    if not found:
        raise Skip("the driver shows no card: see gpu-driver")
    return found


CUDA_FIXES = {
    "803": "remove the CUDA forward-compatibility libcuda from the container (LD_LIBRARY_PATH without .../compat), or "
    "update the host's driver; after a driver update, reboot the host and restart the container",
    "802": "start NVIDIA's fabric manager on the host, of the driver's exact version (`systemctl start "
    "nvidia-fabricmanager`): cards behind NVSwitch do not work without",
    "804": "remove the CUDA forward-compatibility libcuda (LD_LIBRARY_PATH without .../compat): this card has none",
    "hidden": "unset CUDA_VISIBLE_DEVICES, or name cards that are there: `nvidia-smi -L` lists them",
    "fewer": "look for the missing card in gpu-health; a card that is in MIG mode is named by its slice's UUID",
}


@check(
    "gpu-cuda",
    "CUDA starts, and torch sees the cards that the driver shows",
    fix="run `nvidia-smi` and then `python -c 'import torch; torch.cuda.init()'`: the error's number is explained in "
    "docs/troubleshooting.md",
    fixes=CUDA_FIXES,
    limit_s=60,
)
def check_cuda(machine: Live | None = None) -> Finding:
    machine = machine or Live()
    shown = len(cards(machine))
    visible = machine.ask("host.environ", "CUDA_VISIBLE_DEVICES")
    figures = {"shown": shown, "visible": visible}
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return failed("CUDA_VISIBLE_DEVICES={visible!r} hides all {shown} card(s)", "hidden", **figures)
    try:
        machine.ask("cuda.init")
        count = machine.ask("cuda.device_count")
    except Refused as error:
        key = str(error.code) if str(error.code) in CUDA_FIXES else ""
        return failed("{said}", key, said=error.text, code=error.code, **figures)
    figures["count"] = count
    if visible is not None:
        return passed("{count} of {shown} card(s), by CUDA_VISIBLE_DEVICES={visible}", **figures)
    if count < shown:
        return failed("torch sees {count} of the {shown} cards that the driver shows", "fewer", **figures)
    return passed("{count} card(s)", **figures)


TAKEN = 0.1  # share of a card's memory, beyond a desktop's 2 GiB, that makes a run fail which fits an empty card


@check(
    "gpu-cards",
    "the cards' memory is free for a run",
    fix="end what runs there (`nvidia-smi` lists processes; one in another container is seen on the host only), or "
    "choose free cards with CUDA_VISIBLE_DEVICES",
    limit_s=30,
)
def check_cards(machine: Live | None = None) -> Finding:
    machine = machine or Live()
    found = [card(machine, index) for index in cards(machine)]
    answered = [one for one in found if one]
    if not answered:
        raise Skip("no card answers: see gpu-health")
    taken = [one for one in answered if one["used_gib"] > max(2, TAKEN * one["total_gib"])]
    if taken:
        text = "; ".join(
            "GPU {index}: {used_gib:.1f} of {total_gib:.1f} GiB taken".format(**one)
            + (f" by process {', '.join(map(str, one['processes']))}" if one["processes"] else "")
            for one in taken
        )
        return failed("{text}", text=text, cards=answered)
    kinds = dict.fromkeys((one["name"], one["capability"]) for one in answered)
    names = " and ".join(f"{name} (sm_{capability})" for name, capability in kinds)
    least = min(one["free_gib"] for one in answered)
    text = "{count} x {names}, at least {least:.1f} GiB free each"
    return passed(text, count=len(answered), names=names, least=least, cards=answered)


def card(machine: Live, index: int) -> dict[str, Any] | None:
    """One card's name, capability ("90" for 9.0), memory in GiB and other processes; None if it does not answer."""
    try:
        memory = machine.ask("nvml.nvmlDeviceGetMemoryInfo", index)
        processes = machine.ask("nvml.nvmlDeviceGetComputeRunningProcesses", index)
        major, minor = machine.ask("nvml.nvmlDeviceGetCudaComputeCapability", index)
        name = machine.ask("nvml.nvmlDeviceGetName", index)
    except Refused:
        return None
    gib = {f"{key}_gib": memory[key] / GIB for key in ("total", "free", "used")}
    pids = [one["pid"] for one in processes]
    return {"index": index, "name": name, "capability": f"{major}{minor}", **gib, "processes": pids}


@check(
    "gpu-mig",
    "a card in MIG mode gives a slice that CUDA sees",
    fix="make a slice (`nvidia-smi mig -cgi ... -C`) and pass it: docker run --gpus '\"device=MIG-UUID\"', or "
    "CUDA_VISIBLE_DEVICES=MIG-UUID; or `nvidia-smi -mig 0` for the whole card",
    limit_s=30,
)
def check_mig(machine: Live | None = None) -> Finding:
    machine = machine or Live()
    split = []
    for index in cards(machine):
        try:
            split += [index] if machine.ask("nvml.nvmlDeviceGetMigMode", index)[0] else []
        except Refused:
            continue  # a card that has no MIG, or that is lost, which gpu-health says
    if not split:
        return passed("off")
    try:
        machine.ask("cuda.init")
        count = machine.ask("cuda.device_count")
    except Refused:
        count = 0
    text = ", ".join(f"GPU {index}" for index in split)
    if not count:
        return failed("MIG is on ({text}), and CUDA sees no slice", text=text, split=split)
    total = machine.ask("cuda.mem_get_info", 0)[1] / GIB
    name = machine.ask("cuda.get_device_name", 0)
    # CUDA gives a process one slice, however many there are, and NCCL does not join slices
    figures = {"text": text, "split": split, "name": name, "gib": total, "count": count}
    return passed("on ({text}): one slice, {name}, {gib:.1f} GiB; one rank (NPROC=1) is what it can run", **figures)
