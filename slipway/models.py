"""Models by name: found before the launch without their weights, loaded for training, merged from adapters.

    model = resolve("smollm2-135m")             # or a hub id, a folder, a GGUF file, an adapter's folder
    tokenizer = load_tokenizer(model)
    trained = load(model, tokenizer, dtype=torch.bfloat16, attn="sdpa", zero3=True)

transformers is imported inside the functions: the launcher resolves names too, and misspelled ones fail in a
second.
"""

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slipway import embedded, hub, manifest, weights
from slipway.errors import InputError, nearest
from slipway.generation import answers, forget_order_of_layers, prompt_text
from slipway.loading import adapter_model, load, merge
from slipway.tokenizers import FILES, load_tokenizer
from slipway.weights import SavedModelError, check_saved, flops_per_token, let_others_read, parameters

__all__ = [
    "Model",
    "SavedModelError",
    "adapter_model",
    "answers",
    "check_saved",
    "flops_per_token",
    "forget_order_of_layers",
    "let_others_read",
    "load",
    "load_tokenizer",
    "merge",
    "parameters",
    "prompt_text",
    "resolve",
]


@dataclass
class Model:
    """A model that was found. `notes`: what was chosen or changed, a line each, for the caller to say."""

    name: str  # as asked
    path: str  # what from_pretrained takes: a local folder, or a hub id
    kind: Literal["embedded", "folder", "gguf", "hub", "adapter"]
    config: Any  # of transformers; an adapter's is its base's
    base: "Model | None" = None  # of an adapter
    revision: str | None = None  # the commit on the hub, so that all ranks load the same one
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Kind:
    """What a recipe trains: both raise InputError, for a config of another kind, and for weights of other shapes."""

    refuse_others: Callable[[str, Any], None]  # of the name and the config
    check_shapes: Callable[[Path, Any], None]  # of the folder and the config


def resolve(
    name: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    wanted: Kind | None = None,
) -> Model:
    """Finds the model `name`: an embedded one, else an existing path, else a hub id.

    It has to be `wanted`: a causal language model, if nothing else is said.

    No weights are loaded; those in a folder are checked by their headers. `token` is for the hub, else
    HF_TOKEN or the login counts. Raises InputError, within seconds, where there is no such model or it cannot
    be trained here.
    """
    path = Path(name).expanduser()
    if name in embedded.EMBEDDED:
        model = _in_folder(name, embedded.folder(name), "embedded", trust_remote_code, wanted)
    elif path.is_file():
        model = _in_folder(name, embedded.gguf(path), "gguf", trust_remote_code, wanted)
    elif (path / "adapter_config.json").is_file() and not any((path / one).is_file() for one in weights.SINGLE):
        model = _adapter(name, path, token, trust_remote_code)
    elif path.is_dir():
        model = _in_folder(name, path, "folder", trust_remote_code, wanted)
    elif _like_a_path(name):
        raise _no_such_path(path)
    else:
        model = _on_hub(name, revision, token, trust_remote_code, wanted)
    return model


def _in_folder(name: str, folder: Path, kind: str, trust_remote_code: bool, wanted: Kind | None) -> Model:
    if not (folder / "config.json").is_file():
        raise _no_model(folder)
    config = _config(name, str(folder), None, None, trust_remote_code, wanted)
    weights.check_folder(folder)
    (wanted or CAUSAL).check_shapes(folder, config)
    return Model(name, str(folder), kind, config)


def _no_model(folder: Path) -> InputError:
    ggufs = sorted(folder.glob("*.gguf"))
    checkpoints = manifest.folders(folder)  # newest first
    fix = "give the folder that holds config.json and the weights"
    if ggufs:
        fix = f"to use the GGUF file give its own path, MODEL={ggufs[0]}"
    elif checkpoints:
        fix = f"to use a checkpoint give its own path, such as MODEL={checkpoints[0]}"
    return InputError(f"MODEL={folder} is no model: it has no config.json; found: {weights.listing(folder)}", fix)


