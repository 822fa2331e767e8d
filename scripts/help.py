"""What `make help` prints: the Makefile's targets with their `##` texts, the recipes' first lines."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def targets(makefile: str) -> "list[tuple[str, str]]":
    """(name, text) of each `name: prerequisites  ## text` line."""
    lines = [line.partition("  ## ") for line in makefile.splitlines()]
    return [(rule.partition(":")[0], text) for rule, mark, text in lines if mark]


def recipes(folder: Path) -> "list[tuple[str, str]]":
    """(RECIPE=name, first comment) of each recipe in `folder`."""
    found = [(file.stem, file.read_text().partition("\n")[0].lstrip("# ")) for file in sorted(folder.glob("*.yaml"))]
    return [("RECIPE=" + name, text) for name, text in found]


def main() -> None:
    for title, rows in (
        ("make TARGET", targets((ROOT / "Makefile").read_text())),
        ("make finetune-llama RECIPE=... (zero3 is the default)", recipes(ROOT / "recipes" / "llama")),
    ):
        print(title)
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            print(f"  {name:<{width}}  {text}")


if __name__ == "__main__":
    main()
