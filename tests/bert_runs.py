"""Runs the BERT recipe many times from one process that has imported all it needs: each rank of each run is a fork.

python tests/bert_runs.py JOBS.json

A job: {"argv": [...], "ranks": 1, "kill": null, "change": null}. kill: [event, n], SIGKILL to the whole run at the n-th
event of "step" (an optimizer step was made, nothing of it saved yet), "next" (the loop goes on to the next one), "file"
(a file of a checkpoint is written) or "seal" (the files or the manifest of one have reached the disk).
change: [[text, other], ...], put into train.py, to see a test fail.
room: MiB of memory to write to that the last rank may take beside what it has at the start.
Prints a list of the ranks' exit statuses, a list for each job; output goes to JOBS.json.N.RANK.
"""

import gc
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import accelerate.tracking  # noqa: F401  imported once, for all forks
import psutil
import torch.utils.tensorboard
import transformers
import transformers.models.bert.modeling_bert
from harness import TRAIN

from slipway import bert_preflight, bert_run, errors, manifest

assert transformers.get_linear_schedule_with_warmup and torch.utils.data.DataLoader
assert bert_preflight and transformers.models.bert.modeling_bert.BertForSequenceClassification


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def kill_at(event: str, number: int) -> None:
    owner, name = {
        "step": (bert_run.Clock, "stop"),
        "next": (bert_run.Clock, "start"),
        "file": (torch, "save"),
        "seal": (manifest, "_sync"),
    }[event]
    real, left = getattr(owner, name), [number]

    def counted(*args: object, **kwargs: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            os.killpg(0, signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(owner, name, counted)


def rank(job: dict, number: int, port: int, output: str) -> None:
    """What a fork does; it does not return."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    ranks = job.get("ranks", 1)
    if ranks > 1:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if job.get("kill"):
        kill_at(*job["kill"])
    if job.get("room") and number == ranks - 1:
        most = psutil.Process().memory_info().data + job["room"] * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    source = TRAIN.read_text()
    for old, new in job.get("change") or ():
        assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {TRAIN.name}"
        source = source.replace(old, new)
    sys.argv = [str(TRAIN), *map(str, job["argv"])]
    names = {"__name__": "train", "__file__": str(TRAIN)}
    exec(compile(source, TRAIN, "exec"), names)
    with errors.stop_on_bad_input():
        names["main"](sys.argv[1:])
    sys.exit(0)


def main(path: str) -> None:
    gc.freeze()  # else each fork's collection would copy all of what was imported
    statuses = []
    for n, job in enumerate(json.loads(Path(path).read_text())):
        children, port = [], free_port()
        for number in range(job.get("ranks", 1)):
            child = os.fork()
            if child == 0:
                os.setpgid(0, children[0] if children else 0)
                rank(job, number, port, f"{path}.{n}.{number}")
            os.setpgid(child, children[0] if children else child)
            children.append(child)
        statuses.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    print(json.dumps(statuses))


if __name__ == "__main__":
    main(sys.argv[1])
