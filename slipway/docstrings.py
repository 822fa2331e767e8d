"""The embedded data set: functions of the installed packages and their docstrings, as chat messages.

    rows = docstrings.load()   # [{"messages": [user, assistant], "name": "torch.nn...", "package": "torch"}]

Real English, on every machine that has the pins, and never redistributed. The packages are parsed and not
imported.
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

# Import names of packages in the closure of docker/requirements.lock that document their functions in prose.
PACKAGES = (
    "accelerate",
    "datasets",
    "deepspeed",
    "huggingface_hub",
    "matplotlib",
    "networkx",
    "numpy",
    "pandas",
    "peft",
    "sympy",
    "torch",
    "transformers",
    "trl",
)
ROWS = 3000
ASK = "Write the docstring of this Python function:\n\n"
_SHORTEST, _LONGEST = 150, 8000  # characters: below there is no prose, above are whole manuals
_LONGEST_SIGNATURE = 1500


def versions() -> dict[str, str]:
    """What the rows depend on: Python (which parses and prints signatures) and each of PACKAGES here."""
    owners = importlib.metadata.packages_distributions()
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    found |= {name: importlib.metadata.version(owners[name][0]) for name in PACKAGES if name in owners}
    return found


def load() -> list[dict]:
    """The rows (see `build`), from the cache where they were built before."""
    here = hashlib.sha256(Path(__file__).read_bytes() + json.dumps(versions()).encode()).hexdigest()[:16]

    def make(folder: Path) -> None:
        (folder / "rows.json").write_text(json.dumps(build()), encoding="utf-8")

    return json.loads((cache.build(f"docstrings/{here}", make) / "rows.json").read_text(encoding="utf-8"))


def build(packages: tuple[str, ...] = PACKAGES, rows: int = ROWS) -> list[dict]:
    """About `rows` rows, the same share of each package where it has that many, in an order that mixes them.

    The same packages in the same versions give the same rows in the same order: nothing here is random.
    """
    sources = {name: _files(name) for name in packages}
    sources = {name: files for name, files in sources.items() if files}
    seen: set[str] = set()
    found: list[dict] = []
    # Small packages first, so that what they lack of their share goes to the large ones.
    for left, (name, files) in enumerate(sorted(sources.items(), key=lambda item: (len(item[1]), item[0]))):
        share = (rows - len(found)) // (len(sources) - left)
        found += _take(name, files, share, seen)
    return sorted(found, key=lambda row: key(row["name"]))


def key(name: str, salt: str = "") -> str:
    """A number in hex that a name fixes: an order other than the alphabet's, the same on every machine."""
    return hashlib.sha256(f"{salt}{name}".encode()).hexdigest()


def _files(package: str) -> list[Path]:
    """The package's .py files without its tests, in an order that their names fix; none if not installed."""
    spec = importlib.util.find_spec(package)  # of a top-level name: it finds, and imports nothing
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = (path for path in folder.rglob("*.py") if "test" not in str(path.relative_to(folder)))
    return sorted(files, key=lambda path: key(path.relative_to(folder.parent).as_posix()))


def _take(package: str, files: list[Path], share: int, seen: set[str]) -> list[dict]:
    """Up to `share` rows from as few files as give them: parsing all of torch would take a minute."""
    found: list[dict] = []
    for path in files:
        if len(found) >= share:
            break
        # Relative to the folder above the package, so that the name is the same in every venv.
        parts = path.with_suffix("").parts
        module = ".".join(parts[len(parts) - 1 - parts[::-1].index(package) :]).removesuffix(".__init__")
        for name, signature, text in _functions(path, module):
            if text not in seen and signature not in seen and len(found) < share:
                seen |= {text, signature}
                turns = [{"role": "user", "content": ASK + signature}, {"role": "assistant", "content": text}]
                found.append({"messages": turns, "name": name, "package": package})
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
