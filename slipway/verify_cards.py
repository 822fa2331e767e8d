"""`make verify`: the cards are sound, our binaries have code for them, and they reach one another.

Sources: NVIDIA's "XID Errors" page (what each number means and who is at fault), nvml.h (reasons of throttling, P2P and
topology), the CUDA C++ Programming Guide on binary compatibility, data sheets for the rates of links.
"""

from itertools import pairwise, permutations
from typing import Any

from slipway.gpu import BINARIES, Live, Refused
from slipway.verify import Finding, Skip, check, failed, passed
from slipway.verify_gpu import cards

LOST = 15  # NVML_ERROR_GPU_IS_LOST
# Xids of hardware or driver; others (13, 31, 43, 45 ...) are an application's own faults.
HARDWARE = {
    "48": "an ECC error that could not be corrected",
    "63": "a memory row was remapped",
    "64": "a memory row could not be remapped",
    "74": "an NVLink error",
    "79": "the card has fallen off the bus",
    "92": "many ECC errors",
    "94": "a contained ECC error",
    "95": "an uncontained ECC error",
    "119": "the card's GSP does not answer",
}
SLOW = {0x08: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}


@check(
    "gpu-health",
    "no card is lost, throttled, or has errors that it could not correct",
    fix="run NVIDIA's DCGM diagnostics on the host (`dcgmi diag -r 3`); if they fail, replace the card",
    fixes={
        "lost": "reboot the host (a reset is not enough for a card that fell off the bus); if it happens again, look "
        "at power cables, risers, cooling and firmware, then replace the card",
        "ecc": "reset the card (`nvidia-smi --gpu-reset -i N`) or reboot, so that bad rows are remapped; replace it if "
        "errors come back",
        "throttled": "look at cooling and power: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`; training is slower "
        "on all cards by what the slowest loses",
        "xid": "look the number up on NVIDIA's XID Errors page (`dmesg` has the line); reboot before training here",
    },
    limit_s=30,
)
def check_health(machine: Live | None = None) -> Finding:
    machine = machine or Live()
    found = cards(machine)
    log = xids(machine)
    for index in found:
        problem = unsound(machine, index)
        if problem:
            key, text = problem
            seen = f" (Xid {', '.join(log)} in the kernel log)" if log else ""
            return failed("GPU {index}: {text}{seen}", key, index=index, text=text, seen=seen, xids=log)
    hard = [number for number in log or [] if number in HARDWARE]
    if hard:
        text = "; ".join(f"Xid {number}: {HARDWARE[number]}" for number in hard)
        return failed("{text}, since the host started", "xid", text=text, xids=log)
    kernel = "kernel log not readable here" if log is None else "no Xid of hardware in the kernel log"
    return passed("{count} card(s) without errors; {kernel}", count=len(found), kernel=kernel, xids=log)


def xids(machine: Live) -> list[str] | None:
    """The numbers in the kernel log, each once; None where it may not be read, as in most containers."""
    try:
        lines = machine.ask("host.xids")
    except Refused:
        return None
    # "NVRM: Xid (PCI:0000:3b:00): 79, pid=..., GPU has fallen off the bus."
    numbers = (line.partition("NVRM: Xid")[2].partition("): ")[2].partition(",")[0].strip() for line in lines)
    return list(dict.fromkeys(number for number in numbers if number.isdigit()))


def unsound(machine: Live, index: int) -> tuple[str, str] | None:
    """The key of the fix and what is wrong with a card; None if nothing is. What it has no counter for is no fault."""
    try:
        machine.ask("nvml.nvmlDeviceGetMemoryInfo", index)
        uncorrected = answer(machine, 0, "nvml.nvmlDeviceGetTotalEccErrors", index, 1, 0)
        *_, pending, broken = answer(machine, [0, 0, 0, 0], "nvml.nvmlDeviceGetRemappedRows", index)
        reasons = answer(machine, 0, "nvml.nvmlDeviceGetCurrentClocksThrottleReasons", index)
    except Refused as error:
        return ("lost", "is lost: it has fallen off the bus") if error.code == LOST else ("", error.text)
    if uncorrected:
        return "ecc", f"{uncorrected} ECC error(s) not corrected since the driver was loaded"
    if pending or broken:
        return (
            "ecc",
            "a memory row could not be remapped" if broken else "a memory row waits for a reset to be remapped",
        )
    slow = [text for bit, text in SLOW.items() if reasons & bit]
    return ("throttled", f"throttled: {', '.join(slow)}") if slow else None


def answer(machine: Live, default: Any, question: str, *arguments: Any) -> Any:
    """An answer, or `default` where the card has no such counter; a lost card still raises Refused."""
    try:
        return machine.ask(question, *arguments)
    except Refused as error:
        if error.code == LOST:
            raise
        return default


