"""The embedded data set: functions of an installed package and their docstrings, as chat messages.

    rows = docstrings.load()   # [{"messages": [user, assistant], "name": "transformers...", "package": ...}]

Real English, on every machine that has the pins, and never redistributed. The package is parsed and not imported.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from slipway import cache

# One package that has thousands of docstrings in one style: what a demonstration of minutes can learn.
PACKAGES = ("transformers",)
ROWS = 3000
ASK = "Write the docstring of this Python function:\n\n"
_SHORTEST, _LONGEST = 150, 8000  # characters: below there is no prose, above are whole manuals
_LONGEST_SIGNATURE = 1500


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """What the rows depend on: Python (which parses and prints signatures) and each of the packages here."""
    owners = importlib.metadata.packages_distributions()
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    found |= {name: importlib.metadata.version(owners[name][0]) for name in packages if name in owners}
    return found


def load() -> list[dict]:
    """The rows (see `build`), from the cache where they were built before."""
    here = hashlib.sha256(Path(__file__).read_bytes() + json.dumps(versions()).encode()).hexdigest()[:16]

    def make(folder: Path) -> None:
        (folder / "rows.json").write_text(json.dumps(build()), encoding="utf-8")

    return json.loads((cache.build(f"docstrings/{here}", make) / "rows.json").read_text(encoding="utf-8"))


def build(packages: tuple[str, ...] = PACKAGES, rows: int = ROWS) -> list[dict]:
    """`rows` rows of the packages, or all there are, in an order that mixes them; more files, more rows.

    The same packages in the same versions give the same rows in the same order: nothing here is random.
    """
    files = sorted((key(name), name, path) for package in packages for name, path in _files(package))
    seen: set[str] = set()
    found: list[dict] = []
    for _, name, path in files:
        if len(found) >= rows:  # parsing all of them would take a minute
            break
        found += _read(path, name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"), seen)
    return sorted(found[:rows], key=lambda row: key(row["name"]))


def key(name: str, salt: str = "") -> str:
    """A number in hex that a name fixes: an order other than the alphabet's, the same on every machine."""
    return hashlib.sha256(f"{salt}{name}".encode()).hexdigest()


def _files(package: str) -> list[tuple[str, Path]]:
    """("package/folder/module.py", path) of the package's modules without its tests; none if not installed."""
    spec = importlib.util.find_spec(package)  # of a top-level name: it finds, and imports nothing
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = Path(next(iter(spec.submodule_search_locations)))
    # Relative to the folder above the package, so that the name is the same in every venv.
    names = ((path.relative_to(folder.parent).as_posix(), path) for path in folder.rglob("*.py"))
    return [(name, path) for name, path in names if "test" not in name]


def _read(path: Path, module: str, seen: set[str]) -> list[dict]:
    """The rows of a file; those whose text or signature is in `seen` are left out, and the others added to it."""
    found = []
    for name, signature, text in _functions(path, module):
        if text not in seen and signature not in seen:
            seen |= {text, signature}
            turns = [{"role": "user", "content": ASK + signature}, {"role": "assistant", "content": text}]
            found.append({"messages": turns, "name": name, "package": module.partition(".")[0]})
    return found


def _functions(path: Path, module: str) -> Iterator[tuple[str, str, str]]:
    """(full name, signature, docstring) of each documented function and method of a file, in fixed order."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates and Python 2 leftovers are not Python
        return
    waiting: list[tuple[str, ast.AST]] = [(module, tree)]
    while waiting:
        prefix, parent = waiting.pop(0)
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name = f"{prefix}.{node.name}"
            if isinstance(node, ast.ClassDef):
                waiting.append((name, node))
                continue
            text = (ast.get_docstring(node) or "").strip()
            if _SHORTEST <= len(text) <= _LONGEST:
                signature = _signature(node, name.removeprefix(f"{module}."))
                if len(signature) <= _LONGEST_SIGNATURE:
                    yield name, signature, text


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{word} {name}({ast.unparse(node.args)}){result}"
