"""A hub that refuses or cannot be reached ends in one message within seconds; paths are never asked of it."""

import http.server
import threading
import time

import pytest
from huggingface_hub import constants
from rows import PAIRS, refused, write

from slipway import sources
from slipway.errors import InputError


class Hub(http.server.BaseHTTPRequestHandler):
    """Refuses as the hub does; `org/slow` never answers in time."""

    def do_GET(self) -> None:
        name = self.path.partition("/api/datasets/")[2].partition("?")[0]
        if name == "org/slow":
            time.sleep(3)
        code, error = {"org/gated": (403, "GatedRepo"), "org/unknown": (404, "RepoNotFound")}.get(name, (503, ""))
        self.send_response(code)
        self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing: the test's output is not the place for it."""


@pytest.fixture
def hub(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(sources, "PROBE_SECONDS", 1)
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("org/gated", "org/gated is gated"),
        ("org/unknown", "the hub knows no such dataset"),
        ("org/broken", "the hub cannot be asked"),
        ("org/slow", "the hub cannot be asked"),
        ("org/a/b", "no hub id is written so"),
    ],
)
def test_a_hub_that_refuses_is_one_message_within_seconds(hub, name, part):
    start = time.monotonic()
    refused(name, name, part)
    assert time.monotonic() - start < 3


def test_no_network_is_one_message_within_seconds(hub):
    hub.shutdown()
    hub.server_close()
    start = time.monotonic()
    refused("org/name", "org/name is no local file or folder", "cannot be asked", "HF_HUB_OFFLINE")
    assert time.monotonic() - start < 3


def test_offline_and_not_in_the_cache():
    start = time.monotonic()
    refused("org/name", "org/name is no local file or folder, nor in Hugging Face's cache")
    assert time.monotonic() - start < 10  # the import of `datasets` included


def test_paths_are_never_asked_of_the_hub(hub):
    for path in ("nowhere.jsonl", "./nowhere", "~/nowhere", "/nowhere/at/all", "a/b.parquet.gz"):
        refused(path, f"{path}: no such file or folder")


def test_what_the_datasets_library_loads_is_read(tmp_path, monkeypatch):
    write(tmp_path / "train.jsonl", PAIRS)
    write(tmp_path / "test.jsonl", PAIRS[:1])
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    opened = sources._hub(str(tmp_path), "test", None)
    assert [row.data for row in opened.rows()] == PAIRS[:1]
    assert next(opened.rows()).where.endswith("[test] row 1")
    with pytest.raises(InputError, match="split validation"):
        sources._hub(str(tmp_path), "validation", None)
