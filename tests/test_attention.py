"""The choice of an attention kernel: what each machine gets, what is refused, and with which words."""

import subprocess
import sys

import pytest
import torch

from slipway import attention
from slipway.attention import ATTENTION, Device, choose
from slipway.errors import InputError

NO_GPU = Device(False, None, None, flash_attn=True, xformers=True)
T4 = Device(True, (7, 5), "Tesla T4", flash_attn=True, xformers=True)
H100 = Device(True, (9, 0), "NVIDIA H100", flash_attn=True, xformers=True)
H100_NO_FLASH = Device(True, (9, 0), "NVIDIA H100", flash_attn=False, xformers=True)
H100_BARE = Device(True, (9, 0), "NVIDIA H100", flash_attn=False, xformers=False)
RTX_5090 = Device(True, (12, 0), "NVIDIA GeForce RTX 5090", flash_attn=True, xformers=True)


@pytest.mark.parametrize(
    ("device", "dtype", "packing", "expected"),
    [
        (NO_GPU, "float32", True, "sdpa_packed"),
        (NO_GPU, "bf16", False, "sdpa"),
        (T4, "fp16", True, "xformers"),
        (T4, "bf16", True, "sdpa_packed"),
        (T4, "float16", False, "sdpa"),
        (H100, "bfloat16", True, "flash_attention_2"),
        (H100, "bf16", False, "flash_attention_2"),
        (H100, "fp32", True, "xformers"),
        (H100, "float32", False, "sdpa"),
        (H100_NO_FLASH, "bf16", True, "xformers"),
        (H100_NO_FLASH, "bf16", False, "sdpa"),
        (H100_BARE, "bf16", True, "sdpa_packed"),
        (RTX_5090, "bf16", True, "flash_attention_2"),
    ],
)
def test_auto_takes_the_fastest_that_the_machine_has(device, dtype, packing, expected):
    choice = choose("auto", dtype=dtype, packing=packing, device=device)
    assert choice.name == expected
    assert (device.name or "a CPU") in choice.reason
    order = ["flash_attention_2", "xformers", "sdpa_packed"] if packing else ["flash_attention_2", "sdpa"]
    for faster in order[: order.index(expected)]:
        assert (f"not {faster}: " in choice.reason) == device.has_cuda
    assert ("each sequence of a row on its own" in choice.reason) == (expected == "sdpa_packed")
    if not device.has_cuda:
        assert len(choice.reason) <= 100, "the console shows it on one line"


@pytest.mark.parametrize(
    ("asked", "device", "dtype", "found"),
    [
        ("flash_attention_2", NO_GPU, "bf16", "needs a GPU and there is none"),
        ("xformers", NO_GPU, "bf16", "needs a GPU and there is none"),
        ("flash_attention_2", H100_BARE, "bf16", "flash-attn is not installed"),
        ("xformers", H100_BARE, "bf16", "xformers is not installed"),
        ("flash_attention_2", H100, "fp32", "not in float32"),
        ("flash_attention_2", T4, "fp16", "needs sm_80 or newer, this is Tesla T4, sm_75"),
        ("xformers", T4, "bf16", "bfloat16 from sm_80 on, this is Tesla T4, sm_75"),
        ("flash-attention-2", H100, "bf16", 'did you mean "flash_attention_2"?'),
        ("SDPA", H100, "bf16", "no such attention"),
    ],
)
def test_a_kernel_that_cannot_be_had_is_refused(asked, device, dtype, found):
    with pytest.raises(InputError) as error:
        choose(asked, dtype=dtype, packing=True, device=device)
    assert error.value.message.startswith(f"ATTN={asked}: ")
    assert found in error.value.message
    assert "auto" in error.value.fix


def test_what_can_be_had_is_taken_as_asked():
    for packing, packed in ((False, "sdpa"), (True, "sdpa_packed")):
        for asked in ATTENTION[1:]:
            expected = packed if asked == "sdpa" else asked
            assert choose(asked, dtype="bf16", packing=packing, device=H100).name == expected
        for asked, expected in (("sdpa", packed), ("eager", "eager")):
            assert choose(asked, dtype="fp32", packing=packing, device=NO_GPU).name == expected


def test_this_machine_is_read():
    device = Device.current()
    assert device.has_cuda == torch.cuda.is_available()
    assert (device.capability is None) == (not device.has_cuda)
    assert device.xformers, "the lock has the xformers of its torch"


def test_xformers_of_another_torch_does_not_count(monkeypatch):
    monkeypatch.setattr(attention.importlib.metadata, "requires", lambda name: ["numpy", "torch<2"])
    assert not Device.current().xformers


def test_xformers_is_imported_only_for_xformers():
    names = [*ATTENTION[1:], "sdpa_packed"]
    names.remove("xformers")
    code = f"""
import sys
from slipway import attention
for name in {names}:
    attention.register(name)
assert "slipway.packed_sdpa" in sys.modules
assert "xformers" not in sys.modules
attention.register("xformers")
assert "xformers" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