@check(
    "gpu-code",
    "torch has machine code for each card; what other binaries lack is named",
    fix="use a card from sm_70 (V100) to sm_120, or build torch for it: no pinned wheel has code",
    fixes={
        "some": "ATTN=sdpa (and no qlora, if bitsandbytes is named) trains on this card; a newer build of "
        "what is named would bring its code",
    },
    limit_s=60,
)
def check_code(machine: Live | None = None) -> Finding:
    machine = machine or Live()
    cards(machine)
    count = machine.ask("cuda.device_count")
    capabilities = sorted({tuple(machine.ask("cuda.get_device_capability", index)) for index in range(count)})
    if not capabilities:
        raise Skip("CUDA sees no card: see gpu-cuda")
    names = machine.ask("cuda.get_arch_list")
    codes = {"torch": {"sm": [name for name in names if name.startswith("sm_")], "ptx": []}}
    for distribution in BINARIES:
        try:
            codes[distribution] = machine.ask("host.architectures", distribution)
        except Refused:
            continue  # not installed, or without CUDA code
    lacking = [
        {"package": package, "card": "sm_{}{}".format(*one), "has": fits(code, one)}
        for package, code in codes.items()
        for one in capabilities
        if fits(code, one) != "code"
    ]
    shown = ", ".join("sm_{}{}".format(*one) for one in capabilities)
    figures = {"shown": shown, "packages": ", ".join(codes), "codes": codes, "lacking": lacking}
    if not lacking:
        return passed("{packages}: machine code for {shown}", **figures)
    words = {"ptx": "only PTX, compiled at first use by a driver of 12.8 or newer", "none": "no code"}
    text = "; ".join(f"{one['package']} has {words[one['has']]} for {one['card']}" for one in lacking)
    whose = "" if lacking[0]["package"] == "torch" else "some"
    return failed("{text}", whose, text=text, **figures)


def fits(code: dict[str, list[str]], capability: tuple[int, int]) -> str:
    """ "code" where there is machine code that a card of `capability` runs, else "ptx" or "none".

    Machine code runs on the same major version from its own minor version up; sm_90a runs on 9.0 alone; PTX is compiled
    for any newer card.
    """
    major, minor = capability
    for name in code["sm"]:
        number = int(name.removeprefix("sm_").rstrip("a"))
        exact = name.endswith("a")
        if number // 10 == major and (number % 10 == minor if exact else number % 10 <= minor):
            return "code"
    return (
        "ptx"
        if any(int(name.removeprefix("sm_").rstrip("a")) <= major * 10 + minor for name in code["ptx"])
        else "none"
    )


# GB/s in one direction: of one NVLink by its version, and of one PCIe lane by its generation.
NVLINK = {1: 20, 2: 25, 3: 25, 4: 25, 5: 50}
PCIE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# nvml.h, nvmlGpuTopologyLevel_t: what two cards have in common
COMMON = {0: "same board", 10: "PCIe switch", 20: "PCIe switches", 30: "host bridge", 40: "one CPU", 50: "two CPUs"}


@check(
    "gpu-links",
    "every NVLink is up, and it is known how cards reach each other",
    fix="run `nvidia-smi nvlink --status` and `dmesg | grep -i nvlink`; start the fabric manager on a machine with "
    "NVSwitch; a reboot trains the links again; if one stays down, replace the card",
    limit_s=60,
)
def check_links(machine: Live | None = None) -> Finding:
    machine = machine or Live()
    found = cards(machine)
    if len(found) < 2:
        return passed("one card: no links between cards", count=1)
    links = {index: nvlinks(machine, index) for index in found}
    down = [f"GPU {index}: {up} of {all_} NVLinks are up" for index, (up, all_, _) in links.items() if up < all_]
    kind, rate = expected(machine, found, links)
    pairs = list(permutations(found, 2))
    direct = sum(answer(machine, 6, "nvml.nvmlDeviceGetP2PStatus", a, b, 0) == 0 for a, b in pairs)
    far = max(answer(machine, 50, "nvml.nvmlDeviceGetTopologyCommonAncestor", a, b) for a, b in pairwise(found))
    figures = {"count": len(found), "kind": kind, "rate": rate, "direct": direct, "pairs": len(pairs)}
    figures |= {"far": COMMON.get(far, str(far)), "down": down}
    if down:
        return failed("{text}", text="; ".join(down), **figures)
    if direct < len(pairs):
        text = "{count} cards by {kind} ({far}), {rate:.0f} GB/s; P2P for {direct} of {pairs} pairs, the others go"
        return passed(text + " through host memory, as NCCL does by itself", **figures)
    return passed("{count} cards by {kind} ({far}), {rate:.0f} GB/s each way, P2P for all pairs", **figures)


def nvlinks(machine: Live, index: int) -> tuple[int, int, int]:
    """How many NVLinks of a card are up, how many it has, and their version; (0, 0, 0) for a card without."""
    states, version = [], 0
    for link in range(18):  # NVML_NVLINK_MAX_LINKS
        try:
            states.append(machine.ask("nvml.nvmlDeviceGetNvLinkState", index, link))
            version = version or machine.ask("nvml.nvmlDeviceGetNvLinkVersion", index, link)
        except Refused:
            break
    # a card of a kind that may have links, none of which is bridged, shows all of them down: that is no fault
    return (sum(states), len(states), version) if any(states) else (0, 0, 0)


def expected(machine: Live, found: list[int], links: dict[int, tuple[int, int, int]]) -> tuple[str, float]:
    """What joins the cards, and the GB/s in one direction that the slowest card's links give."""
    if all(up for up, _, _ in links.values()):
        return "NVLink", min(up * NVLINK.get(version, 25) for up, _, version in links.values())
    lanes = [
        answer(machine, 16, "nvml.nvmlDeviceGetMaxPcieLinkWidth", index)
        * PCIE.get(answer(machine, 3, "nvml.nvmlDeviceGetMaxPcieLinkGeneration", index), 1)
        for index in found
    ]
    return "PCIe", min(lanes)
