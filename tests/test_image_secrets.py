"""What the build was told in confidence is in no layer and not in the history: a proxy's CA and the proxy itself."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from containers import IMAGE, docker, shell

pytestmark = pytest.mark.image
PEM = re.compile(r"-----BEGIN CERTIFICATE-----\n(.+?)\n-----END", re.DOTALL)


@pytest.fixture(scope="module")
def history() -> str:
    return docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", IMAGE).stdout


def layers() -> list[str]:
    """The folders of the image's layers on this machine, also of files that a later layer hides."""
    data = json.loads(docker("image", "inspect", IMAGE).stdout)[0]["GraphDriver"]["Data"]
    folders = [data["UpperDir"], *data["LowerDir"].split(":")]
    if not all(os.access(folder, os.R_OK) for folder in folders):
        pytest.skip("the engine's own folders cannot be read by this user")
    return folders


def found_in_layers(text: str) -> list[str]:
    command = ["grep", "--recursive", "--files-with-matches", "--fixed-strings", "--", text, *layers()]
    return subprocess.run(command, capture_output=True, text=True).stdout.split()


def test_the_ca_of_the_build_is_in_no_layer(history):
    bundle = os.environ.get("SLIPWAY_CA_BUNDLE")
    if not bundle:
        pytest.skip("the image was built without CA_BUNDLE")
    ours = set(PEM.findall(shell("cat /etc/ssl/certs/ca-certificates.crt")))
    secret = [body for body in PEM.findall(Path(bundle).read_text()) if body not in ours]
    if not secret:
        pytest.skip("CA_BUNDLE holds no CA that Debian does not ship")
    line = max(secret[0].splitlines()[1:-1])
    assert found_in_layers(line) == [] and line not in history


def test_the_scan_finds_what_is_there():
    """The same scan for a line that every layer search must see: a certificate that Debian itself ships."""
    body = PEM.findall(shell("cat /etc/ssl/certs/ca-certificates.crt"))[0]
    assert found_in_layers(max(body.splitlines()[1:-1]))


def test_no_proxy_is_in_the_history_or_the_environment(history):
    config = docker("image", "inspect", "--format", "{{json .Config}}", IMAGE).stdout
    assert "build_venv.py" in history and "proxy" not in (history + config).lower()
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        assert not os.environ.get(name) or os.environ[name] not in history + config
