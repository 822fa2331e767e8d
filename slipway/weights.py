"""What a folder of weights holds, read from headers alone: is it whole, and does it fit its model?"""

import json
import math
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from slipway.errors import InputError

LFS_POINTER = b"version https://git-lfs"
SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ADAPTER = "adapter_model.safetensors"


class SavedModelError(InputError):
    """A saved model that would not load as the one that was trained."""


def has_weights(folder: Path) -> bool:
    """Whether weights, an index of them, or an adapter lie in the folder; their content is not looked at."""
    return any((folder / name).is_file() for name in (*SINGLE, *INDEXES, ADAPTER))


def check_folder(folder: Path) -> None:
    """InputError unless the weights in a model's or an adapter's folder are there, whole and not empty."""
    files = weight_files(folder)
    for file in files:
        check_file(file)
    _refuse_empty(folder, headers(files), InputError)


def check_file(file: Path) -> None:
    """InputError for a file of weights that is empty, a git-lfs pointer or cut short."""
    with file.open("rb") as opened:
        start = opened.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise InputError(
            f"{file} is a git-lfs pointer, not the file itself",
            "run `git lfs install && git lfs pull` in that clone",
        )
    if not start:
        raise InputError(f"{file} is empty (0 bytes)", "copy or download it again")
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            size = file.stat().st_size
            raise InputError(f"{file} ({size:,} bytes) is broken or cut short: {error}", "copy it again") from error


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights; InputError where there are none, or the index names others."""
    for name in (*SINGLE[:1], *INDEXES[:1], *SINGLE[1:], *INDEXES[1:], ADAPTER):
        if not (folder / name).is_file():
            continue
        if name not in INDEXES:
            return [folder / name]
        named = sorted(set(_index(folder / name).values()))
        missing = [file for file in named if not (folder / file).is_file()]
        if missing:
            raise InputError(
                f"{folder}: {len(missing)} of the {len(named)} files that {name} names are missing: "
                f"{shortened(missing)}",
                "copy or download them too",
            )
        return [folder / file for file in named]
    raise InputError(
        f"{folder} holds no weights ({' or '.join((*SINGLE, *INDEXES))}); found: {listing(folder)}",
        "give the folder of a whole model",
    )


def _index(file: Path) -> dict[str, str]:
    try:
        return json.loads(file.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise InputError(f"{file} is no index of weights ({error!r})", "copy or download it again") from error


def headers(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor in the .safetensors among `files`, without reading a weight."""
    shapes = {}
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="numpy") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes


def check_saved(folder: str | Path, config: Any, model: Any = None) -> int:
    """Number of tensors saved in `folder`; SavedModelError unless they are what `config`'s model needs.

    Only headers are read. Tied weights may be absent. An adapter's tensors are checked for emptiness, as its
    shapes follow from the adapter's config and not from the model's. `model`: an empty one (of meta tensors) where it
    is not the causal one of the config.
    """
    folder = Path(folder)
    try:
        files = weight_files(folder)
        for file in files:
            check_file(file)
    except InputError as error:
        raise SavedModelError(error.message, "free some disk space or mend the saving, then run again") from error
    found = headers(files)
    if not found:
        raise SavedModelError(f"{folder} holds no tensor in safetensors files", "save with safe serialization")
    if files[0].name == ADAPTER:
        _refuse_empty(folder, found, SavedModelError)
    else:
        check_tensors(folder, found, config, model)
    return len(found)


def check_tensors(folder: Path, found: dict[str, tuple[int, ...]], config: Any, model: Any = None) -> None:
    """SavedModelError unless the tensors (name and shape) are what `config`'s model, or the empty `model`, needs."""
    _refuse_empty(folder, found, SavedModelError)
    if getattr(config, "quantization_config", None) is None:
        _compare(folder, found, config, model or empty_model(config))


