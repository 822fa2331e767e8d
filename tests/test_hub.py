"""Models on a hub: the real huggingface_hub against a local server that answers, refuses or is not there."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import run
from hub_server import COMMIT, serving

from slipway import embedded

RESOLVE = """
import sys
from slipway.errors import stop_on_bad_input
from slipway import models
with stop_on_bad_input():
    model = models.resolve(sys.argv[1], revision=(sys.argv[2:] or [None])[0])
    raise SystemExit(f"{model} was found")
"""
LOAD = """
import sys, torch
from slipway import models
model = models.resolve(sys.argv[1])
tokenizer = models.load_tokenizer(model)
loaded = models.load(model, tokenizer, dtype=torch.float32, attn="eager", zero3=False)
weights = sum(p.numel() for p in loaded.parameters())
print(weights, len(tokenizer), loaded.name_or_path, model.revision, *model.notes, sep="|")
"""
FIND = """
import sys
from slipway import hub
found = hub.find(sys.argv[1], None, None)
print(found.revision, found.folder)
"""
SECONDS = 20  # of the whole process, imports included: ten retries with their pauses take longer


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> dict[str, Path]:
    """Repositories by name: a whole model, one without weights, one with a GGUF only, a half-gated one."""
    whole = embedded.folder("tiny-llama")
    bare = tmp_path_factory.mktemp("bare")
    shutil.copy(whole / "config.json", bare)
    ggufs = tmp_path_factory.mktemp("ggufs")
    (ggufs / "model.Q4_0.gguf").write_bytes(b"GGUF")
    return {"org/whole": whole, "org/bare": bare, "org/ggufs": ggufs, "org/half-gated": whole}


@pytest.fixture(scope="module")
def server(repositories):
    with serving(repositories) as (address, asked):
        yield address, asked


def ask(script: str, *arguments: str, endpoint: str, home: Path, **env: str) -> subprocess.CompletedProcess:
    """A fresh Python with its own hub cache below `home`; a refusal takes no longer than SECONDS."""
    began = time.monotonic()
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""} | env
    done = run(sys.executable, "-c", script, *arguments, timeout=120, **settings)
    took = time.monotonic() - began
    assert done.returncode != 2 or took < SECONDS, f"took {took:.0f} s"
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize(
    ("name", "found", "fix"),
    [
        ("org/gated", "is gated", "hf auth login"),
        ("org/half-gated", "is gated", "accept the licence"),
        ("org/forbidden", "HTTP 403", "HF_TOKEN"),
        ("org/unknown", "no such model, or it is private", "check the spelling"),
        ("org/private", "HTTP 401", "hf auth login"),
        ("org/broken", "is in trouble", "try again later"),
        ("org/garbage", "is no model hub", "proxy's login page"),
        ("org/bare", "holds no weights", "a whole model"),
        ("org/ggufs", "holds no config.json", "GGUF file can be downloaded"),
        ("smollm2-135M", 'did you mean "smollm2-135m"?', "./NAME"),
        ("a b", "neither an existing path nor a hub id", "OWNER/NAME"),
    ],
)
def test_what_the_hub_refuses_is_one_message_in_seconds(server, tmp_path, name, found, fix):
    done = ask(RESOLVE, name, endpoint=server[0], home=tmp_path)
    assert done.returncode == 2
    assert name in done.stderr and found in done.stderr.splitlines()[0] and fix in done.stderr.splitlines()[1]


def test_an_unknown_revision_is_named(server, tmp_path):
    done = ask(RESOLVE, "org/whole", "v9", endpoint=server[0], home=tmp_path)
    assert done.returncode == 2 and "no revision 'v9'" in done.stderr


@pytest.mark.parametrize("silent", [False, True], ids=["closed port", "no answer"])
def test_an_unreachable_hub_is_said_in_seconds(tmp_path, silent):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        if not silent:
            taken.close()
        done = ask(RESOLVE, "org/whole", endpoint=address, home=tmp_path)
    assert done.returncode == 2
    assert f"hub at {address} cannot be reached" in done.stderr and "smollm2-135m" in done.stderr


def test_offline_and_not_cached_is_said(tmp_path):
    done = ask(RESOLVE, "org/whole", endpoint="http://127.0.0.1:1", home=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and "HF_HUB_OFFLINE forbids" in done.stderr and "unset HF_HUB_OFFLINE" in done.stderr


def test_a_hub_model_loads_at_one_commit_and_again_without_the_hub(server, tmp_path):
    address, asked = server
    found = ask(FIND, "org/whole", endpoint=address, home=tmp_path)
    assert found.stdout.split() == [COMMIT, "None"], found.stderr
    assert not [line for line in asked if "safetensors" in line]

    first = ask(LOAD, "org/whole", endpoint=address, home=tmp_path)
    assert first.stdout.startswith(f"354624|2048|org/whole|{COMMIT}|"), first.stderr

    offline = ask(FIND, "org/whole", endpoint="http://127.0.0.1:1", home=tmp_path, HF_HUB_OFFLINE="1")
    assert offline.stdout.split()[0] == COMMIT and Path(offline.stdout.split()[1]).is_dir(), offline.stderr
    gone = ask(LOAD, "org/whole", endpoint="http://127.0.0.1:1", home=tmp_path)
    assert gone.stdout.startswith("354624|2048|org/whole|"), gone.stderr
    assert "cannot be reached; using the copy of org/whole" in gone.stdout
