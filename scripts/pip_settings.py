"""What this machine tells pip about indexes, proxies and certificates, said again in uv's words.

uv reads no pip.conf and no PIP_* variable. Without this a machine behind a company's mirror or CA, where pip
works, could not be set up. Settings about the network and about where packages lie are carried over; those
about how pip installs (constraint, target, ...) are not: the lock's hashes already say what is installed.
"""

import configparser
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

SECTIONS = ("global", "install")  # pip's order: its command's section wins over [global]


def read(environ: Mapping[str, str]) -> dict[str, str]:
    """pip's settings, long option name -> value; later files win over earlier ones and PIP_* over files."""
    settings: dict[str, str] = {}
    parsers = []
    for file in config_files(environ):
        parser = configparser.RawConfigParser()
        parser.read(file, encoding="utf-8")
        parsers.append(parser)
    for section in SECTIONS:
        for parser in parsers:
            if parser.has_section(section):
                settings |= {_name(key): value for key, value in parser.items(section) if value}
    return settings | {_name(key[4:]): value for key, value in environ.items() if key.startswith("PIP_") and value}


def config_files(environ: Mapping[str, str]) -> list[Path]:
    """pip's configuration files on Linux that exist, least important first."""
    own = environ.get("PIP_CONFIG_FILE", "")
    if own == os.devnull:
        return []
    home = Path(environ.get("HOME") or Path.home())
    shared = (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    folders = [*(Path(folder) / "pip" for folder in shared if folder), Path("/etc")]
    if not (own and Path(own).exists()):  # as in pip: a named file takes the place of the user's
        folders += [home / ".pip", Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip"]
    files = [folder / "pip.conf" for folder in folders] + ([Path(own)] if own else [])
    return [file for file in files if file.is_file()]


def for_uv(settings: Mapping[str, str], environ: Mapping[str, str]) -> tuple[dict[str, str], list[str], list[str]]:
    """(environment variables, flags, notes) for a uv command. What the user set for uv (`environ`) stays.

    Local folders that do not exist are left out with a note, for uv ends on them where pip goes on.
    """
    notes: list[str] = []
    uv = {
        "UV_DEFAULT_INDEX": settings.get("index-url", ""),
        "UV_INDEX": " ".join(_present("extra-index-url", settings, notes)),
        "UV_FIND_LINKS": ",".join(_present("find-links", settings, notes)),
        "UV_INSECURE_HOST": " ".join(settings.get("trusted-host", "").split()),
        "UV_HTTP_TIMEOUT": settings.get("timeout") or settings.get("default-timeout", ""),
        "UV_HTTP_RETRIES": settings.get("retries", ""),
        "UV_KEYRING_PROVIDER": "subprocess" if settings.get("keyring-provider") == "subprocess" else "",
        "SSL_CLIENT_CERT": settings.get("client-cert", ""),
        # As pip does: the machine's own store of CAs, where no file of CAs is named.
        "UV_SYSTEM_CERTS": "1",
        # As pip does: the best match of all indexes. The lock's hashes guard against a stranger's package.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    cert = settings.get("cert", "")
    if cert and "SSL_CERT_FILE" not in environ and "SSL_CERT_DIR" not in environ:
        uv["SSL_CERT_DIR" if Path(cert).is_dir() else "SSL_CERT_FILE"] = cert
    for scheme in ("HTTP_PROXY", "HTTPS_PROXY"):
        if scheme not in environ and scheme.lower() not in environ:
            uv[scheme] = settings.get("proxy", "")
    flags = ["--no-index"] if settings.get("no-index", "").lower() in ("1", "true", "yes", "on") else []
    return {key: value for key, value in uv.items() if value and key not in environ}, flags, notes


def without_secrets(text: str) -> str:
    """`text` with the user and password of each URL in it blanked out."""
    return re.sub(r"//[^/\s@]+@", "//***@", text)


def _name(key: str) -> str:
    return key.lower().replace("_", "-").removeprefix("--")


def _present(setting: str, settings: Mapping[str, str], notes: list[str]) -> list[str]:
    places = []
    for place in settings.get(setting, "").split():
        url = urlsplit(place)
        local = Path(unquote(url.path) if url.scheme == "file" else place).expanduser()
        if url.scheme in ("", "file") and not local.exists():
            notes.append(f"pip's {setting} {place} does not exist: left out")
        else:
            places.append(place if url.scheme else str(local))
    return places
