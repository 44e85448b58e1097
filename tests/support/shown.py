# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Parses the documents: their code blocks, the commands in them, and the shown output. Tests run
the session of a ``console`` block; ``shell-session`` marks commands that need an engine, a device
or much time, which tests only parse. A page's ``console`` and ``python`` blocks run in order, in
one folder.
"""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "csrc/**/*.md", "tests/*.md", "bench/*.md")
    for path in ROOT.glob(pattern)
)
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

_FENCE = re.compile(r"^```([\w-]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_RULE = re.compile(r"[─-╿\s]*$")
# Names whose values depend on the machine or the run.
_OF_THE_MACHINE = {"pool", "DDIO", "engines", "targets missed"}  # a busy machine misses some


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced code block."""

    language: str
    text: str


@dataclasses.dataclass(frozen=True)
class Shown:
    """A command, as typed, and the output that the page shows below it."""

    line: str
    output: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """Return the command's words, without shell syntax."""
        words = shlex.split(self.line, comments=True)
        stops = [index for index, word in enumerate(words) if word in ("&", ">", "|", "&&")]
        return words[: stops[0]] if stops else words


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a document."""
    return [Block(match[1], match[2]) for match in _FENCE.finditer(path.read_text())]


def spans(path: Path) -> list[str]:
    """Return the code in the running text of a document, each span on one line."""
    text = _FENCE.sub("", path.read_text())
    return [" ".join(match[1].split()) for match in _SPAN.finditer(text)]


def commands(block: Block) -> Iterator[Shown]:
    """Return the commands of a block that begin with ``$``, each with the output that follows
    it.
    """
    lines = iter(re.sub(r"\\\n\s*", " ", block.text).splitlines())
    command, output = "", []
    for line in lines:
        if not line.startswith("$ "):
            output.append(line)
            continue
        if command:
            yield Shown(command, tuple(output))
        command, output = line[2:], []
        while command.count("'") % 2:  # JSON in quotes continues on the next line
            command += " " + next(lines).strip()
    if command:
        yield Shown(command, tuple(output))


def outline(output: str) -> list[str]:
    """Return the part of an output that is equal in each run: words, headers, names of rows, and
    the values of names, which may be wrapped, without numbers and units.
    """
    lines: list[str] = []
    name = ""
    for line in output.splitlines():
        if _RULE.fullmatch(line):
            continue
        first, *others = line.strip("│").split("│") if line.startswith("│") else [line]
        text = first.replace("┃", " ")
        if len(others) == 1:
            name = text.strip() or name
            text = f"{text} {others[0]}" if name not in _OF_THE_MACHINE else text
        text = re.sub(r"[\d.,]*\d( ([kMGT]?B|[KMGT]iB)(/s)?| [mun]?s)?\b", "0", text)
        if len(others) == 1 and not first.strip():
            lines[-1] = f"{lines[-1]} {' '.join(text.split())}".strip()
        else:
            lines.append(" ".join(text.split()))
    return lines
