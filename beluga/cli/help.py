# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The help of commands, as wide as the terminal (or COLUMNS).

Names of options and their values are never truncated: a text that does not fit next to its name
starts below it, and a word that is longer than a line is broken.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

_WIDTH_MIN = 20
_WIDTH_MAX = 120  # longer lines are hard to read
_NARROW = 60  # names take at most a third of a line, or a quarter of a narrow one
_INDENT = 2


def width() -> int:
    """Return the width of the terminal, or COLUMNS."""
    return max(shutil.get_terminal_size().columns, _WIDTH_MIN)


def fill(text: str, room: int, *, indent: int = 0) -> list[str]:
    """Wrap text to at most ``room`` columns. Words are broken only if they are longer than a line,
    and never at hyphens.
    """
    space = " " * indent
    return textwrap.wrap(
        text,
        max(room, indent + 8),
        initial_indent=space,
        subsequent_indent=space,
        break_on_hyphens=False,
    )


def help_of(command: Any, ctx: Any) -> str:
    """Return the help of a command or group: usage, text, arguments, options, columns."""
    room = min(width(), _WIDTH_MAX)
    parts = [fill(" ".join(command.get_usage(ctx).split()), room)]
    parts += _paragraphs(command.help or "", room)
    for title, rows in _sections(command, ctx):
        parts.append([f"{title}:", *_listed(rows, room)])
    parts += _epilog(command.epilog or "", room)
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _paragraphs(text: str, room: int) -> Iterator[list[str]]:
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph:
            yield fill(" ".join(paragraph.split()), room)


def _epilog(text: str, room: int) -> Iterator[list[str]]:
    """Yield the end of the help: a title, and lines with a name and its meaning."""
    if text:
        title, *lines = text.splitlines()
        pairs = (line.partition(": ") for line in lines)
        rows = [(f"{name}:", meaning) for name, _, meaning in pairs]
        yield [title, *_listed(rows, room)]


def _sections(command: Any, ctx: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    shown = [one for one in command.get_params(ctx) if not getattr(one, "hidden", False)]
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        records = [one.get_help_record(ctx) for one in shown if one.param_type_name == kind]
        if rows := [(names, text or "") for names, text in filter(None, records)]:
            yield title, rows
    if commands := getattr(command, "commands", None):
        yield "Commands", [(name, _first(commands[name].help)) for name in commands]


def _first(text: str | None) -> str:
    """Return the first paragraph of a help text in one line."""
    return " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())


def _listed(rows: Sequence[tuple[str, str]], room: int) -> Iterator[str]:
    """Yield lines with names on the left, and each text next to its name or below it."""
    most = room // (4 if room < _NARROW else 3)
    beside = [len(name) for name, _ in rows if _INDENT + len(name) <= most]
    column = 2 * _INDENT + max(beside, default=2)
    for name, text in rows:
        lines = fill(text, room, indent=column)
        head = fill(name, room, indent=_INDENT)
        if lines and len(head) == 1 and len(head[0]) + _INDENT <= column:
            head = [head[0].ljust(column) + lines.pop(0)[column:]]
        yield from head
        yield from lines
