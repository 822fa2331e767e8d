"""`make verify`: kernels compute the right thing, on the GPU where there is one, else on the CPU."""

import os
import random
from pathlib import Path
from typing import Any

from slipway import gpu
from slipway.verify import Finding, Skip, check, failed, passed

FLASH_ATTN = Path("/usr/share/slipway/flash-attn.txt")  # the image's own note: what it was built with
REBUILD = "make the set-up anew (`rm -rf .venv && make venv`, or the image), and report it with `make verify JSON=1`"


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def need_gpu(more: str = "") -> None:
    """Skip, with the reason and `more`, where torch sees no GPU; without a driver, torch is not asked."""
    if not gpu.Live().ask("host.device_files"):
        raise Skip(f"no GPU: there is no /dev/nvidia*{more}")
    import torch

    if not torch.cuda.is_available():
        raise Skip(f"no GPU that torch can use{more}")


def build_ops(offload: bool) -> None:
    """Build DeepSpeed's CPU ops, if nothing is prebuilt, as a run's launcher does: for its accelerator, too."""
    from slipway import ops, topology

    topology.prepare_environment(topology.plan(None))
    ops.prepare(offload)


def compare(name: str, kernel: Any, dtypes: dict[str, Any], where: str) -> Finding:
    """Every case in every dtype against fp64; the finding names the worst, or the first that is wrong."""
    import torch

    from slipway.attention_cases import BOUNDS, CASES, worst_error

    seed = random.SystemRandom().randrange(2**31)  # fresh inputs each time; the seed makes a failure repeatable
    torch.manual_seed(seed)
    errors: dict[str, float] = {}
    for kind, dtype in dtypes.items():
        for case in CASES:
            error = worst_error(kernel, case, dtype, where)
            if error > BOUNDS[dtype]:
                text = (
                    "{kernel} on {where}, {kind}, {case}: relative error {error:.1e}, at most {bound:.0e} (seed {seed})"
                )
                figures = {"kernel": name, "where": where, "kind": kind, "case": case.name, "seed": seed}
                return failed(text, error=error, bound=BOUNDS[dtype], **figures)
            errors[kind] = max(error, errors.get(kind, 0.0))
    text = ", ".join(f"{kind} {{{kind}:.0e}}" for kind in errors)
    text = f"{{kernel}} on {{where}}, {{cases}} cases, forward and backward, largest error: {text}"
    return passed(text, kernel=name, where=where, cases=len(CASES), seed=seed, **errors)


@check("sdpa", "torch's attention is right to rounding, forward and backward", fix=REBUILD, limit_s=60)
def check_sdpa() -> Finding:
    import torch

    from slipway import attention_cases

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if device() == "cuda":
        dtypes = {"fp32": torch.float32, "fp16": torch.float16}
        dtypes |= {"bf16": torch.bfloat16} if torch.cuda.is_bf16_supported(including_emulation=False) else {}
    return compare("sdpa", attention_cases.sdpa, dtypes, device())


@check(
    "xformers",
    "xformers' attention is right to rounding on this card",
    fix="ATTN=sdpa trains without it; the lock's xformers has kernels for the cards that README names",
    limit_s=90,
)
def check_xformers() -> Finding:
    need_gpu()
    import torch

    from slipway import attention, attention_cases

    attention.register("xformers")  # as a run does: with FlashAttention-3 only where it works
    return compare("xformers", attention_cases.xformers, {"fp16": torch.float16}, "cuda")


@check(
    "flash-attn",
    "flash-attn's kernels are right to rounding on this card",
    fix="ATTN=auto trains without it; `undefined symbol` means a wheel for another torch: install the one whose file "
    "name has this torch, Python and cxx11abiTRUE",
    limit_s=90,
)
def check_flash_attn() -> Finding:
    import importlib.util

    built = f"; the image was built with FLASH_ATTN={FLASH_ATTN.read_text().strip()}" if FLASH_ATTN.exists() else ""
    need_gpu(built)
    import torch

    if importlib.util.find_spec("flash_attn") is None:
        raise Skip(f"flash-attn is not installed{built}")
    if torch.cuda.get_device_capability()[0] < 8:
        raise Skip("flash-attn needs sm_80 or newer")
    from slipway import attention_cases

    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
    return compare("flash-attn", attention_cases.flash_attn, dtypes, "cuda")


