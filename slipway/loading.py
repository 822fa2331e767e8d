"""From a found model to weights in memory: for training, for answering, and merged from an adapter."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipway import cache, hub, weights
from slipway.errors import InputError
from slipway.tokenizers import end_of_turn, last_id, load_tokenizer


def load(
    model: Any,
    tokenizer: Any,
    *,
    dtype: Any,
    attn: str,
    zero3: bool,
    quantization: Any = None,
    trust_remote_code: bool = False,
    token: str | None = None,
    **places: Any,
) -> Any:
    """The weights of `model` (from resolve): resized to the tokenizer, ids and configs in order.

    Under ZeRO-3 call it after the TrainingArguments exist, so that transformers shards while it loads. An
    adapter is merged into its base first. What was changed goes to `model.notes`. `places`: device_map, max_memory and
    offload_folder of from_pretrained, for a model that only answers. Raises InputError for
    weights that do not fit the config, and for options that ZeRO-3 excludes.
    """
    from transformers import AutoModelForCausalLM

    _check_options(zero3, quantization, places.get("device_map"))
    path, revision = _source(model, tokenizer, dtype, token)
    if quantization is not None:
        places = {"device_map": {"": int(os.environ.get("LOCAL_RANK", "0"))}} | places
    with _needing_a_folder(model.name):
        loaded, info = AutoModelForCausalLM.from_pretrained(
            path,
            revision=revision,
            token=token,
            dtype=dtype,
            attn_implementation=attn,
            quantization_config=quantization,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **places,
        )
    if info["missing_keys"]:
        raise InputError(
            f"MODEL={model.name} has no weights for {weights.shortened(sorted(info['missing_keys']))}",
            "they would start at random: give a folder that holds all of the model, its head too",
        )
    if model.kind == "hub":
        loaded.name_or_path = loaded.config._name_or_path = model.name  # what an adapter will name as its base
    fit(loaded, tokenizer, model.notes)
    return loaded


@contextlib.contextmanager
def _needing_a_folder(name: str) -> Iterator[None]:
    """What lies on disk is read from the model's own safetensors; other formats have to be written anew somewhere."""
    try:
        yield
    except ValueError as error:
        if "provide an `offload_folder`" not in str(error):
            raise
        raise InputError(
            f"MODEL={name}: a part does not fit in memory, and its files are not such that it can be read from them",
            "--offload_folder FOLDER, with room for that part; or more --max_memory",
        ) from error


def _check_options(zero3: bool, quantization: Any, device_map: Any) -> None:
    from transformers.integrations import is_deepspeed_zero3_enabled

    if zero3 and (device_map is not None or quantization is not None):
        what = "a device_map" if device_map is not None else "quantized weights (QLoRA)"
        raise InputError(f"{what} and ZeRO-3 exclude each other: ZeRO-3 places the weights", "take a ZeRO-2 recipe")
    if zero3 != is_deepspeed_zero3_enabled():
        asked, got = ("3", "another") if zero3 else ("another", "3")
        raise InputError(
            f"zero_stage: asked {asked}, got {got}: the TrainingArguments hold another ds_config than the run's",
            "build the TrainingArguments from that ds_config, before the model is loaded",
        )


def _source(model: Any, tokenizer: Any, dtype: Any, token: str | None) -> tuple[str, str | None]:
    """Path and revision for from_pretrained, weights downloaded, merged and checked where due."""
    if model.kind == "adapter":
        return str(_merged_in_cache(model, tokenizer, dtype)), None
    if model.kind == "hub" and not Path(model.path).is_dir():
        folder = hub.download(model.path, model.revision, token)  # from_pretrained then finds it in the cache
        weights.check_folder(folder)
        weights.check_shapes(folder, model.config)
    return model.path, model.revision


def fit(loaded: Any, tokenizer: Any, notes: list[str]) -> None:
    """Makes vocabulary, special ids and generation config agree with the tokenizer."""
    text = loaded.config.get_text_config()
    # Offloaded weights, which lie on meta, keep their shape: one prompt at a time is answered without the pad token.
    offloaded = any(weight.device.type == "meta" for weight in loaded.parameters())
    if last_id(tokenizer) >= text.vocab_size and not offloaded:
        had = text.vocab_size
        resize(loaded, last_id(tokenizer) + 1)
        notes.append(f"vocabulary resized from {had} to {text.vocab_size} rows for the new pad token")
    stop = end_of_turn(tokenizer)
    for config in (text, loaded.generation_config):
        config.pad_token_id = tokenizer.pad_token_id
        if tokenizer.bos_token_id is not None:
            config.bos_token_id = tokenizer.bos_token_id
    text.eos_token_id = tokenizer.eos_token_id
    had = loaded.generation_config.eos_token_id
    stop = sorted({*stop, *([] if had is None else [had] if isinstance(had, int) else had)})
    loaded.generation_config.eos_token_id = stop[0] if len(stop) == 1 else stop
    _repair_generation_config(loaded, notes)


