"""Encoders such as BERT, to put a head on that tells classes apart: found before the launch, loaded for training."""

import hashlib
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from slipway import hub, models, weights
from slipway.errors import InputError
from slipway.labelled import Text


def resolve(name: str) -> models.Model:
    """The encoder `name`: minilm, a folder, or a hub id; its weights are not loaded.

    Raises InputError where there is no such model, or one that is no encoder.
    """
    path = Path(name).expanduser()
    if path.is_file() or (path / "adapter_config.json").is_file():
        what = "a single file" if path.is_file() else "an adapter"
        raise InputError(f"MODEL={name} is {what}", "give the folder of a whole encoder, a hub id, or minilm")
    return models.resolve(name, wanted=models.Kind(_refuse_others, _check_shapes))


def _refuse_others(name: str, config: Any) -> None:
    from transformers.models.auto import modeling_auto as auto

    kind, classes = config.model_type, config.architectures or []
    why = None
    if getattr(config, "is_encoder_decoder", False):
        why = "an encoder-decoder"
    elif kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        why = "a decoder"
    elif type(config) not in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        why = "of a type that transformers cannot tell classes with"
    if why:
        raise InputError(
            f"MODEL={name} is no encoder: it is {why} "
            f"(model_type {kind}, {', '.join(classes) or 'no architecture named'})",
            "give one such as BERT, RoBERTa, DistilBERT or MiniLM; recipes/llama trains decoders",
        )


def _check_shapes(folder: Path, config: Any) -> None:
    """InputError where the encoder's weights in `folder` are missing or have other shapes than `config` says."""
    encoder = empty(config)
    need = {name: tuple(parameter.shape) for name, parameter in encoder.named_parameters()}
    found = weights.headers(weights.weight_files(folder))
    if not found:
        return  # a pytorch_model.bin says nothing before it is loaded
    prefix = f"{encoder.base_model_prefix}."
    found |= {name.removeprefix(prefix): shape for name, shape in found.items()}
    wrong = [f"{name} {found[name]} for {need[name]}" for name in need if found.get(name, need[name]) != need[name]]
    if wrong:
        raise InputError(
            f"{folder}: {len(wrong)} tensors do not have the shape that config.json says: {weights.shortened(wrong)}",
            "restore the config.json that came with these weights",
        )
    missing = [name for name in need if name not in found and not name.startswith("pooler.")]
    if missing:
        raise InputError(
            f"{folder}: {len(missing)} of {len(need)} tensors are missing: {weights.shortened(missing)}",
            "give a folder that holds the whole encoder",
        )


def empty(config: Any) -> Any:
    """The encoder of `config` on the meta device: shapes without memory."""
    import torch
    from transformers import AutoModel

    with torch.device("meta"):
        return AutoModel.from_config(config)


def tokenizer(model: models.Model) -> Any:
    """The model's tokenizer; InputError if it has none or cannot pad."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(model.path, revision=model.revision)
    except (OSError, ValueError, KeyError) as error:
        said = " ".join(str(error).split())[:200]
        raise InputError(
            f"MODEL={model.name} has no usable tokenizer ({said})", "copy its tokenizer files too"
        ) from error
    if found.pad_token_id is None:
        raise InputError(
            f"MODEL={model.name}: its tokenizer has no pad token", "set pad_token in tokenizer_config.json"
        )
    return found


def check_length(model: models.Model, max_length: int) -> None:
    """InputError if the model has no positions for texts of `max_length` tokens."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions:
        positions -= 2 if model.config.model_type in ("roberta", "xlm-roberta", "camembert") else 0  # two are padding's
    if positions and max_length > positions:
        raise InputError(
            f"--max_length {max_length}: {model.name} takes {positions} tokens", f"--max_length {positions}"
        )


class Encoded(Dataset):
    """Rows of {"input_ids", "attention_mask", ..., "labels"}, not yet padded. cut: how many texts were cut."""

    def __init__(self, rows: list[Text], tokenizer: Any, max_length: int):
        texts = tokenizer([row.text for row in rows])
        self.cut = sum(len(ids) > max_length for ids in texts["input_ids"])
        texts = tokenizer([row.text for row in rows], truncation=True, max_length=max_length)
        self.rows = [
            {**{key: values[number] for key, values in texts.items()}, "labels": row.label}
            for number, row in enumerate(rows)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]


def load(model: models.Model, classes: tuple[str, ...], dropout: float | None) -> Any:
    """The encoder in fp32 with a head for `classes`: a new one, or that of a model that tells as many.

    Raises InputError if weights of the encoder itself are missing.
    """
    import torch
    from transformers import AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    path = model.path
    if model.kind == "hub" and not Path(path).is_dir():
        folder = hub.download(path, model.revision, None)  # from_pretrained then finds it in the cache
        weights.check_folder(folder)
        _check_shapes(folder, model.config)
    loaded, info = AutoModelForSequenceClassification.from_pretrained(
        path,
        revision=model.revision,
        config=_config(model.config, classes, dropout),
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # a head for another number of classes gives way to a new one
        output_loading_info=True,
    )
    prefix = f"{loaded.base_model_prefix}."
    missing = sorted(name for name in info["missing_keys"] if name.startswith(prefix) and ".pooler." not in name)
    if missing:
        raise InputError(
            f"MODEL={model.name} has no weights for {weights.shortened(missing)}",
            "they would start at random: give a folder that holds the whole encoder",
        )
    return loaded


def _config(config: Any, classes: tuple[str, ...], dropout: float | None) -> Any:
    """The model's config, with the names of the classes, and one dropout for all its parts if one is given."""
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: number for number, name in enumerate(classes)}
    if dropout is not None:
        for key, value in config.to_dict().items():
            if "dropout" in key and (value is None or isinstance(value, float)):
                setattr(config, key, dropout)
    return config


def fingerprint(model: models.Model) -> str:
    """Changes with the weights that training starts from: names and sizes of the files, or the hub's commit."""
    if model.revision:
        return model.revision
    sizes = sorted((file.name, file.stat().st_size) for file in weights.weight_files(Path(model.path)))
    return hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]
