"""Imports that would cost each process seconds for nothing."""

from typing import NoReturn


def bitsandbytes() -> None:
    """Import bitsandbytes, as peft does in any case, without torch's compiler: 2 CPU-seconds less in each process.

    It hands four CPU kernels to torch.compile while it is imported, and keeps them as they are where that fails. On
    GPUs it has kernels of its own.
    """
    import torch

    compile_, torch.compile = torch.compile, _refuse
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:  # whoever needs it says so
        pass
    finally:
        torch.compile = compile_


def _refuse(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("not while bitsandbytes is imported")