def _adapter(name: str, folder: Path, token: str | None, trust_remote_code: bool) -> Model:
    file = folder / "adapter_config.json"
    try:
        base = json.loads(file.read_text())["base_model_name_or_path"]
    except (ValueError, KeyError) as error:
        raise InputError(f"{file} names no base model ({error!r})", "set base_model_name_or_path in it") from error
    weights.check_folder(folder)
    if not Path(base).exists():
        base = embedded.named_like(base) or base  # trained from an embedded model on another machine
    try:
        found = resolve(base, token=token, trust_remote_code=trust_remote_code)
    except InputError as error:
        raise InputError(
            f"MODEL={name} is an adapter, and its base cannot be used: {error.message}",
            f"{error.fix}; or put the base's place into base_model_name_or_path in {file}",
        ) from error
    return Model(name, str(folder), "adapter", found.config, found, notes=found.notes)


def _on_hub(name: str, revision: str | None, token: str | None, trust_remote_code: bool, wanted: Kind | None) -> Model:
    hint = nearest(name, embedded.EMBEDDED)
    found = hub.find(name, revision, token, hint)
    if found.folder and not hub.offline():
        model = _in_folder(name, found.folder, "hub", trust_remote_code, wanted)
        model.notes.append(f"the hub cannot be reached; using the copy of {name} in its cache")
        return model
    if "config.json" not in found.files and "adapter_config.json" in found.files:
        return _adapter(name, hub.download(name, found.revision, token), token, trust_remote_code)
    for what, endings in {
        "no config.json": ("config.json",),
        "no weights (.safetensors or pytorch_model.bin)": (
            ".safetensors",
            "pytorch_model.bin",
            ".index.json",
        ),
        "no tokenizer": FILES,
    }.items():
        if not any(file.endswith(endings) for file in found.files):
            raise InputError(
                f"MODEL={name} on the hub holds {what}; found: {weights.shortened(sorted(found.files))}",
                "a GGUF file can be downloaded and given by its path"
                if any(file.endswith(".gguf") for file in found.files)
                else "give a repository that holds a whole model",
            )
    return Model(
        name,
        name,
        "hub",
        _config(name, name, found.revision, token, trust_remote_code, wanted),
        revision=found.revision,
    )


def _config(
    name: str, path: str, revision: str | None, token: str | None, trust_remote_code: bool, wanted: Kind | None
) -> Any:
    """The model's config, if it is of the kind that is wanted."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, revision=revision, token=token, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError, TypeError) as error:
        fix = "correct config.json there, or copy it again"
        if "trust_remote_code" in str(error):
            fix = "it brings code of its own: read that, then allow it with --trust_remote_code true"
        raise InputError(f"MODEL={name}: its config.json cannot be used: {str(error)[:300]}", fix) from error
    if not (trust_remote_code and getattr(config, "auto_map", None)):
        (wanted or CAUSAL).refuse_others(name, config)
    return config


def _refuse_other_kinds(name: str, config: Any) -> None:
    from transformers.models.auto import modeling_auto as auto

    kind, classes = config.model_type, config.architectures or []
    causal = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    why = None
    if getattr(config, "is_encoder_decoder", False):
        why = "an encoder-decoder"
    elif type(config) not in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        why = "of a type that transformers has no causal language model for"
    elif kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        why = "an encoder"
    elif classes and not causal.intersection(classes):
        why = "saved without the head of one"
    if why:
        raise InputError(
            f"MODEL={name} is no causal language model: it is {why} "
            f"(model_type {kind}, {', '.join(classes) or 'no architecture named'})",
            "give one such as LLaMA, Mistral, Qwen or GPT-2; recipes/bert trains encoders",
        )


CAUSAL = Kind(_refuse_other_kinds, weights.check_shapes)


def _like_a_path(name: str) -> bool:
    """Whether a name that does not exist was meant as a path; hub ids have one slash at most."""
    parts = Path(name).parts
    odd = name.startswith((".", "/", "~")) or name.endswith(("/", ".gguf", ".safetensors", ".bin")) or len(parts) > 2
    return odd or (len(parts) == 2 and Path(parts[0]).is_dir())


def _no_such_path(path: Path) -> InputError:
    parent = path.parent
    while not parent.is_dir():
        parent = parent.parent
    wanted = path.relative_to(parent).parts[0]
    close = difflib.get_close_matches(wanted, [entry.name for entry in parent.iterdir()], n=3)
    similar = ", ".join(str(parent / one) for one in close)
    return InputError(
        f"MODEL={path} does not exist ({parent if str(parent) != '.' else 'this folder'} has no {wanted})",
        f"did you mean {similar}?" if similar else "give an existing folder, a GGUF file, a hub id or smollm2-135m",
    )
