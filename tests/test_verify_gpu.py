"""What the GPU checks find on recorded machines, word by word. They test our logic; no GPU passed anything."""

import fnmatch
import json
from pathlib import Path

import pytest

from slipway import gpu, verify, verify_rates
from slipway.verify_cards import fits, xids

RECORDED = Path(__file__).with_name("recorded")


class Replay:
    """A slipway.gpu machine that answers from a recording; a question that it does not hold is an error of the test."""

    def __init__(self, name: str, **other):
        self.answers = json.loads((RECORDED / f"{name}.json").read_text()) | other

    def ask(self, question: str, *arguments):
        key = gpu.spell(question, *arguments)
        fitting = [one for one in self.answers if one == key] or [
            one for one in self.answers if fnmatch.fnmatchcase(key, one.replace("[", "[[]"))
        ]
        answer = self.answers[fitting[0]]
        if isinstance(answer, dict) and "refused" in answer:
            raise gpu.Refused(*answer["refused"])
        return answer


def found(name: str, machine: Replay) -> tuple[str, str, str | None]:
    """(state, fact, finding) of the check `name` on a machine, as make verify would show them."""
    [one] = verify.checks(name)
    try:
        row = verify.row(one, one.run(machine), 0.0, [])
    except verify.Skip as reason:
        return "skipped", str(reason), None
    return row.state, row.fact, row.finding


H100 = "NVIDIA H100 80GB HBM3"
CODE_5090 = "xformers has only PTX, compiled at first use by a driver of 12.8 or newer for sm_120"
# recording -> check -> (state, fact, finding)
EXPECTED = {
    "h100x8": {
        "gpu-driver": (
            "passed",
            "driver 550.54.15: CUDA 12.4 natively, 12.8 by minor-version compatibility (machine code only, no PTX)",
            None,
        ),
        "gpu-cuda": ("passed", "8 card(s)", None),
        "gpu-cards": ("passed", f"8 x {H100} (sm_90), at least 79.0 GiB free each", None),
        "gpu-mig": ("passed", "off", None),
        "gpu-health": ("passed", "8 card(s) without errors; kernel log not readable here", None),
        "gpu-code": ("passed", "torch, xformers, flash-attn, bitsandbytes: machine code for sm_90", None),
        "gpu-links": ("passed", "8 cards by NVLink (two CPUs), 450 GB/s each way, P2P for all pairs", None),
    },
    "rtx4090": {
        "gpu-driver": (
            "passed",
            "driver 560.35.03: CUDA 12.4 natively, 12.8 by minor-version compatibility (machine code only, no PTX)",
            None,
        ),
        "gpu-cards": ("passed", "1 x NVIDIA GeForce RTX 4090 (sm_89), at least 23.3 GiB free each", None),
        "gpu-health": ("passed", "1 card(s) without errors; no Xid of hardware in the kernel log", None),
        "gpu-code": ("passed", "torch, xformers, flash-attn, bitsandbytes: machine code for sm_89", None),
        "gpu-links": ("passed", "one card: no links between cards", None),
    },
    "rtx4090x2_no_p2p": {
        "gpu-links": (
            "passed",
            "2 cards by PCIe (host bridge), 32 GB/s; P2P for 0 of 2 pairs, the others go through host memory, as NCCL "
            "does by itself",
            None,
        ),
    },
    "driver470": {
        "gpu-driver": (
            "failed",
            "driver 470.199.02 is too old: CUDA 12 needs 525.60.13 or newer",
            "gpu-driver.old",
        ),
        "gpu-cuda": (
            "failed",
            "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver",
            "gpu-cuda",
        ),
    },
    "no_gpus_flag": {
        "gpu-driver": ("failed", "2 NVIDIA card(s) on the PCI bus, none in this container", "gpu-driver.gpus-flag"),
        "gpu-cuda": ("skipped", "no driver answers: see gpu-driver", None),
        "gpu-cards": ("skipped", "no driver answers: see gpu-driver", None),
    },
    "mig_slice": {
        "gpu-mig": (
            "passed",
            "on (GPU 0): one slice, NVIDIA A100-SXM4-40GB MIG 1g.5gb, 4.8 GiB; one rank (NPROC=1) is what it can run",
            None,
        ),
        "gpu-cuda": ("passed", "1 card(s)", None),
    },
    "xid79": {
        "gpu-health": (
            "failed",
            "GPU 3: is lost: it has fallen off the bus (Xid 79 in the kernel log)",
            "gpu-health.lost",
        ),
        "gpu-cuda": (
            "failed",
            "CUDA unknown error - this may be due to an incorrectly set up environment (error 999)",
            "gpu-cuda",
        ),
        "gpu-cards": ("passed", "7 x NVIDIA A100-SXM4-40GB (sm_80), at least 39.0 GiB free each", None),
    },
    "sm120": {
        "gpu-driver": ("passed", "driver 570.124.06: CUDA 12.8 natively", None),
        "gpu-code": ("failed", CODE_5090, "gpu-code.some"),
    },
    "daemon_reload": {
        "gpu-driver": ("failed", "Failed to initialize NVML: Unknown Error (code 999)", "gpu-driver.cgroup"),
        "gpu-health": ("skipped", "no driver answers: see gpu-driver", None),
    },
    "mismatch": {
        "gpu-driver": (
            "failed",
            "Failed to initialize NVML: Driver/library version mismatch (code 18)",
            "gpu-driver.mismatch",
        ),
    },
    "error803": {
        "gpu-cuda": (
            "failed",
            "Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda "
            "driver combination",
            "gpu-cuda.803",
        ),
    },
    "unwell": {
        "gpu-cards": ("failed", "GPU 0: 61.0 of 79.6 GiB taken by process 4242", "gpu-cards"),
        "gpu-health": ("failed", "GPU 1: 3 ECC error(s) not corrected since the driver was loaded", "gpu-health.ecc"),
        "gpu-links": ("failed", "GPU 3: 16 of 18 NVLinks are up", "gpu-links"),
    },
}
CASES = [(recording, name) for recording, checks in EXPECTED.items() for name in checks]


