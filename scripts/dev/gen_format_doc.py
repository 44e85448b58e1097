#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Writes csrc/FORMAT.md from csrc/format/pool_format.h; sizes and offsets are from cffi.

With ``--check`` nothing is written; the exit status is 1 if the file is not up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI
from check_option import is_check

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


from beluga import _build  # noqa: E402  not installed where this runs

HEADER = "format/pool_format.h"
TARGET = _build.CSRC / "FORMAT.md"

_STRUCT = re.compile(
    r"(?:/\*(?P<why>(?:(?!\*/).)*?)\*/\s*(?:enum [^;]*;\s*)*)?"
    r"typedef struct (?P<name>\w+) \{\n(?P<body>.*?)\n\}",
    re.DOTALL,
)
_FIELD = re.compile(r"\s*\w+ (?P<name>\w+)(?:\[\w+\])?;\s*(?:/\*\s*(?P<why>.*?)\s*\*/)?", re.DOTALL)


def document() -> str:
    """Return the whole page."""
    text = (_build.CSRC / HEADER).read_text()
    ffi = FFI()
    ffi.cdef(_build.cdef((HEADER,)))
    drawing = _comment(text[text.index(" * Each device") : text.index(" * Only what cffi")])
    page = [
        "# The pool format",
        "",
        f"Generated from `{HEADER}` by `scripts/dev/gen_format_doc.py`; do not edit.",
        "",
        *_fenced(drawing),
        "## Constants",
        "",
        "| VALUE | NAME |",
        "| ---: | --- |",
    ]
    constants = ffi.typeof("enum bl_format_constant").relements
    for name in sorted(constants, key=lambda name: text.index(f"{name} =")):
        page.append(f"| {constants[name]} | `{name}` |")
    for match in _STRUCT.finditer(text):
        page += _struct(ffi, match["name"], match["why"] or "", match["body"])
    return "\n".join(page) + "\n"


def _struct(ffi: FFI, name: str, why: str, body: str) -> list[str]:
    kind = ffi.typeof(name)
    comments = {field["name"]: _comment(field["why"] or "") for field in _FIELD.finditer(body)}
    page = ["", f"## {name}: {ffi.sizeof(kind)} bytes", "", *_fenced(_comment(why))]
    page += ["| OFFSET | SIZE | FIELD | |", "| ---: | ---: | --- | --- |"]
    for field, place in kind.fields:
        words = " ".join(comments.get(field, "").split())
        page.append(f"| {place.offset} | {ffi.sizeof(place.type)} | `{field}` | {words} |")
    return page


def _comment(text: str) -> str:
    """Return a C comment's text, without its asterisks."""
    return "\n".join(re.sub(r"^ \* ?", "", line) for line in text.splitlines()).strip()


def _fenced(text: str) -> list[str]:
    """Return a comment, including its diagram."""
    return ["```text", *text.splitlines(), "```", ""] if text else []


def main() -> int:
    """Write the page, or compare it."""
    check = is_check(__doc__)
    page = document()
    if not check:
        TARGET.write_text(page)
        return 0
    if TARGET.exists() and TARGET.read_text() == page:
        return 0
    print(f"{TARGET.name} is stale; run scripts/dev/gen_format_doc.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
