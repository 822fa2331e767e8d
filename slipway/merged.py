"""A LoRA adapter merged into its base one tensor at a time, by peft's own arithmetic.

    source = merged.Merged(base, adapter, folder, empty_base)        # as export_source.Stored

Each product is added in fp32, and rounded once to the type that is written. What is more than pairs of matrices
(modules_to_save, a resized vocabulary, DoRA, biases) is not for this: see `plain`.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from slipway.errors import InputError
from slipway.export_source import Stored
from slipway.weights import shortened

_PAIR = ("lora_A.weight", "lora_B.weight")
_PREFIX = "base_model.model."


def plain(adapter: Stored) -> bool:
    """Whether an adapter is nothing but pairs of LoRA's matrices."""
    return all(name.startswith(_PREFIX) and name.endswith(_PAIR) for name in adapter.tensors)


class Merged:
    """The weights of a base with those of an adapter in it. `empty`: the base on the meta device.

    Raises InputError where the adapter is of another model.
    """

    def __init__(self, base: Stored, adapter: Stored, folder: Path, empty: Any):
        from peft import PeftConfig, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._base, self._adapter = base, adapter
        self.tensors, self.aliases, self.has_fp32 = base.tensors, base.aliases, base.has_fp32
        with torch.device("meta"):
            inner = get_peft_model(copy.deepcopy(empty), PeftConfig.from_pretrained(folder)).base_model.model
        self._layers = {name: layer for name, layer in inner.named_modules() if isinstance(layer, BaseTunerLayer)}
        need = {f"{_PREFIX}{name}.{matrix}" for name in self._layers for matrix in _PAIR}
        other = sorted(need ^ set(adapter.tensors)) or [
            name for name in self._layers if f"{name}.weight" not in base.tensors
        ]
        if other:
            raise InputError(
                f"{folder}: the adapter is not of this base: {shortened(other)} fits nothing",
                "put the right base's place into base_model_name_or_path of its adapter_config.json",
            )

    def files(self) -> list[Path]:
        return [*self._adapter.files(), *self._base.files()]

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str], torch.Tensor]]:
        """A function that reads a tensor by its name in the base, merged where the adapter has something for it."""
        with self._base.opened() as base, self._adapter.opened() as adapter:

            def read(name: str) -> torch.Tensor:
                module = name.removesuffix(".weight")
                if module not in self._layers or module == name:
                    return base(name)
                layer = copy.deepcopy(self._layers[module])  # on meta: it holds nothing
                layer.base_layer.weight = _parameter(base(name))
                for matrices, matrix in ((layer.lora_A, _PAIR[0]), (layer.lora_B, _PAIR[1])):
                    matrices["default"].weight = _parameter(adapter(f"{_PREFIX}{module}.{matrix}"))
                layer.merge()
                return layer.base_layer.weight.data

            yield read


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    # A copy: merging adds in place, and what was read is mapped from a file.
    return torch.nn.Parameter(tensor.to(torch.float32, copy=True), requires_grad=False)
