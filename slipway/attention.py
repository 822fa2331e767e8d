"""Which attention kernel a run uses, and that it keeps packed sequences apart.

    choice = choose("auto", dtype="bfloat16", packing=True, device=Device.current())  # before the launch
    register()  # on every rank, before the model is made
    AutoModelForCausalLM.from_pretrained(..., attn_implementation=choice.name)

A packed row holds several sequences and has no attention mask; only its position ids, starting again at 0,
mark the borders. sdpa and eager turn them into a dense mask, flash_attention_2 and xformers into lengths.
transformers looks at them only under use_cache=False: SFTTrainer passes it, other callers must too.
"""

# torch, transformers and xformers are imported in functions: choose() runs before the launch, in no time.
import importlib
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

from packaging.requirements import Requirement

from slipway.errors import InputError, nearest

ATTENTION = ("auto", "sdpa", "flash_attention_2", "xformers", "eager")
# Fastest first. For packed rows sdpa needs a dense mask, tokens squared, and computes what is masked too.
_ORDER_PACKED = ("flash_attention_2", "xformers", "sdpa")
_ORDER_UNPACKED = ("flash_attention_2", "sdpa", "xformers")
_LONG_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Device:
    """What decides about kernels. `capability` is (major, minor); `flash_attn` and `xformers` say that
    the package is installed and fits the installed torch."""

    has_cuda: bool
    capability: tuple[int, int] | None
    name: str | None
    flash_attn: bool
    xformers: bool

    @classmethod
    def current(cls) -> "Device":
        """This machine; of several GPUs the weakest, because all ranks run the same kernel."""
        import torch

        if not torch.cuda.is_available():
            return cls(False, None, None, _installed("flash-attn", "flash_attn"), _xformers_fits_torch())
        weakest = min(range(torch.cuda.device_count()), key=torch.cuda.get_device_capability)
        capability, name = torch.cuda.get_device_capability(weakest), torch.cuda.get_device_name(weakest)
        return cls(True, capability, name, _flash_attn_loads(), _xformers_fits_torch())

    def __str__(self) -> str:
        return f"{self.name}, sm_{self.capability[0]}{self.capability[1]}" if self.has_cuda else "no GPU"


@dataclass(frozen=True)
class Choice:
    """`name` goes to `attn_implementation`; `reason` is one line for the console and run.json."""

    name: str
    reason: str


def choose(asked: str, *, dtype: str, packing: bool, device: Device) -> Choice:
    """The kernel for `asked`, one of ATTENTION; `dtype` is what the model computes in (bfloat16, bf16, ...).

    Raises InputError if `asked` is unknown or cannot be had here.
    """
    if asked not in ATTENTION:
        fix = f"ATTN is one of {', '.join(ATTENTION)}"
        raise InputError(f"ATTN={asked}: no such attention{nearest(asked, ATTENTION)}", fix=fix)
    dtype = _LONG_NAMES.get(dtype, dtype)
    if asked != "auto":
        obstacle = _obstacle(asked, dtype, device)
        if obstacle:
            raise InputError(f"ATTN={asked}: {obstacle[0]}", fix=f"{obstacle[1]}, or leave it to ATTN=auto")
        return Choice(asked, f"asked for{_cost(asked, packing)}")
    passed_over = ""
    for name in _ORDER_PACKED if packing else _ORDER_UNPACKED:  # sdpa, in both, always can be had
        obstacle = _obstacle(name, dtype, device)
        if not obstacle:
            break
        passed_over += f"; not {name}: {obstacle[0]}"
    rows = "packed" if packing else "unpacked"
    return Choice(name, f"fastest for {rows} {dtype} here ({device}){_cost(name, packing)}{passed_over}")


def _cost(name: str, packing: bool) -> str:
    """What to know about the kernel `name`, as a clause of the reason."""
    if name == "eager":
        return "; right but slow: whole score matrices in memory"
    if name == "sdpa" and packing:
        return "; packed rows take a dense mask, whose memory grows with the square of a micro-batch's tokens"
    return ""


