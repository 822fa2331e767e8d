"""`make verify`: proxy and CA files are usable, and (information, never a failure) whether the model hub is reached."""

import os
import ssl
import time
import urllib.parse
import urllib.request
from pathlib import Path

from slipway.verify import Finding, check, failed, passed

CA_FILES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "NODE_EXTRA_CA_CERTS")
PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy", "ALL_PROXY", "all_proxy")
HUB_S = 4


def without_password(url: str) -> str:
    """A proxy's address as it may be shown."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


@check(
    "proxy",
    "proxy settings are addresses, and CA files hold certificates",
    fix="correct {variable}, or unset it; a company's CA is a PEM file that is mounted: "
    "docker run -v ca.pem:/ca.pem -e SSL_CERT_FILE=/ca.pem -e REQUESTS_CA_BUNDLE=/ca.pem",
    limit_s=10,
)
def check_proxy() -> Finding:
    proxies, certificates = {}, {}
    for variable in filter(os.environ.get, PROXIES):
        address = os.environ[variable]
        try:
            parts = urllib.parse.urlsplit(address if "://" in address else f"http://{address}")
            proxies[variable] = without_password(parts.geturl())
        except ValueError:  # a port that is no number
            parts = None
        if parts is None or not parts.hostname:
            return failed("{variable} is no address", variable=variable)
    for variable in filter(os.environ.get, CA_FILES):
        file = Path(os.environ[variable])
        try:
            ssl.create_default_context().load_verify_locations(file if file.is_file() else None, file)
            certificates[variable] = str(file)
        except (OSError, ssl.SSLError) as error:
            return failed("{variable}={file}: {error}", variable=variable, file=str(file), error=str(error))
        if not file.exists():
            return failed("{variable}={file} does not exist", variable=variable, file=str(file))
    text = ", ".join([*(f"{key} {value}" for key, value in proxies.items()), *certificates]) or "none is set"
    return passed("{text}", text=text, proxies=proxies, certificates=certificates)


@check(
    "hub",
    "information: whether the model hub is reached, and a token is there",
    fix="nothing has to be done: embedded models, local folders and GGUF files need no hub",
    limit_s=3 * HUB_S,
)
def check_hub() -> Finding:
    from huggingface_hub import constants, get_token

    from slipway import hub

    token = "a token is there" if get_token() else "no token (gated models need one: `hf auth login`, or HF_TOKEN)"
    if hub.offline():
        return passed("not asked: offline is set; {token}", token=token)
    began = time.monotonic()
    try:
        with urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_S):
            seconds = time.monotonic() - began
    except (OSError, ValueError) as error:  # URLError and TLS errors are OSErrors; ValueError: HF_ENDPOINT is no URL
        why = str(getattr(error, "reason", error))[:120]
        return passed("not reached ({why}): only local models and data; {token}", why=why, token=token)
    return passed("reached in {seconds:.1f} s; {token}", seconds=seconds, token=token)
