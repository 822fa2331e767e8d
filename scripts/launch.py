"""Check a recipe's arguments, then run it on every GPU of this machine, or on two CPU ranks where there is none.

    python scripts/launch.py [--nproc N] [--restarts N] recipes/llama/finetune.py --config recipes/llama/zero3.yaml ...
    python scripts/launch.py --resume_plan ...       # what a resume would do; nothing is started or changed

A recipe is a script with a module `preflight` in it: `check(argv, world)` gives a plan, and `print_help()`. The plan
has the `output` folder that the ranks are told by --output_dir; `before_ranks()`, which is called once; `limits()`,
which the ranks are watched by (slipway.watch); `last_good()`, the step that a stopped run can go on from; and
`resume_rows()`, what a resume would do.

Exit codes: 0 done, 1 a rank failed, 2 bad input (nothing was started or changed), 75 stopped by a signal with a
checkpoint that --resume auto goes on from, 130 (Ctrl-C) or 143 (SIGTERM) stopped without one.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from slipway import report, topology
from slipway.errors import InputError, stop_on_bad_input


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--nproc", type=int, help="ranks; a rank per GPU, or 2 without a GPU, if left out")
    parser.add_argument("--restarts", type=int, default=0, help="how often a failed run is started again by itself")
    parser.add_argument("--resume_plan", action="store_true", help="say what a resume would do, and start nothing")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    if asked.restarts < 0:
        raise InputError(f"RESTARTS={asked.restarts}", "give how often a failed run is started again, or leave it out")
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
    if asked.resume_plan:
        report.show_rows(plan.resume_rows())
        return 0
    plan.before_ranks()
    os.environ["SLIPWAY_WORLD_SIZE"] = str(world.size)
    return _run(world.size, asked.script, asked.arguments, plan, asked.restarts)


def _load(script: Path) -> ModuleType:
    """The recipe as a module, for its preflight."""
    spec = importlib.util.spec_from_file_location("recipe", script) if script.is_file() else None
    if spec is None or spec.loader is None:
        raise InputError(f"no script {script}", "name a recipe's script, such as recipes/llama/finetune.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(ranks: int, script: Path, arguments: list[str], plan: Any, restarts: int) -> int:
    """Run the script on `ranks` ranks under torchrun's agent in this process; the exit code of this script."""
    from slipway import watch  # which imports torch's agent: seconds, for nothing if the input is bad

    # By number: in a container without a network the machine has a name that does not resolve, and ranks would wait.
    command = ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", str(ranks), str(script)]
    words = [*command, *arguments, "--output_dir", str(plan.output)]
    return watch.run(words, plan.output, watch.Limits(restarts=restarts, **plan.limits()), plan.last_good)


if __name__ == "__main__":
    with stop_on_bad_input():
        sys.exit(main(sys.argv[1:]))
