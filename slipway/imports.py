"""Imports that would cost each process seconds for nothing."""

from collections.abc import Callable


def bitsandbytes() -> None:
    """Import bitsandbytes, as peft does in any case, without torch's compiler: 2 CPU-seconds less in each process.

    It hands CPU kernels to torch.compile while it is imported. They stay as they are, uncompiled, and so does what any
    other library would have compiled while it is imported by this one. On GPUs it has kernels of its own.
    """
    import torch

    compile_, torch.compile = torch.compile, _as_it_is
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:  # whoever needs it says so
        pass
    finally:
        torch.compile = compile_


def _as_it_is(model: Callable | None = None, **_: object) -> Callable:
    """torch.compile as a function, and as a decorator with arguments: what is given comes back."""
    return model or _as_it_is
