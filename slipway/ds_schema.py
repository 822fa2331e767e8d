"""What may stand in a ds_config, taken from the installed DeepSpeed, so that an upgrade of it is followed.

slipway.ds_probe finds it out. That takes an import of DeepSpeed (5 s, and on a GPU host it runs nvcc), so it
is done once, in another process, and kept as JSON in the cache.

A node of the schema: {"types": [...]} and, if any, "keys" (name -> node), "open" (takes any key),
"choices", "ge", "gt", "le", "lt", "default", "deprecated" (what to use instead), "removed" (its words).
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipway import cache
from slipway.errors import InputError

Node = dict[str, Any]

# The keys where Hugging Face's Trainer puts a value for "auto" (transformers/integrations/deepspeed.py).
HF_FILLS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
    "fp16.enabled",
    "bf16.enabled",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)

_PROBE = Path(__file__).with_name("ds_probe.py")


@functools.cache
def schema() -> Node:
    """The root node, with "optimizers" and "schedulers" (type -> node of its params) beside its "keys".

    Raises InputError if the installed DeepSpeed cannot be imported.
    """
    code = hashlib.sha256(_PROBE.read_bytes()).hexdigest()[:8]
    name = f"ds_schema/{importlib.metadata.version('deepspeed')}-{code}"
    return json.loads((cache.build(name, _make) / "schema.json").read_text(encoding="utf-8"))


def _make(folder: Path) -> None:
    """Write `folder`/schema.json from another process: this one stays without torch and GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "slipway.ds_probe", str(folder / "schema.json")],
        cwd=Path(__file__).resolve().parent.parent,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise InputError(f"DeepSpeed could not be read for the keys of a ds_config: {last}", "make the setup anew")


def leaves(section: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) of a config that is not an object itself."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield ".".join((*path, key)), value


def at(config: dict[str, Any], dotted: str, default: Any = None) -> Any:
    """The value of a dotted key, or `default` where it or a section above it is missing."""
    for key in dotted.split("."):
        if not isinstance(config, dict) or key not in config:
            return default
        config = config[key]
    return config


def params_of(section: str, kind: str) -> Node:
    """The node of the params of an "optimizer" or "scheduler" of this type; one that takes any if unknown."""
    known = schema()[f"{section}s"]  # DeepSpeed's own optimizers go by lower case, torch's and schedulers do not
    return known.get(kind) or known.get(kind.lower()) or {"types": ["object"], "open": True}


def default_of(dotted: str) -> Any:
    """DeepSpeed's default for a key; None where it has none or tells none."""
    node = schema()
    for key in dotted.split("."):
        node = node.get("keys", {}).get(key, {})
    return node.get("default")