def _obstacle(name: str, dtype: str, device: Device) -> tuple[str, str] | None:
    """Why `name` cannot run here and what to do about it; None if it can."""
    if name not in ("flash_attention_2", "xformers"):
        return None
    if not device.has_cuda:
        return "needs a GPU and there is none", "run on a GPU"
    if not (device.flash_attn if name == "flash_attention_2" else device.xformers):
        package = "flash-attn" if name == "flash_attention_2" else "xformers"
        return f"{package} is not installed or not made for this torch", f"install the {package} that is"
    if name == "flash_attention_2" and dtype not in ("float16", "bfloat16"):
        return f"computes in float16 or bfloat16, not in {dtype}", "ask for one of them"
    if name == "flash_attention_2" and device.capability < (8, 0):
        return f"needs sm_80 or newer, this is {device}", "use a newer card"
    if name == "xformers" and dtype == "bfloat16" and device.capability < (8, 0):
        return f"computes in bfloat16 from sm_80 on, this is {device}", "use float16"
    return None


def _installed(distribution: str, module: str) -> bool:
    # Both, because flash-attn-4 brings a module flash_attn too.
    found = any(importlib.metadata.distributions(name=distribution))
    return found and importlib.util.find_spec(module) is not None


def _flash_attn_loads() -> bool:
    """A flash-attn built for another torch is found by name and fails at import (undefined symbol)."""
    if not _installed("flash-attn", "flash_attn"):
        return False
    try:
        importlib.import_module("flash_attn_2_cuda")
    except ImportError:
        return False
    return True


def _xformers_fits_torch() -> bool:
    """xformers names the one torch it is built for; beside another one it imports but has no kernels."""
    if not _installed("xformers", "xformers"):
        return False
    needs = [Requirement(line) for line in importlib.metadata.requires("xformers") or []]
    torch = importlib.metadata.version("torch")
    return all(need.specifier.contains(torch, prereleases=True) for need in needs if need.name == "torch")


def packed_is_safe(name: str) -> bool:
    """Whether the attention `name` keeps the sequences of a packed row apart (a test proves each)."""
    return name in ATTENTION and name != "auto"


def check_packing(name: str, strategy: str = "bfd") -> None:
    """Raises InputError if sequences of a packed row would see each other: attention `name` is not known to
    keep them apart, or TRL's packing `strategy` hands out rows without borders."""
    if not packed_is_safe(name):
        raise InputError(
            f"attn_implementation={name}: not known to keep the sequences of a packed row apart",
            fix=f"use one of {', '.join(filter(packed_is_safe, ATTENTION))}, or packing: false",
        )
    if strategy == "wrapped":
        raise InputError(
            "packing_strategy=wrapped: marks no borders, so sequences of a row attend to each other",
            fix="use packing_strategy: bfd (cuts off what is over max_length) or bfd_split (keeps it)",
        )


def border_leak(model: Any) -> float:
    """How much a packed sequence sees of the one before it in `model`: 0 nothing, 1 as if no border were.

    It is the change of the second sequence's logits when the first one changes, over the same change in a row
    without border. Four forwards of 16 tokens; under ZeRO-3 all ranks call it or none.
    """
    import torch

    first, second = torch.arange(1, 9, device=model.device), torch.arange(9, 17, device=model.device)
    was_training = model.training
    model.eval()
    change = []
    for positions in (torch.cat([first, first]) - 1, torch.cat([first, second]) - 1):
        logits = []
        for start in (first, first + 16):
            inputs = {"input_ids": torch.cat([start, second])[None], "position_ids": positions[None]}
            with torch.no_grad():
                logits.append(model(**inputs, use_cache=False).logits[0, 8:])
        change.append((logits[0] - logits[1]).abs().max().item())
    model.train(was_training)
    return change[0] / change[1]


def register() -> None:
    """Makes `attn_implementation="xformers"` known to transformers in this process; may be called again.

    Raises InputError if xformers cannot be imported.
    """
    # xformers refuses a flash-attn newer than it knows, though neither interface nor kernels changed.
    os.environ["XFORMERS_IGNORE_FLASH_VERSION_CHECK"] = "1"
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface

    try:
        from xformers.ops import fmha

        from slipway.xformers_attention import attention_over, blocks
    except ImportError as error:
        raise InputError(f"ATTN=xformers: cannot import xformers ({error})", fix="use ATTN=sdpa") from error
    # xformers prefers its FlashAttention-3 from sm_80 on, but that crashes on sm_89 in the kernel for packed
    # rows (xformers issue 1338) and on sm_120 (1323). Without it torch's FlashAttention-2 or CUTLASS runs.
    fmha._set_use_fa3(torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0))
    AttentionInterface.register("xformers", attention_over(fmha.memory_efficient_attention))
    AttentionMaskInterface.register("xformers", blocks)
