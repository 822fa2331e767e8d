"""Which attention kernel a run uses, and that it keeps packed sequences apart.

    choice = choose("auto", dtype="bfloat16", packing=True, device=Device.current())  # before the launch
    register(choice.name)  # on every rank, before the model is made
    AutoModelForCausalLM.from_pretrained(..., attn_implementation=choice.name)

A packed row holds several sequences and has no attention mask; only its position ids, starting again at 0,
mark the borders. eager turns them into a dense mask, flash_attention_2, xformers and our sdpa_packed into lengths.
transformers looks at them only under use_cache=False: SFTTrainer passes it, other callers must too.
"""

# torch, transformers and xformers are imported in functions: choose() runs before the launch, in no time.
import importlib
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass

from packaging.requirements import Requirement

from slipway.errors import InputError, nearest

ATTENTION = ("auto", "sdpa", "flash_attention_2", "xformers", "eager")
# Fastest first. For packed rows sdpa becomes sdpa_packed: as it is it needs a dense mask, tokens squared, and
# computes what is masked too.
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
        return f"{self.name}, sm_{self.capability[0]}{self.capability[1]}" if self.has_cuda else "a CPU"


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
        return _choice(asked, "asked for", packing)
    passed_over = ""
    for name in _ORDER_PACKED if packing else _ORDER_UNPACKED:  # sdpa, in both, always can be had
        obstacle = _obstacle(name, dtype, device)
        if not obstacle:
            break
        if device.has_cuda:  # without one nobody expects another kernel
            passed_over += f"; not {name}: {obstacle[0]}"
    rows = "packed" if packing else "unpacked"
    return _choice(name, f"fastest for {rows} {dtype} on {device}", packing, passed_over)


def _choice(name: str, why: str, packing: bool, passed_over: str = "") -> Choice:
    """The choice of the kernel `name`, with what to know about it as a clause of the reason."""
    if name == "sdpa" and packing:
        return Choice("sdpa_packed", f"{why}: each sequence of a row on its own{passed_over}")
    slow = "; right but slow: whole score matrices in memory" if name == "eager" else ""
    return Choice(name, f"{why}{slow}{passed_over}")


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


def register(name: str) -> None:
    """Makes the attention `name` known to transformers in this process, where it is not; may be called again.

    Raises InputError if xformers is asked for and cannot be imported.
    """
    if name == "sdpa_packed":
        from transformers import AttentionInterface, AttentionMaskInterface

        from slipway.packed_sdpa import packed_attention, packed_mask

        AttentionInterface.register(name, packed_attention)
        AttentionMaskInterface.register(name, packed_mask)
    elif name == "xformers":
        _register_xformers()


def _register_xformers() -> None:
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
