"""Where rows come from: the embedded docstrings, local files, or a dataset of the hub."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slipway import docstrings, files
from slipway.errors import InputError
from slipway.files import Row

EMBEDDED = "docstrings"
PROBE_SECONDS = 5

_LOG_IN = (
    "check the name; a private or gated one needs `hf auth login` (or HF_TOKEN), and its terms accepted on its page"
)
_OFFLINE = (
    "check the network and the proxy settings, or give a local file; what was downloaded before "
    "is found with HF_HUB_OFFLINE=1"
)


@dataclass
class Source:
    """An opened source: `rows()` reads it from the start, `fingerprint` changes when its content does."""

    name: str
    fingerprint: object  # json-able
    rows: Callable[[], Iterator[Row]]
    ignored: list[str] = field(default_factory=list)  # names in the folder that are no data files


def open_source(name: str, split: str, config: str | None) -> Source:
    """Opens `docstrings`, a path, or a hub id (`owner/name`, or `owner/name:split` to name another split).

    Nothing is read yet, but a hub's dataset is downloaded. Raises InputError if the source is not there.
    """
    if name == EMBEDDED:
        return Source(name, docstrings.versions(), _docstrings)
    if files.looks_like_path(name):
        paths, ignored = files.find(name)
        return Source(name, [_stamp(path) for path in paths], lambda: _all(paths), ignored)
    name, _, own_split = name.partition(":")
    return _hub(name, own_split or split, config)


def _docstrings() -> Iterator[Row]:
    return (Row(row["name"], {"messages": row["messages"]}, row["name"]) for row in docstrings.load())


def _stamp(path: Path) -> tuple[str, int, int]:
    stat = path.stat()
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns


def _all(paths: list[Path]) -> Iterator[Row]:
    for path in paths:
        yield from files.read(path)


def _hub(name: str, split: str, config: str | None) -> Source:
    """A dataset of the hub, downloaded or from Hugging Face's cache; if neither works, refused in seconds."""
    import datasets  # here, because it takes seconds and the launcher imports this module

    _probe(name)
    try:
        data = datasets.load_dataset(name, config, split=split)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise InputError(f"the hub's dataset {name} cannot be had: {_line(error)}", _LOG_IN) from error
    except ConnectionError as error:
        raise InputError(
            f"{name} is no local file or folder, nor in Hugging Face's cache, and the hub cannot be asked "
            f"({_line(error)})",
            _OFFLINE,
        ) from error
    except (ValueError, RuntimeError, datasets.exceptions.DatasetsError, OSError) as error:
        raise InputError(
            f"the hub's dataset {name} (config {config or 'default'}, split {split}) cannot be loaded: {_line(error)}",
            "mend the config or the split (NAME:SPLIT), or download its files and give their folder",
        ) from error

    def rows() -> Iterator[Row]:
        return (Row(f"{name}[{split}] row {number}", row) for number, row in enumerate(data, 1))

    return Source(f"{name}:{split}", data._fingerprint, rows)


def _probe(name: str) -> None:
    """One request without retries: without a network, load_dataset alone retries for 20 s and more."""
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE or os.environ.get("HF_DATASETS_OFFLINE"):
        return
    nowhere = f"{name} is no local file or folder, and "
    try:
        HfApi().dataset_info(name, timeout=PROBE_SECONDS)
    except errors.GatedRepoError as error:
        raise InputError(f"the hub's dataset {name} is gated ({_line(error)})", _LOG_IN) from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(f"{nowhere}the hub knows no such dataset", _LOG_IN) from error
    except errors.HFValidationError as error:
        raise InputError(f"{nowhere}no hub id is written so ({_line(error)})", "a hub id is OWNER/NAME") from error
    except (errors.HTTPError, OSError, ValueError) as error:
        raise InputError(f"{nowhere}the hub cannot be asked ({_line(error)})", _OFFLINE) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