def let_others_read(folder: Path) -> None:
    """Gives the saved weights below `folder` the usual rights: safetensors writes files that only their owner reads."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o666 & ~mask)


def _refuse_empty(folder: Path, found: dict[str, tuple[int, ...]], kind: type[InputError]) -> None:
    empty = [name for name, shape in found.items() if math.prod(shape) == 0]
    if empty:
        raise kind(
            f"{folder}: {len(empty)} of {len(found)} tensors are empty: {shortened(empty)}",
            "saving under ZeRO-3 without gathering the weights leaves that; export a checkpoint of that run",
        )


def check_shapes(folder: Path, config: Any) -> None:
    """InputError where a tensor in `folder` has another shape than `config` says, as after a resize."""
    found, model = headers(weight_files(folder)), empty_model(config)
    if stored_otherwise(model, config):
        return
    need = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wrong = [f"{name} {found[name]} for {need[name]}" for name in need if found.get(name, need[name]) != need[name]]
    if wrong:
        raise InputError(
            f"{folder}: {len(wrong)} tensors do not have the shape that config.json says: {shortened(wrong)}",
            "restore the config.json that came with these weights",
        )


def stored_otherwise(model: Any, config: Any) -> bool:
    """Whether files hold the weights under other names and shapes than modules do (experts, 4 bit)."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return (
        bool(get_model_conversion_mapping(model, add_legacy=False))
        or getattr(config, "quantization_config", None) is not None
    )


def _compare(folder: Path, found: dict[str, tuple[int, ...]], config: Any, model: Any) -> None:
    fix = "the saved model is not the trained one; do not use it"
    if stored_otherwise(model, config):
        # Names say nothing then, but the number of weights has to be the same.
        need, have = (sum(map(math.prod, shapes)) for shapes in (_unique(model).values(), found.values()))
        if have < need:
            raise SavedModelError(f"{folder} holds {have:,} weights of the {need:,} that the model has", fix)
        return
    need = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    optional = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = [name for name in need if name not in found and name not in optional]
    if missing:
        raise SavedModelError(f"{folder}: {len(missing)} of {len(need)} tensors are missing: {shortened(missing)}", fix)
    wrong = [f"{name} {found[name]} for {need[name]}" for name in need if found.get(name, need[name]) != need[name]]
    if wrong:
        raise SavedModelError(
            f"{folder}: {len(wrong)} of {len(need)} tensors have another shape: {shortened(wrong)}", fix
        )


def save_alone(model: Any, folder: Path) -> None:
    """save_pretrained by one process for itself, whichever rank it is: each node fills its own cache."""
    model.should_save_on_this_rank = lambda is_main_process: True  # transformers: only rank 0, else nothing, silently
    model.save_pretrained(folder)


def empty_model(config: Any) -> Any:
    """The causal language model of `config` on the meta device: shapes without memory, apart from ZeRO-3."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    with torch.device("meta"):
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            # The class itself: from_config would hand the weights out to the ranks where ZeRO-3 is on.
            return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=True)  # resolve() asked for the trust


def _unique(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def parameters(config: Any) -> int:
    """How many parameters the model of `config` has, tied ones counted once; no weights are loaded."""
    return sum(map(math.prod, _unique(empty_model(config)).values()))


def flops_per_token(config: Any, seq: int) -> int:
    """Floating-point operations of training (forward and backward) a token, in sequences of `seq` tokens.

    6 N + 12 L H Q T, from PaLM (Chowdhery et al., 2022, appendix B): N parameters that are multiplied with
    (the input embedding is a lookup, so it counts only where it is tied to the output), L layers, H heads of
    size Q, T = seq. As there, causal masking and recomputation by gradient checkpointing are not counted. For
    dense models.
    """
    model = empty_model(config)
    text = config.get_text_config()
    lookup = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is lookup
    n = sum(map(math.prod, _unique(model).values())) - (0 if tied else lookup.numel())
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 6 * n + 12 * text.num_hidden_layers * text.num_attention_heads * head * seq


def listing(folder: Path) -> str:
    """What lies in a folder, for a message."""
    return shortened(sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())) or "nothing"


def shortened(names: list[str]) -> str:
    """The first few of `names`, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
