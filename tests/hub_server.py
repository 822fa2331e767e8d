"""A model hub on 127.0.0.1: serves folders as repositories, and refuses as the real one does."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Repository -> status, X-Error-Code, body, of every answer about it
REFUSALS = {
    "org/gated": (401, "GatedRepo", b""),
    "org/forbidden": (403, None, b""),
    "org/unknown": (404, "RepoNotFound", b""),
    "org/private": (401, None, b""),
    "org/broken": (503, None, b""),
    "org/garbage": (200, None, b"<html>Please log in to the airport</html>"),
}


class Handler(http.server.BaseHTTPRequestHandler):
    folders: dict[str, Path] = {}  # noqa: RUF012
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        words = path.removeprefix("/api/models").strip("/").split("/")
        repository, rest = "/".join(words[:2]), words[2:]
        if repository in REFUSALS:
            status, code, body = REFUSALS[repository]
            self._answer(status, body, {"X-Error-Code": code} if code else {})
        elif repository == "org/half-gated" and rest[:1] == ["resolve"]:
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif repository not in self.folders:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/"):
            self._describe(repository, rest)
        else:
            self._file(self.folders[repository] / "/".join(rest[2:]))

    do_HEAD = do_GET

    def _describe(self, repository: str, rest: list[str]) -> None:
        files = sorted(file for file in self.folders[repository].iterdir() if file.is_file())
        if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _etag(f)} for f in files]
            self._answer(200, json.dumps(tree).encode())
        else:
            info = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": file.name} for file in files]}
            self._answer(200, json.dumps(info).encode())

    def _file(self, file: Path) -> None:
        if file.is_file():
            self._answer(200, file.read_bytes(), {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT})
        else:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not to the test's stderr; `asked` holds the requests."""


def _etag(file: Path) -> str:
    return f"{abs(hash(file.name)):040x}"[:40]


@contextlib.contextmanager
def serving(folders: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """The hub's address, and the list that requests are noted in."""
    handler = type("Serving", (Handler,), {"folders": folders, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.asked
    finally:
        server.shutdown()
        server.server_close()