def test_every_recording_is_expected_to_show_something():
    assert {file.stem for file in RECORDED.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize(("recording", "name"), CASES)
def test_a_recorded_machine_gives_the_exact_finding(recording, name):
    assert found(name, Replay(recording)) == EXPECTED[recording][name]


# finding -> a word of its fix that must be there: the command or action that mends it
FIXES = {
    "gpu-driver.gpus-flag": "docker run --gpus all",
    "gpu-driver.old": "driver 550 or newer",
    "gpu-driver.cgroup": "nvidia-ctk system create-dev-char-symlinks",
    "gpu-driver.mismatch": "reboot the host",
    "gpu-cuda.803": "forward-compatibility",
    "gpu-health.lost": "reboot the host",
    "gpu-health.ecc": "--gpu-reset",
    "gpu-code.some": "ATTN=sdpa",
    "gpu-cards": "CUDA_VISIBLE_DEVICES",
    "gpu-links": "nvlink --status",
}


@pytest.mark.parametrize("finding", FIXES)
def test_the_fix_of_a_finding_names_what_mends_it(finding):
    recording, name = next((r, n) for r, n in CASES if EXPECTED[r][n][2] == finding)
    [one] = verify.checks(name)
    assert FIXES[finding] in verify.row(one, one.run(Replay(recording)), 0.0, []).fix


OTHERS = {  # an answer changed on the machine with eight good cards -> (check, state, words of the fact)
    "all hidden": ({"host.environ(CUDA_VISIBLE_DEVICES)": ""}, "gpu-cuda", "failed", "hides all 8"),
    "no card chosen": (
        {"nvml.nvmlDeviceGetCount()": 0, "host.environ(NVIDIA_VISIBLE_DEVICES)": "none"},
        "gpu-driver", "failed", "shows no card (NVIDIA_VISIBLE_DEVICES=none)",
    ),
    "kept out of the container": (
        {"nvml.nvmlInit()": {"refused": [12, "NVML Shared Library Not Found"]}, "host.device_files()": [],
         "host.environ(NVIDIA_VISIBLE_DEVICES)": "void"},
        "gpu-driver", "failed", "NVIDIA_VISIBLE_DEVICES=void keeps them out",
    ),
    "no right to the devices": (
        {"nvml.nvmlInit()": {"refused": [4, "Insufficient Permissions"]}}, "gpu-driver", "failed", "Insufficient",
    ),
    "libraries left out": (
        {"nvml.nvmlInit()": {"refused": [12, "NVML Shared Library Not Found"]}},
        "gpu-driver", "failed", "but libnvidia-ml.so.1 is not",
    ),
    "driver not loaded": (
        {"nvml.nvmlInit()": {"refused": [9, "Driver Not Loaded"]}}, "gpu-driver", "failed", "Driver Not Loaded",
    ),
    "some chosen": (
        {"host.environ(CUDA_VISIBLE_DEVICES)": "0,1", "cuda.device_count()": 2}, "gpu-cuda", "passed", "2 of 8 card(s)",
    ),
    "one missing": ({"cuda.device_count()": 7}, "gpu-cuda", "failed", "sees 7 of the 8"),
    "fabric manager": (
        {"cuda.init()": {"refused": [802, "Error 802: system not yet initialized"]}}, "gpu-cuda", "failed", "802",
    ),
    "forward compatibility": (
        {"cuda.init()": {"refused": [804, "Error 804: forward compatibility"]}}, "gpu-cuda", "failed", "Error 804",
    ),
    "NVML in trouble": ({"nvml.nvmlInit()": {"refused": [10, "Timeout"]}}, "gpu-driver", "failed", "Timeout (code 10)"),
    "no driver on the host": (
        {"nvml.nvmlInit()": {"refused": [12, "NVML Shared Library Not Found"]}, "host.device_files()": [],
         "host.in_container()": False},
        "gpu-driver", "failed", "8 NVIDIA card(s) on the PCI bus, and no driver",
    ),
    "a card that gives an error": (
        {"nvml.nvmlDeviceGetMemoryInfo(4)": {"refused": [999, "Unknown Error"]}}, "gpu-health", "failed", "GPU 4",
    ),
    "too hot": (
        {"nvml.nvmlDeviceGetCurrentClocksThrottleReasons(5)": 0x40}, "gpu-health", "failed", "GPU 5: throttled",
    ),
    "row not remapped": ({"nvml.nvmlDeviceGetRemappedRows(2)": [0, 1, 0, 1]}, "gpu-health", "failed", "could not"),
    "Xid of hardware": ({"host.xids()": ["x NVRM: Xid (PCI:0000:18:00): 48, DBE"]}, "gpu-health", "failed", "Xid 48"),
    "Xid of a program": ({"host.xids()": ["x NVRM: Xid (PCI:0000:18:00): 31, MMU"]}, "gpu-health", "passed", "8 card"),
    "MIG without a slice": (
        {"nvml.nvmlDeviceGetMigMode(0)": [1, 1], "cuda.device_count()": 0}, "gpu-mig", "failed", "sees no slice",
    ),
    "a card that torch lacks": ({"cuda.get_device_capability(0)": [6, 1]}, "gpu-code", "failed", "no code for sm_61"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_one_changed_answer_changes_the_finding(what):
    other, name, state, words = OTHERS[what]
    got = found(name, Replay("h100x8", **other))
    assert got[0] == state and words in got[1], got


def test_every_finding_of_the_gpu_checks_is_reached():
    reached = {finding for checks in EXPECTED.values() for _, _, finding in checks.values() if finding}
    reached |= {found(name, Replay("h100x8", **other))[2] for other, name, *_ in OTHERS.values()}
    judged = [one for one in verify.checks() if one.run in verify.judges()]
    there = {f"{one.name}.{key}" if key else one.name for one in judged for key in one.fixes}
    assert there - reached == set()


@pytest.mark.parametrize(
    ("names", "capability", "has"),
    [
        (["sm_80"], (8, 9), "code"),
        (["sm_86"], (8, 0), "none"),
        (["sm_80"], (9, 0), "none"),
        (["sm_90a"], (9, 0), "code"),
        (["sm_100", "sm_90a"], (12, 0), "none"),
    ],
)
def test_machine_code_runs_on_its_own_major_version_from_its_minor_up(names, capability, has):
    assert fits({"sm": names, "ptx": []}, capability) == has
    assert fits({"sm": [], "ptx": ["sm_80"]}, capability) == "ptx"


def test_a_kernel_log_that_may_not_be_read_is_not_taken_for_a_clean_one():
    assert xids(Replay("h100x8")) is None
    assert xids(Replay("rtx4090")) == []


@pytest.mark.parametrize(
    ("card", "rates", "state"),
    [
        (H100, {"bf16": 640, "tf32": 370}, "passed"),
        (H100, {"bf16": 640, "fp16": 240}, "failed"),
        ("a card of the future", {"bf16": 9}, "passed"),
    ],
)
def test_a_matmul_rate_far_below_the_peak_is_a_failure(card, rates, state):
    assert verify_rates.judge_matmul(card, rates).state == state


@pytest.mark.parametrize(("rate", "state"), [(380, "passed"), (30, "failed")])
def test_a_bus_bandwidth_far_below_the_links_is_a_failure(rate, state):
    got = {"ranks": 8, "mib": 256.0, "gb_per_s": rate}
    assert verify_rates.judge_bandwidth(got, "NVLink", 450).state == state
