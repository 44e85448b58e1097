# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The classical mutants of a C file, found by the tokens of each line inside a function.

The verbs of the protocol have other mutants (``scripts/mutants``); these change the logic around
them.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from python_mutants import Mutant

_TOKENS = {
    " == ": " != ",
    " != ": " == ",
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " && ": " || ",
    " || ": " && ",
    " + ": " - ",
    " - ": " + ",
    " * ": " + ",
    " / ": " * ",
    " % ": " / ",
    " << ": " >> ",
    " >> ": " << ",
    " & ": " | ",
    " | ": " & ",
    " += ": " -= ",
    " -= ": " += ",
    " |= ": " &= ",
    "++": "--",
}
_TOKEN = re.compile("|".join(re.escape(token) for token in sorted(_TOKENS, key=len, reverse=True)))
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
_CONDITION = re.compile(r"\b(?:if|while) \((?P<test>.*)\)(?: \{)?$")
_STATEMENT = re.compile(
    r"^\s+(?P<body>(?:bl_\w+\(.*\)|memcpy\(.*\)|memset\(.*\)|\*?[\w\->.\[\]]+ [-+|&]?= .*|return;"
    r"|continue;|break;));$"
)
_COMMENT = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def _blanked(source: str) -> str:
    """Return the source with comments and strings blanked, every character in its place."""
    return _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)


def _balanced(text: str) -> bool:
    depth = 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            return False
    return depth == 0


def mutants_of(path: Path, name: Path) -> Iterator[Mutant]:
    """Return all mutants of the file at ``path``, called ``name``; a few may not compile."""
    source = path.read_text()
    at = 0
    inside = False
    for number, line in enumerate(_blanked(source).splitlines(keepends=True), 1):
        text = line.rstrip("\n")
        if text == "{":
            inside = True
        elif text.startswith("}"):
            inside = False
        elif inside and not text.lstrip().startswith(("#", "case ", "static const")):
            for operator, start, end, new in _line_mutants(text):
                yield Mutant(name, number, operator, at + start, at + end, new)
        at += len(line)


def _line_mutants(text: str) -> Iterator[tuple[str, int, int, str]]:
    for found in _TOKEN.finditer(text):
        yield "token", found.start(), found.end(), _TOKENS[found[0]]
    for found in _NUMBER.finditer(text):
        yield "constant", found.start(), found.end(), str(int(found[0]) + 1)
    if (found := _CONDITION.search(text)) and _balanced(found["test"]):
        start, end = found.span("test")
        yield "condition", start, end, f"!({found['test']})"
    if (found := _STATEMENT.match(text)) and _balanced(found["body"]):
        yield "drop statement", found.start("body"), found.end("body"), "(void)0"
