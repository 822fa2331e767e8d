"""Write a checkpoint's weights as plain safetensors that transformers loads: of a LLaMA recipe, or of another tool.

    python scripts/export.py --checkpoint outputs/zero3 --output out [--dtype bf16] [--shard_size 2GB] [--merge]
    python scripts/export.py --checkpoint elsewhere/global_step100 --output out --config_from meta-llama/Llama-2-7b-hf

Exit codes: 0 exported, 2 bad input (nothing was written), 130 Ctrl-C.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from huggingface_hub.serialization._base import parse_size_to_int

from slipway import export, memory, report
from slipway.errors import InputError, nearest, stop_on_bad_input


def main(argv: list[str]) -> None:
    """Exports what `argv` asks, and prints what was written. Raises InputError."""
    began = time.monotonic()
    report.quiet()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # nothing is computed on a card, and deepspeed need not look for one
    asked = _arguments(argv)
    result = export.run(asked)
    for note in result.notes:
        print(note, file=sys.stderr)
    print(
        f"{asked.output}: {result.tensors} tensors, {result.parameters:,} parameters, {', '.join(result.dtypes)}, "
        f"{result.bytes / 1e9:.3f} GB in {result.files} file{'s' * (result.files != 1)}\n"
        f"read from {result.source}; {time.monotonic() - began:.1f} s, "
        f"peak memory {memory.peak_rss() / memory.GIB:.3f} GiB"
    )


def _arguments(argv: list[str]) -> export.Asked:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a checkpoint's folder, DeepSpeed's own in it, or a run's folder")
    parser.add_argument("--output", type=Path, help="the folder to write, which must not hold anything")
    parser.add_argument("--dtype", default="auto", help="auto (as the run saves), fp32, bf16 or fp16")
    parser.add_argument("--shard_size", default="5GB", help="the most that one file of weights holds, such as 500MB")
    parser.add_argument("--merge", action="store_true", help="an adapter: merged into its base, a whole model")
    parser.add_argument("--config_from", help="a model to take config and tokenizer from, where there are none")
    parser.add_argument(
        "--trust_pickle", action="store_true", help="load pickles that could run any program: only if you know them"
    )
    asked = parser.parse_args(argv)
    for name in ("checkpoint", "output"):
        if not getattr(asked, name):
            raise InputError(f"--{name} is missing", "make export CHECKPOINT=outputs/zero3 OUTPUT=out")
    known = ("auto", *export.DTYPES)
    if asked.dtype not in known:
        raise InputError(f"--dtype {asked.dtype}{nearest(asked.dtype, known)}", f"one of {', '.join(known)}")
    return export.Asked(
        asked.checkpoint, asked.output.expanduser(), asked.dtype, _bytes(asked.shard_size), asked.merge,
        asked.config_from, asked.trust_pickle,
    )  # fmt: skip


def _bytes(size: str) -> int:
    try:
        found = parse_size_to_int(size)
    except ValueError:
        found = 0
    if found <= 0:
        raise InputError(f"--shard_size {size} is no size", "a number and a unit, such as 500MB or 5GB")
    return found


if __name__ == "__main__":
    with stop_on_bad_input():
        main(sys.argv[1:])
