"""Where the layers of a model lie that does not fit one card: as asked, checked, and as it came out."""

from collections import Counter
from typing import Any

from slipway.errors import InputError
from slipway.memory import GIB

MIB = 2**20
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # accelerate's; auto is balanced


def max_memory(text: str, gpus: int) -> dict[int | str, int]:
    """Bytes for each device that "0=20GiB,cpu=60GiB" names: GPUs by number, and cpu. What does not fit goes to disk.

    Raises InputError for anything else, and for a GPU that is not among the `gpus` of this machine.
    """
    from accelerate.utils import convert_file_size_to_int

    found: dict[int | str, int] = {}
    for part in text.split(","):
        device, _, size = (word.strip() for word in part.partition("="))
        fix = 'such as --max_memory "0=20GiB,cpu=60GiB"' if gpus else 'such as --max_memory "cpu=20GiB"'
        if device != "cpu" and not device.isdecimal():
            raise InputError(f"--max_memory {text}: {device or 'nothing'!r} is no GPU's number and not cpu", fix)
        if device != "cpu" and int(device) >= gpus:
            raise InputError(f"--max_memory {text}: there is no GPU {device}, this machine shows {gpus}", fix)
        try:
            found["cpu" if device == "cpu" else int(device)] = convert_file_size_to_int(size)
        except ValueError as error:
            raise InputError(f"--max_memory {text}: {size!r} is no size", fix) from error
    return found


def said(model: Any) -> str:
    """`GPU 0 18.40 GiB, disk 300.0 MiB`: how much of the weights lies where."""
    device_map = getattr(model, "hf_device_map", None) or {"": model.device}
    sizes: Counter[str] = Counter()
    for name, weight in model.named_parameters():
        place = next(where for module, where in device_map.items() if not module or f"{name}.".startswith(f"{module}."))
        sizes[f"GPU {place}" if isinstance(place, int) else str(place)] += weight.nbytes
    return ", ".join(
        f"{place} {size / GIB:.2f} GiB" if size >= GIB else f"{place} {size / MIB:.1f} MiB"
        for place, size in sizes.items()
    )


def computes_on(model: Any) -> Any:
    """The torch.device that a model's inputs go to: weights that are offloaded lie on `meta`, and say nothing."""
    import torch

    if model.device.type != "meta":
        return model.device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((device for device in devices if device is not None), "cpu"))
