"""What the build was told in confidence is in no layer and not in the history: a proxy's CA and the proxy itself."""

import json
import os
import re
import subprocess
from pathlib import Path

import certifi
import grpc
import pip
import pytest
from containers import IMAGE, docker, shell

pytestmark = pytest.mark.image
# Debian's certificates, as its package lists them with their checksums.
LISTED = "cd / && grep '[.]crt$' var/lib/dpkg/info/ca-certificates.md5sums"
PEM = re.compile(r"-----BEGIN CERTIFICATE-----\n(.+?)\n-----END", re.DOTALL)


@pytest.fixture(scope="module")
def history() -> str:
    done = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", IMAGE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def layers() -> list[str]:
    """The folders of the image's layers on this machine, also of files that a later layer hides."""
    data = json.loads(docker("image", "inspect", IMAGE).stdout)[0]["GraphDriver"]["Data"]
    folders = [data["UpperDir"], *data["LowerDir"].split(":")]
    if not all(os.access(folder, os.R_OK) for folder in folders):
        pytest.skip("the engine's own folders cannot be read by this user")
    return folders


def certificates(text: str) -> set[str]:
    """Each certificate's base64, on one line: bundles break lines as they like."""
    return {body.replace("\n", "") for body in PEM.findall(text)}


def public_certificates() -> set[str]:
    """What Debian and the Python packages ship to everyone, read where the build's CA cannot have got into it: Debian's
    files are those that its package lists, unchanged, and the packages are this test's own, installed from the same
    lock."""
    shell(f"{LISTED} | md5sum --check --strict --quiet")  # fails too where none is listed
    public = certificates(shell(f"{LISTED} | cut -c 35- | tr '\\n' '\\0' | xargs -0 cat"))
    bundles = [Path(certifi.where()), *Path(grpc.__file__).parent.rglob("roots.pem")]
    bundles += Path(pip.__file__).parent.rglob("cacert.pem")
    for bundle in bundles:
        public |= certificates(bundle.read_text())
    assert len(bundles) == 3 and len(public) > 100
    return public


@pytest.fixture(scope="module")
def lines() -> dict[str, set[str]]:
    """The ninth line (of 64 characters) of each certificate that is to be looked for: secret ones, and Debian's."""
    bundle, public = os.environ.get("SLIPWAY_CA_BUNDLE"), public_certificates()
    secret = certificates(Path(bundle).read_text()) - public if bundle else set()
    debian = certificates(shell("cat /etc/ssl/certs/ca-certificates.crt"))
    return {kind: {body[512:576] for body in bodies} for kind, bodies in (("secret", secret), ("debian", debian))}


@pytest.fixture(scope="module")
def found(lines) -> dict[str, list[str]]:
    """Line -> the files of all layers that hold it; all 9 GB are read once."""
    patterns = "\n".join(sorted(lines["secret"]) + sorted(lines["debian"])[:1])
    words = ["--recursive", "--binary-files=text", "--only-matching", "--with-filename", "--fixed-strings", "--file=-"]
    done = subprocess.run(
        ["grep", *words, *layers()], input=patterns, capture_output=True, text=True, env={"LC_ALL": "C"}
    )
    assert done.returncode < 2 and not done.stderr, done.stderr[-3000:]  # 1: nothing found; 2: not all was read
    files: dict[str, list[str]] = {}
    for match in done.stdout.splitlines():
        file, _, line = match.rpartition(":")
        files.setdefault(line, []).append(file)
    return files


def test_the_ca_of_the_build_is_in_no_layer(history, lines, found):
    if not os.environ.get("SLIPWAY_CA_BUNDLE"):
        pytest.skip("the image was built without CA_BUNDLE")
    if not lines["secret"]:
        pytest.skip("CA_BUNDLE holds no CA that is not public")
    for line in lines["secret"]:
        assert line not in found and line not in history, found.get(line)


def test_the_scan_finds_what_is_there(lines, found):
    """The same scan sees a certificate that Debian itself ships."""
    assert lines["debian"] & set(found)


def test_no_proxy_is_in_the_history_or_the_environment(history):
    config = docker("image", "inspect", "--format", "{{json .Config}}", IMAGE).stdout
    assert "build_venv.py" in history and "proxy" not in (history + config).lower()
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        assert not os.environ.get(name) or os.environ[name] not in history + config
