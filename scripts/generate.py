"""Answer a prompt by a model: an OUTPUT folder, checkpoint, adapter, GGUF file, hub id or embedded name.

    python scripts/generate.py --model OUTPUT --prompt "What does zip() do?" [--max_new_tokens 64]
    [--temperature 0.7]
    python scripts/generate.py --model BIG --prompt "..." --device_map auto [--max_memory "0=20GiB,cpu=60GiB"]

Only the answer goes to stdout. Exit codes: 0 answered, 2 bad input, 130 Ctrl-C.
"""

import argparse
import os
import sys
from pathlib import Path

from slipway import memory, models, placement, report, topology
from slipway.errors import InputError, stop_on_bad_input
from slipway.weights import has_weights


def main(argv: list[str]) -> None:
    """Prints the answer to what `argv` asks. Raises InputError."""
    asked = _arguments(argv)
    report.quiet()
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if _gpu() is None else "cuda")  # else deepspeed says what it chose
    name = _newest(asked.model)
    model = models.resolve(name, revision=asked.revision, trust_remote_code=asked.trust_remote_code)
    tokenizer = models.load_tokenizer(model, trust_remote_code=asked.trust_remote_code)
    loaded = _load(model, tokenizer, asked)
    for note in model.notes:
        print(note, file=sys.stderr)
    prompt = {"text": asked.prompt} if asked.text else {"messages": [{"role": "user", "content": asked.prompt}]}
    settings = {"max_new_tokens": asked.max_new_tokens, "temperature": asked.temperature, "seed": asked.seed}
    answer = models.answers(loaded, tokenizer, [prompt], **settings)[0]
    print(report.printable(answer) if sys.stdout.isatty() else answer)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="what to ask: see above")
    parser.add_argument("--prompt", required=True, help="the question, put into the model's chat template")
    parser.add_argument(
        "--text", action="store_true", help="continue the prompt as plain text, without a chat template"
    )
    parser.add_argument("--max_new_tokens", type=int, default=128, help="longest answer, in tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 always takes the likeliest token")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling, where the temperature is above 0")
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that a hub model brings")
    big = parser.add_argument_group("for a model that does not fit one card (docs/big-models.md)")
    big.add_argument("--device_map", choices=placement.DEVICE_MAPS, help="spread layers over GPUs, host memory, disk")
    big.add_argument("--max_memory", help='at most so much of the weights a device: "0=20GiB,cpu=60GiB"')
    big.add_argument("--offload_folder", type=Path, help="for what fits nowhere else, if not in safetensors")
    asked = parser.parse_args(argv)
    if asked.max_new_tokens < 1:
        raise InputError(f"--max_new_tokens {asked.max_new_tokens} leaves no room for an answer", "give 1 or more")
    if asked.temperature < 0:
        raise InputError(f"--temperature {asked.temperature} is negative", "give 0 or more")
    if not asked.prompt.strip():
        raise InputError("--prompt is empty", 'make generate MODEL=... PROMPT="What is a list?"')
    _check_placement(asked)
    return asked


def _check_placement(asked: argparse.Namespace) -> None:
    """--max_memory becomes a dict of bytes. Raises InputError."""
    for flag in ("max_memory", "offload_folder"):
        if getattr(asked, flag) is not None and asked.device_map is None:
            raise InputError(f"--{flag} has no effect without --device_map", "add --device_map auto")
    if asked.max_memory is not None:
        asked.max_memory = placement.max_memory(asked.max_memory, topology.plan(None).gpus)
    if asked.offload_folder is not None:
        memory.check_writable(asked.offload_folder, "--offload_folder")


def _newest(name: str) -> str:
    """An OUTPUT folder's newest checkpoint that holds weights, where the folder itself has no model yet."""
    folder = Path(name).expanduser()
    if not folder.is_dir() or has_weights(folder):
        return name
    numbered = [(int(one.name.partition("-")[2]), one) for one in folder.glob("checkpoint-[0-9]*") if has_weights(one)]
    if not numbered:
        return name
    newest = str(max(numbered)[1])
    print(f"{name} holds no finished model; answering from {newest}", file=sys.stderr)
    return newest


def _gpu() -> str | None:
    import torch

    return "cuda" if torch.cuda.is_available() else None


def _load(model: models.Model, tokenizer: object, asked: argparse.Namespace) -> object:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = torch.float32
    if _gpu():
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if model.kind == "adapter" and not asked.device_map:
        return models.adapter_model(model, tokenizer, dtype=dtype).to(_gpu() or "cpu")
    flags = ("device_map", "max_memory", "offload_folder", "trust_remote_code")
    places = {flag: getattr(asked, flag) for flag in flags}
    loaded = models.load(model, tokenizer, dtype=dtype, attn="sdpa", zero3=False, **places)
    if not asked.device_map:
        return loaded.to(_gpu() or "cpu")
    model.notes.append(f"device_map {asked.device_map}: {placement.said(loaded)}")
    return loaded


if __name__ == "__main__":
    with stop_on_bad_input():
        main(sys.argv[1:])
