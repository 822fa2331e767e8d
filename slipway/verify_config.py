"""`make verify`: every ds_config and recipe in the tree is valid, and they fit together."""

from pathlib import Path

from slipway.errors import InputError
from slipway.verify import Finding, check, failed, passed

ROOT = Path(__file__).resolve().parent.parent


@check(
    "ds-configs",
    "every file in ds_configs/ is a config that DeepSpeed takes, with no key that it would ignore",
    fix="correct the key in that file; the message says where it belongs or what is nearest to it",
    limit_s=60,
)
def check_ds_configs() -> Finding:
    from slipway import ds_config

    files, wrong = sorted(Path(ROOT, "ds_configs").glob("*.json")), []
    for file in files:
        try:
            config = ds_config.load(file)
            if "nvme" in ds_config.facts_of(config).values():
                ds_config.set_nvme_path(config, "/nvme")  # as --nvme_path does: each machine has its own
            wrong += ds_config.find_problems(config, file.relative_to(ROOT))
        except InputError as error:
            wrong.append(error.message)
    return _said(wrong, len(files), "ds_configs")


@check(
    "recipes",
    "every recipe has arguments that TRL takes and that agree with its ds_config",
    fix="correct the key in that recipe; `make lint` names all of them with line numbers",
    limit_s=90,
)
def check_recipes() -> Finding:
    from slipway import report

    report.quiet()
    files = sorted(Path(ROOT, "recipes", "llama").glob("*.yaml"))
    wrong = [problem for file in files for problem in _problems(file)]
    return _said(wrong, len(files), "recipes")


def _problems(recipe: Path) -> list[str]:
    """What is wrong with a recipe, or between it and the ds_config that it names, on two ranks."""
    from slipway import arguments, ds_config, topology

    try:
        asked = arguments.read(["--config", str(recipe)])
        if not asked.get("deepspeed"):
            return []
        path = arguments.relative(str(asked.get("deepspeed")), recipe)
        values = {key: (asked.get(key), asked.origin(key)) for key in asked.defaults}
        return ds_config.conflicts(ds_config.load(path), path, values, topology.CPU_RANKS)[0]
    except InputError as error:
        return [error.message]


def _said(wrong: list[str], count: int, what: str) -> Finding:
    if not count:
        return failed("no {what} found below {root}", what=what, root=str(ROOT))
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return failed("{text}", text=f"{wrong[0]}{more}", wrong=wrong, more=len(wrong) - 1)
    return passed("{count} {what}, each valid", count=count, what=what)