def resize(loaded: Any, rows: int) -> None:
    """Gives input and output embeddings `rows` rows; new ones are the mean of the old, on all ranks alike.

    transformers' own start would be random (on each rank another), or zero-mean, which takes probability from
    trained tokens. Works under ZeRO-3, on all ranks at once.
    """
    import torch
    from transformers.integrations import is_deepspeed_zero3_enabled

    had = loaded.config.get_text_config().vocab_size
    loaded.resize_token_embeddings(rows, mean_resizing=False)
    modules = (loaded.get_input_embeddings(), loaded.get_output_embeddings())
    for table in {id(module.weight): module.weight for module in modules}.values():  # one, where they are tied
        if is_deepspeed_zero3_enabled():
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters([table], modifier_rank=0)
        else:
            gathered = torch.no_grad()
        with gathered, torch.no_grad():
            table[had:] = table[:had].float().mean(dim=0).to(table.dtype)


def _repair_generation_config(loaded: Any, notes: list[str]) -> None:
    """LLaMA-2's has a temperature but no do_sample: left so, saving the trained model would raise."""
    from transformers import GenerationConfig

    try:
        loaded.generation_config.validate(strict=True)
        return
    except ValueError as error:
        reason = str(error).splitlines()[-1].strip()
    loaded.generation_config.do_sample = True
    try:
        loaded.generation_config.validate(strict=True)
        notes.append(f"generation config contradicted itself ({reason}): do_sample set to true")
    except ValueError:
        kept = {key: getattr(loaded.generation_config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        loaded.generation_config = GenerationConfig(**kept)
        notes.append(f"generation config was invalid ({reason}): replaced by the default one")


def adapter_model(model: Any, tokenizer: Any, *, dtype: Any) -> Any:
    """An adapter merged into its base, in memory and on the CPU, as a plain transformers model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = model.base
    if base.kind == "adapter":
        loaded = adapter_model(base, tokenizer, dtype=dtype)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(base.path, revision=base.revision, dtype=dtype)
    rows = _adapter_rows(Path(model.path))
    if rows and rows != loaded.config.get_text_config().vocab_size:
        resize(loaded, rows)  # the adapter was trained, and saved, with the embeddings of a resized vocabulary
    merged = PeftModel.from_pretrained(loaded, model.path).merge_and_unload()
    fit(merged, tokenizer, model.notes)
    return merged


def _adapter_rows(folder: Path) -> int | None:
    """Rows of the embeddings that an adapter brings with it, if it does."""
    found = weights.headers(weights.weight_files(folder))
    return next(
        (shape[0] for name, shape in found.items() if name.endswith(("embed_tokens.weight", "wte.weight"))),
        None,
    )


def merge(adapter_folder: str | Path, out_folder: str | Path) -> None:
    """Writes an adapter merged into its base to `out_folder`: plain safetensors, configs and tokenizer.

    The weights have the type of the base's. Raises InputError where the folder is no adapter or its base is
    missing.
    """
    from slipway.models import resolve

    model = resolve(str(adapter_folder))
    if model.kind != "adapter":
        raise InputError(f"{adapter_folder} is no adapter but a whole model ({model.kind})", "nothing is to be merged")
    _write_merged(model, load_tokenizer(model), model.config.dtype or "auto", Path(out_folder))


def _write_merged(model: Any, tokenizer: Any, dtype: Any, to: Path) -> None:
    merged = adapter_model(model, tokenizer, dtype=dtype)
    weights.save_alone(merged, to)
    tokenizer.save_pretrained(to)
    weights.check_saved(to, merged.config)


def _merged_in_cache(model: Any, tokenizer: Any, dtype: Any) -> Path:
    """The merged model as a folder, made by whichever rank comes first: ZeRO-3 loads from files."""
    stat = (Path(model.path) / weights.ADAPTER).stat()
    key = hashlib.sha256(repr((Path(model.path).resolve(), stat.st_mtime_ns, stat.st_size, str(dtype))).encode())
    with _without_zero3():
        return cache.build(
            f"models/merged-{key.hexdigest()[:12]}", lambda to: _write_merged(model, tokenizer, dtype, to)
        )


@contextlib.contextmanager
def _without_zero3() -> Iterator[None]:
    """For a model that this rank loads alone: from_pretrained would wait for all ranks and shard it."""
    from transformers.integrations import deepspeed

    held = deepspeed._hf_deepspeed_config_weak_ref
    config = held() if held else None
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            deepspeed.set_hf_deepspeed_config(config)
