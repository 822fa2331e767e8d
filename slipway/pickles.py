"""Tensors out of files that torch.save wrote, without running what a pickle may hold, and without reading them whole.

    content = pickles.load(file)                       # tensors are mapped: a page is read when it is touched

A pickle can run any program when it is loaded. torch's weights_only reader runs none: it knows tensors and plain
containers, and refuses the rest by name. What DeepSpeed keeps beside its tensors is not looked at here, so for its
classes there are stand-ins, and neither DeepSpeed nor its code is needed.
"""

import pickle
from pathlib import Path
from typing import Any

import torch

from slipway.errors import InputError


class _Left:
    """In the place of an object that an export has no use for."""

    def __init__(self, *_: object):
        pass

    def __setstate__(self, _: object) -> None:
        pass


# What ZeRO's files hold on our pins (DeepSpeed 0.19: runtime/zero/stage3.py and stage_1_and_2.py, state_dict).
_STAND_INS = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Left, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Left, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Left, "deepspeed.utils.tensor_fragment.fragment_address"),
]


def load(file: Path, trust: bool = False) -> Any:
    """What a .pt file holds, its tensors mapped from the disk.

    `trust`: let its pickle run what it likes, where weights_only refuses it. Raises InputError for a file that is
    missing, broken, cut short, or that holds objects that are not known to be harmless.
    """
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        if trust:
            return load_all(file)
        raise InputError(
            f"{file} holds more than weights ({_named(error)}), and loading that can run any program",
            "if you know who wrote it and trust them: --trust_pickle",
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise _broken(file, error) from error


def load_all(file: Path) -> Any:
    """All that a .pt file holds, its tensors mapped from the disk. Its pickle is run: for files of known origin."""
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"{file} needs what is not installed here ({error})", "install the tool that wrote it beside Slipway"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise _broken(file, error) from error


def _broken(file: Path, error: Exception) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"{file} is missing", "copy the whole checkpoint again")
    size = f"{file.stat().st_size:,} bytes"
    reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return InputError(f"{file} ({size}) is broken or cut short: {reason}", "copy it again, or take another checkpoint")


def _named(error: Exception) -> str:
    """The class that torch refused, out of its long message."""
    words = str(error).replace("`", " ").split()
    after = [words[place + 1] for place, word in enumerate(words[:-1]) if word == "GLOBAL"]
    return after[0] if after else "an object that is no tensor"
