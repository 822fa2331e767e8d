"""What the model hub says about a repository, in seconds, without its weights; a refusal is one message."""

import os
from dataclasses import dataclass
from pathlib import Path

from slipway.errors import InputError

TIMEOUT_S = 6  # per request, none is repeated: a hub that is slower than this counts as unreachable


@dataclass(frozen=True)
class Found:
    """A hub repository: its files' names at commit `revision`; `folder` if only a cached copy was had."""

    files: tuple[str, ...]
    revision: str | None
    folder: Path | None = None


def offline() -> bool:
    """Whether the user forbids to ask the hub, by HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def logged_in() -> bool:
    """Whether there is a token for the hub, and the hub may be asked. The token itself is not tried."""
    from huggingface_hub import get_token

    return bool(get_token()) and not offline()


def find(name: str, revision: str | None, token: str | None, hint: str = "") -> Found:
    """Looks up repository `name` at `revision` (the default branch, if None).

    Without a network, or with HF_HUB_OFFLINE set, the copy in the hub's own cache is taken. Raises InputError
    for a repository that is unknown, gated or forbidden, and for a hub that is unreachable or talks nonsense;
    `hint` goes behind the name where it is unknown.
    """
    from httpx2 import TransportError  # what huggingface_hub speaks HTTP with
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        if offline():
            raise OfflineModeIsEnabled
        info = HfApi().model_info(name, revision=revision, token=token, timeout=TIMEOUT_S)
        files = tuple(sibling.rfilename for sibling in info.siblings or ())
        for small in ("config.json", "adapter_config.json"):
            if small in files:  # a gated repository shows its list to all, but its files only to those who may
                _download_small(name, small, revision, token)
        return Found(files, info.sha)
    except HFValidationError as error:
        raise InputError(
            f"MODEL={name} is neither an existing path nor a hub id{hint}", "a hub id is OWNER/NAME"
        ) from error
    except (TransportError, OfflineModeIsEnabled, OSError, ValueError, TypeError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            raise _refused(name, revision, error, hint) from error
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            folder = Path(cached).parent
            return Found(tuple(file.name for file in folder.iterdir()), folder.name, folder)
        raise _not_reached(name, error, hint) from error


def download(name: str, revision: str | None, token: str | None = None) -> Path:
    """The folder that holds the repository's weights, configs and tokenizer, downloaded if need be."""
    from httpx2 import TransportError
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]
    found = find(name, revision, token)
    if found.folder:
        return found.folder
    if not any(file.endswith(".safetensors") for file in found.files):
        wanted.append("*.bin")
    try:
        # Some repositories hold the same weights twice: in other formats below folders, or as consolidated.*
        return Path(
            snapshot_download(
                name,
                revision=found.revision,
                token=token,
                allow_patterns=wanted,
                ignore_patterns=["*/*", "consolidated*"],
            )
        )
    except (TransportError, OSError) as error:
        raise _not_reached(name, error, "") from error


def _download_small(name: str, file: str, revision: str | None, token: str | None) -> None:
    """Into the cache, by the revision's name, so that the name is known there when the hub is not reached."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    # hf_hub_download alone would try for a minute where the hub has just gone away: ask once first.
    get_hf_file_metadata(hf_hub_url(name, file, revision=revision), token=token, timeout=TIMEOUT_S)
    hf_hub_download(name, file, revision=revision, token=token, etag_timeout=TIMEOUT_S)


def _refused(name: str, revision: str | None, error: OSError, hint: str) -> InputError:
    """The hub's answer 4xx in our words."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    log_in = "`hf auth login`, or set HF_TOKEN to a token from the hub's settings page"
    page = f"{constants.ENDPOINT}/{name}"
    code = error.response.status_code
    if isinstance(error, GatedRepoError):
        who = "this login has not been let in" if get_token() else "nobody is logged in"
        return InputError(
            f"MODEL={name} is gated: its owner asks for a licence to be accepted, and {who} (HTTP {code})",
            f"accept the licence at {page}, then {log_in}",
        )
    if isinstance(error, RevisionNotFoundError):
        return InputError(f"MODEL={name} has no revision {revision!r}", f"see the branches and tags at {page}")
    if isinstance(error, RepositoryNotFoundError) or code == 404:
        return InputError(
            f"MODEL={name}: the hub knows no such model, or it is private and this login cannot see it{hint}",
            f"check the spelling; a private one needs {log_in}; a local folder is given as ./NAME",
        )
    if code in (401, 403):
        return InputError(
            f"MODEL={name}: the hub refused this login (HTTP {code})",
            f"{log_in}; a token needs read access to it, and a gated model's licence accepted at {page}",
        )
    return InputError(f"MODEL={name}: the hub answered HTTP {code}", "wait a little and try again")


def _not_reached(name: str, error: Exception, hint: str) -> InputError:
    """No usable answer: offline, no network, a bad certificate, a server in trouble, or what is no hub."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    elsewhere = "MODEL=smollm2-135m, a local folder or a GGUF file need no hub"
    if isinstance(error, OfflineModeIsEnabled):
        variable = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
        return InputError(
            f"MODEL={name} is not in the hub's cache ({constants.HF_HUB_CACHE}), "
            f"and {variable} forbids to fetch it{hint}",
            f"unset {variable}, or bring the model into that cache; {elsewhere}",
        )
    said = " ".join(str(error).split())[:150] or type(error).__name__
    if isinstance(error, HfHubHTTPError):
        return InputError(f"MODEL={name}: the hub at {constants.ENDPOINT} is in trouble ({said})", "try again later")
    if isinstance(error, ValueError | TypeError):
        return InputError(
            f"MODEL={name}: what answers at {constants.ENDPOINT} is no model hub ({said})",
            f"look for a proxy's login page in between, or a wrong HF_ENDPOINT; {elsewhere}",
        )
    trust = "set SSL_CERT_FILE to your company's CA bundle; " if "CERTIFICATE" in said.upper() else ""
    return InputError(
        f"MODEL={name} is no path here, and the hub at {constants.ENDPOINT} cannot be reached ({said}){hint}",
        f"{trust}check the network and the proxy settings; {elsewhere}",
    )
