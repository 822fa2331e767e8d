"""What `make verify` is made of: checks, and what one of them finds.

    @check("shm", "/dev/shm has room for ranks of one machine", fix="docker run --shm-size=16g ...", limit_s=10)
    def shm() -> Finding:
        free = ...
        return passed("{free:.1f} GiB free", free=free) if free > 1 else failed("{free:.1f} GiB free", free=free)

A check imports what is heavy or may be broken inside itself: it runs in a process of its own (slipway.verify_child,
started by slipway.verify_run), so that its import, crash or hang is its own failure. A fact is a template filled from
its figures, so every number that a person sees is in the JSON document too.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from slipway.errors import InputError, nearest

# In the order of the table. Importing one is cheap: none imports more than the standard library at its top.
MODULES = (
    "verify_pins",
    "verify_machine",
    "verify_network",
    "verify_config",
    "verify_gpu",
    "verify_cards",
    "verify_kernels",
    "verify_rates",
    "verify_ranks",
)


@dataclass(frozen=True)
class Finding:
    """What a check saw. `key` names which of its fixes is meant; "" is the check's own."""

    state: Literal["passed", "failed", "skipped"]
    fact: str
    figures: dict[str, Any] = field(default_factory=dict)
    key: str = ""


def passed(fact: str, **figures: Any) -> Finding:
    """The sentence is true. `fact` is a str.format template over `figures`."""
    return Finding("passed", fact.format(**figures), figures)


def failed(fact: str, key: str = "", **figures: Any) -> Finding:
    """The sentence is not true; `key` chooses the fix."""
    return Finding("failed", fact.format(**figures), figures, key)


def skipped(reason: str, **figures: Any) -> Finding:
    """Nothing could be found out; `reason` says why."""
    return Finding("skipped", reason.format(**figures), figures)


class Skip(Exception):
    """Raised deep in a check that cannot run here, with the reason."""


@dataclass(frozen=True)
class Check:
    """One line of the table. `fixes` holds a fix for each key that its findings may have; "" is the usual one."""

    name: str
    sentence: str
    fixes: dict[str, str]
    limit_s: int
    alone: bool
    run: Callable[[], Finding]


@dataclass(frozen=True)
class Row:
    """A check's outcome as the table and the JSON document show it; docs/verify.schema.json describes it."""

    name: str
    sentence: str
    state: str
    fact: str
    fix: str | None
    finding: str | None  # stable: "name" or "name.key"
    figures: dict[str, Any]
    seconds: float
    limit_s: int
    output: list[str]  # the last lines a failed check's process printed

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_CHECKS: dict[str, Check] = {}


def check(
    name: str, sentence: str, *, fix: str, limit_s: int, fixes: dict[str, str] | None = None, alone: bool = False
) -> Callable[[Callable[[], Finding]], Callable[[], Finding]]:
    """Makes a function a check. `limit_s` is when it is killed; `alone`: nothing else may run while it measures."""

    def register(run: Callable[[], Finding]) -> Callable[[], Finding]:
        _CHECKS[name] = Check(name, sentence, {"": fix, **(fixes or {})}, limit_s, alone, run)
        return run

    return register


def checks(only: str | None = None) -> list[Check]:
    """All checks in the order of the table, or those that `only` names: "shm,pins"; "gpu", which is no check's
    own name, stands for all that begin with "gpu-".

    Raises InputError for a name that fits none.
    """
    for module in MODULES:
        importlib.import_module(f"slipway.{module}")
    if not only:
        return list(_CHECKS.values())
    words = [word.strip() for word in only.split(",") if word.strip()]
    for word in words:
        if not any(_fits(name, word) for name in _CHECKS):
            raise InputError(f"ONLY={word}: no such check{nearest(word, _CHECKS)}", f"one of {', '.join(_CHECKS)}")
    return [one for one in _CHECKS.values() if any(_fits(one.name, word) for word in words)]


def judges() -> list[Callable[..., Finding]]:
    """The checks that judge the answers of a slipway.gpu machine, which is their one argument."""
    return [one.run for one in checks() if inspect.signature(one.run).parameters]


def _fits(name: str, word: str) -> bool:
    return name == word or (word not in _CHECKS and name.startswith(f"{word}-"))


def row(one: Check, found: Finding, seconds: float, output: list[str]) -> Row:
    """The line of a finding. Raises KeyError if the check has no fix by the finding's key."""
    is_red = found.state == "failed"
    return Row(
        name=one.name,
        sentence=one.sentence,
        state=found.state,
        fact=found.fact,
        fix=one.fixes[found.key].format(**found.figures) if is_red else None,
        finding=(f"{one.name}.{found.key}" if found.key else one.name) if is_red else None,
        figures=found.figures,
        seconds=round(seconds, 2),
        limit_s=one.limit_s,
        output=output if is_red else [],
    )
