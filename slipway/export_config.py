"""What goes with exported weights: config, generation config, tokenizer; an adapter's own config."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipway import embedded, hub, loading, models, weights
from slipway.errors import InputError
from slipway.export_source import Found

# Of a tokenizer and of generation: whichever of them are there.
_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """A model's config as transformers reads it, an empty model of it on the meta device, and where the files lie."""

    folder: Path
    config: Any
    model: Any
    tokenizer: Any = None  # of an adapter that is merged: written as it was trained with

    @property
    def tied(self) -> dict[str, str]:
        """Names that transformers ties to others when it loads the model, and those others."""
        return dict(getattr(self.model, "all_tied_weights_keys", None) or {})

    def write(self, to: Path, dtype: torch.dtype) -> None:
        """Config, generation config and tokenizer; the config comes last, and says `dtype`, which the weights have."""
        if self.tokenizer is None:
            _copy(self.folder, to, _FILES)
            content = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        else:
            self.tokenizer.save_pretrained(to)
            self.model.generation_config.save_pretrained(to)
            content = json.loads(self.config.to_json_string())
        content.pop("torch_dtype", None)  # its name before transformers 5
        content["dtype"] = str(dtype).removeprefix("torch.")
        (to / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def find(found: Found, config_from: str | None) -> Config:
    """The config of a checkpoint: its own, its run's, or that of the model `config_from`. Raises InputError."""
    if config_from:
        folder = _folder_of(config_from)
    else:
        places = [found.folder, *found.also]
        folder = next((place for place in places if (place / "config.json").is_file()), None)
        if folder is None:
            raise InputError(
                f"{found.folder} holds no config.json, so nothing says what the weights are of",
                "name the model that was trained: --config_from MODEL (a folder, a hub id or an embedded name)",
            )
    config = _read(folder)
    return Config(folder, config, _empty(folder, config))


def of_merged(folder: Path, model: models.Model) -> Config:
    """The config of an adapter in its base, which lies in `folder`; special ids and tokenizer are the adapter's."""
    from transformers import GenerationConfig

    config = _read(folder)
    empty = _empty(folder, config)
    if (folder / "generation_config.json").is_file():
        empty.generation_config = GenerationConfig.from_pretrained(folder)
    tokenizer = models.load_tokenizer(model)
    loading.fit(empty, tokenizer, model.notes)
    return Config(folder, empty.config, empty, tokenizer)


def copy_adapter(found: Found, to: Path) -> None:
    """An adapter's config and its tokenizer, the config last."""
    _copy(found.folder, to, (*_FILES[1:], "adapter_config.json"))


def _copy(folder: Path, to: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, to / name)


def _folder_of(name: str) -> Path:
    path = Path(name).expanduser()
    if name in embedded.EMBEDDED:
        return embedded.folder(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"--config_from {name} holds no config.json; found: {weights.listing(path)}",
                             "give the folder of a model")  # fmt: skip
        return path
    if path.is_file() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"--config_from {name} is no folder", "give the folder of a model, a hub id or smollm2-135m")
    return hub.download(name, None)


def _read(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder}/config.json cannot be used: {str(error)[:300]}", "mend it or copy it again"
        ) from error


def _empty(folder: Path, config: Any) -> Any:
    """A model without memory of the class that the config names, be it a causal one or, as of BERT, another."""
    import transformers

    name = next(iter(config.architectures or []), None)
    architecture = getattr(transformers, name, None) if name else None
    if architecture is None:
        raise InputError(
            f"{folder}/config.json names {name or 'no architecture'}, which is no class of transformers",
            "a model with code of its own is not exported; write the class's name into architectures",
        )
    with torch.device("meta"):
        return architecture(config)
