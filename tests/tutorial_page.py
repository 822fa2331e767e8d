"""docs/from-the-tutorials.md, taken apart: each entry's copied snippet, what is said of it, and what to write."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from markdown_it import MarkdownIt

PAGE = Path(__file__).resolve().parent.parent / "docs" / "from-the-tutorials.md"


@dataclass(frozen=True)
class Block:
    """A fenced block of the page: its text, and the line of the page before its first."""

    text: str
    line: int

    def code(self) -> CodeType:
        """Compiled so that a traceback names the page and its line."""
        return compile("\n" * self.line + self.text, str(PAGE), "exec")


@dataclass(frozen=True)
class Entry:
    title: str  # the heading, without backticks
    wrong: Block
    seen: str  # the paragraph "On our pins: ..."
    right: Block

    @property
    def error(self) -> str:
        """`Type: words` of the error that the wrong snippet is said to end in; empty if it is said to run."""
        return next((code for code in re.findall(r"`([^`]+)`", self.seen) if re.match(r"\w+Error: ", code)), "")


def entries(page: Path = PAGE) -> list[Entry]:
    """The page's entries in order. Raises ValueError for a second-level heading that is not followed by a wrong
    block, a paragraph "On our pins:", and a right block."""
    found: list[dict] = []
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "inline" and before.type == "heading_open" and before.tag == "h2":
            found.append({"title": token.content.replace("`", "")})
        elif token.type == "inline" and token.content.startswith("On our pins:"):
            found[-1]["seen"] = " ".join(token.content.split())
        elif token.type == "fence" and token.info in ("python wrong", "python"):
            name = "wrong" if token.info.endswith("wrong") else "right"
            if name in found[-1]:
                raise ValueError(f"{page.name}:{token.map[0] + 1}: a second {name} block in one entry")
            found[-1][name] = Block(token.content, token.map[0] + 1)
    for parts in found:
        if list(parts) != ["title", "wrong", "seen", "right"]:
            raise ValueError(f"{page.name}: `{parts['title']}` has {list(parts)[1:]}, not wrong, seen, right")
    return [Entry(**parts) for parts in found]
