"""Reads what `docker build --progress=plain` prints: which step runs, how long each stage took, the last words."""

import collections
import re
from collections.abc import Iterator

STEP = re.compile(r"#(\d+) \[(?:([\w-]+) )?(\d+/\d+)\] (.+)")  # "#8 [toolkit 2/3] COPY ..."
DONE = re.compile(r"#(\d+) (?:DONE ([\d.]+)s|CACHED)$")
SAID = re.compile(r"#(\d+) [\d.]+ (.*)")  # the step's own output, after the seconds since its start
LAST = 30  # lines of output that are shown when a build fails


class Reader:
    """Takes the output line by line. `stages`: seconds by stage, of the steps that were not in the cache."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self._steps: dict[str, tuple[str, str]] = {}
        self._said: collections.deque[str] = collections.deque(maxlen=LAST)

    def read(self, line: str) -> Iterator[str]:
        """A line to print for each step that ended."""
        line = line.rstrip()
        if match := STEP.match(line):
            number, stage, count, text = match.groups()
            self._steps[number] = (stage or "last", f"{stage or ''} {count} {short(text)}".strip())
        elif (match := DONE.match(line)) and match[1] in self._steps:
            stage, text = self._steps.pop(match[1])
            seconds = float(match[2] or 0)
            self.stages[stage] = self.stages.get(stage, 0) + seconds
            yield f"{seconds:7.1f} s  {text}" if match[2] else f" cached    {text}"
        elif match := SAID.match(line):
            self._said.append(match[2])
        elif "ERROR" in line or line.startswith(("error", "failed")):
            self._said.append(line)

    def last(self) -> list[str]:
        """The last lines that steps printed."""
        return list(self._said)


def short(text: str) -> str:
    """A Dockerfile's instruction on one line of a terminal."""
    text = re.sub(r"--mount=\S+|/bin/sh -c|#\(nop\)|# buildkit|\|\d+( \w+=\S*)+", "", text)
    return re.sub(r"\s+", " ", text).strip()[:100]


def table(stages: dict[str, float]) -> str:
    return "\n".join(f"{seconds:7.1f} s  stage {stage}" for stage, seconds in stages.items())