@check(
    "packing",
    "a packed row gives the logits of its sequences alone, with each attention that can be had here",
    fix="ARGS='--packing false' trains without packing; report it with `make verify JSON=1`",
    limit_s=60,
)
def check_packing() -> Finding:
    from slipway import attention, report
    from slipway.errors import InputError

    report.quiet()
    here, errors = attention.Device.current(), {}
    for asked in attention.ATTENTION[1:]:  # all but auto
        dtype = "bfloat16" if asked == "flash_attention_2" else "float32"
        try:
            name = attention.choose(asked, dtype=dtype, packing=True, device=here).name
        except InputError:
            continue
        error = _packed_error(name, dtype)
        if not error <= PACKED_BOUNDS[dtype]:
            figures = {"name": name, "error": error, "bound": PACKED_BOUNDS[dtype]}
            return failed(
                "{name}: packed logits differ from those alone by {error:.1e} (at most {bound:.0e})", **figures
            )
        errors[name] = error
    return passed("{names}: largest error {worst:.0e}", names=", ".join(errors), worst=max(errors.values()), **errors)


PACKED_BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2}  # a border that is not kept gives an error near 1


def _packed_error(name: str, dtype: str) -> float:
    """Largest relative error of tiny-llama's logits over a packed row of three, against fp64 and each alone."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from slipway import attention, embedded

    attention.register(name)
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    config = LlamaConfig.from_json_file(embedded.TINY_CONFIG)
    exact = LlamaForCausalLM(config).to(device()).eval()
    exact.set_attn_implementation("eager")
    fast = LlamaForCausalLM(config).to(device()).eval()
    fast.load_state_dict(exact.state_dict())
    fast.set_attn_implementation(name)
    sequences = [torch.randint(config.vocab_size, (length,), device=device()) for length in (17, 1, 30)]
    positions = torch.cat([torch.arange(len(one), device=device()) for one in sequences])
    with torch.no_grad():
        packed = fast.to(getattr(torch, dtype))(
            input_ids=torch.cat(sequences)[None], position_ids=positions[None], use_cache=False
        ).logits[0]
        alone = torch.cat([exact.double()(input_ids=one[None], use_cache=False).logits[0] for one in sequences])
    return ((packed.double() - alone).abs().max() / alone.abs().max()).item()


@check(
    "ops",
    "DeepSpeed's compiled CPU ops are there; they are built here if nothing is prebuilt",
    fix="install a C++ compiler (Debian: g++), and let the folder torch_extensions in SLIPWAY_CACHE be written",
    limit_s=300,
)
def check_ops() -> Finding:
    from slipway import ops
    from slipway.errors import InputError

    try:
        build_ops(offload=True)
    except InputError as error:
        return failed("{error}", error=error.message)
    names = ops.SHM, ops.ADAM
    where = "prebuilt with DeepSpeed" if ops.prebuilt(*names) else f"in {os.environ['TORCH_EXTENSIONS_DIR']}"
    return passed("{names} {where}", names=", ".join(names), where=where)


@check(
    "cpu-adam",
    "DeepSpeed's CPUAdam steps as torch's AdamW does",
    fix="delete the folder torch_extensions in SLIPWAY_CACHE, so that the op is built for this CPU; without it: a "
    "recipe that offloads nothing",
    limit_s=300,
)
def check_cpu_adam() -> Finding:
    build_ops(offload=True)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return same_steps("CPUAdam", lambda weights: DeepSpeedCPUAdam(weights, **ADAM, adamw_mode=True), "cpu")


@check(
    "fused-adam",
    "DeepSpeed's FusedAdam steps as torch's AdamW does on this card",
    fix="set TORCH_CUDA_ARCH_LIST to this card's capability and delete the folder torch_extensions, so that the op is "
    "built for it; building needs nvcc",
    limit_s=300,
)
def check_fused_adam() -> Finding:
    need_gpu()
    from deepspeed.ops.adam import FusedAdam

    return same_steps("FusedAdam", lambda weights: FusedAdam(weights, **ADAM, adam_w_mode=True), "cuda")


ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ADAM_BOUND = (
    1e-4  # of a change of 3e-2 in weights near 1, whose own rounding is 1e-7: a wrong formula is off by far more
)


def same_steps(name: str, make: Any, where: str) -> Finding:
    """Three steps of an optimizer on random fp32 weights and gradients beside torch.optim.AdamW's."""
    import torch

    seed = random.SystemRandom().randrange(2**31)
    torch.manual_seed(seed)
    start = torch.randn(1031, 7, device=where)  # no multiple of a vector's width, so the tails are computed too
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    pairs = [(ours, make([ours])), (theirs, torch.optim.AdamW([theirs], **ADAM))]
    for _ in range(3):
        gradient = torch.randn_like(start)
        for weight, optimizer in pairs:
            weight.grad = gradient.clone()
            optimizer.step()
    moved = (theirs - start).abs().max()
    error = ((ours - theirs).abs().max() / moved).item()
    figures = {"name": name, "where": where, "error": error, "bound": ADAM_BOUND, "steps": 3, "seed": seed}
    right = error <= ADAM_BOUND
    text = "{name} on {where}, {steps} steps: differs from AdamW by {error:.0e} of the change (at most {bound:.0e})"
    return (passed if right else failed)(text, **figures)
