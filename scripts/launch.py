"""Check a recipe's arguments, then run it on every GPU of this machine, or on two CPU ranks where there is none.

    python scripts/launch.py [--nproc N] recipes/llama/finetune.py --config recipes/llama/zero3.yaml [--flag value ...]

A recipe is a script with a module `preflight` in it: `check(argv, world)` gives a plan, with the `output` folder that
the ranks are told by --output_dir, and `before_ranks()`, which is called once; and `print_help()`.

Exit codes: 0 done, 1 a rank failed, 2 bad input (nothing was started or changed), 130 Ctrl-C, 143 SIGTERM.
"""

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import psutil

from slipway import report, topology
from slipway.errors import InputError, stop_on_bad_input

SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}
DEATHS = {
    signal.SIGKILL: "it was killed, most often because host memory ran out (`dmesg | grep -i oom` tells): "
    "fewer ranks, a smaller --max_length, RECIPE=lora, or no offload to the CPU",
    signal.SIGBUS: "most often /dev/shm is too small: start the container with --shm-size 16g",
    signal.SIGILL: "a compiled op was built for another CPU: remove ~/.cache/torch_extensions",
    signal.SIGSEGV: "a compiled op or driver crashed: the lines above name it",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--nproc", type=int, help="ranks; a rank per GPU, or 2 without a GPU, if left out")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    os.environ["SLIPWAY_LAUNCHED_AT"] = str(psutil.Process().create_time())  # imports take their time too
    report.quiet()
    topology.forget_outer_ranks()
    world = topology.plan(asked.nproc)
    topology.prepare_environment(world)
    recipe = _load(asked.script)
    if {"--help", "-h"} & set(asked.arguments):
        recipe.preflight.print_help()
        return 0
    plan = recipe.preflight.check(asked.arguments, world)
    plan.before_ranks()
    os.environ["SLIPWAY_WORLD_SIZE"] = str(world.size)
    return _run(world.size, asked.script, [*asked.arguments, "--output_dir", str(plan.output)])


def _load(script: Path) -> ModuleType:
    """The recipe as a module, for its preflight."""
    spec = importlib.util.spec_from_file_location("recipe", script) if script.is_file() else None
    if spec is None or spec.loader is None:
        raise InputError(f"no script {script}", "name a recipe's script, such as recipes/llama/finetune.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(ranks: int, script: Path, arguments: list[str]) -> int:
    """Run the script under torchrun's agent in this process; its exit code, with one line where a rank failed."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # By number: in a container without a network the machine has a name that does not resolve, and ranks would wait.
    command = ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", str(ranks), str(script), *arguments]
    try:
        torchrun.main(command)
    except ChildFailedError as error:
        return _explain(error)
    except SignalException as stop:
        code = SIGNALS.get(stop.sigval, 1)
        print(f"stopped by {signal.Signals(stop.sigval).name}; all ranks have ended", file=sys.stderr)
        return code
    return 0


def _explain(error: "ChildFailedError") -> int:  # noqa: F821  torch is imported where it is needed
    """Exit code of the rank that failed first, and one line about it; a rank that said why itself adds nothing."""
    rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
    if failure.exitcode == 2:
        return 2
    if failure.exitcode < 0:
        died = signal.Signals(-failure.exitcode)
        hint = DEATHS.get(died, "see the lines above")
        print(f"error: rank {rank} was ended by {died.name}\n  fix: {hint}", file=sys.stderr)
        return 1
    print(
        f"error: rank {rank} failed with exit code {failure.exitcode}; its traceback is above",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    with stop_on_bad_input():
        sys.exit(main(sys.argv[1:]))
