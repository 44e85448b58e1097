# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The output of commands: JSON for machines on stdout, tables for people, progress on stderr."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from beluga.cli import logs
from beluga.cli.help import fill
from beluga.cli.legend import Legend

if TYPE_CHECKING:  # rich is slow to import, and machines read JSON
    from rich.console import Console
    from rich.table import Table

_PIPE_WIDTH = 200  # columns
_INDENT = 2  # of the further lines of a row

# The arguments are the bytes or requests done, and those in all.
Advance = Callable[[int, int], None]


def print_json(value: object, *, lines: bool = False) -> None:
    """Print one JSON value on stdout; with ``lines``, on one line, as one of several values."""
    text = msgspec.json.encode(value, enc_hook=str)
    print_line((text if lines else msgspec.json.format(text, indent=2)).decode())


def print_line(text: str) -> None:
    """Print a line on stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_row(text: str) -> None:
    """Print a line on stdout. On a terminal that is too narrow, its further lines are indented."""
    room = _width()
    if len(text) > room:
        first, *rest = fill(" ".join(text.split()), room - _INDENT)
        text = "\n".join([first, *(" " * _INDENT + line for line in rest)])
    print_line(text)


def announce(text: str, event: str, *, json: bool = False, **fields: object) -> None:
    """Tell what a command that goes on running does: text on stderr, as logs are, and with
    ``json`` one JSON object on one line of stdout.
    """
    if json:
        line = msgspec.json.encode({"event": event, **fields}, enc_hook=str)
        sys.stdout.write(line.decode() + "\n")
        sys.stdout.flush()
    logs.tell(text, event=event, **fields)


def print_table(
    legend: Legend,
    rows: Sequence[Sequence[object]],
    *,
    columns: Sequence[str] | None = None,
    title: str | None = None,
) -> None:
    """Print a table with the headings of a legend, or with some of them: ``columns``. Columns
    without text are aligned right, and None is a dash.

    The legend itself is shown in the command's help (:func:`beluga.cli.legend.explains`). On a
    terminal that is too narrow for a row, each row is a table of names and values.
    """
    columns = list(legend) if columns is None else columns
    if unknown := set(columns) - set(legend):
        raise KeyError(f"the legend lacks {', '.join(sorted(unknown))}")
    console = _console()
    widths = [max(len(_cell(row[at])) for row in [columns, *rows]) for at in range(len(columns))]
    if sum(widths) + 3 * len(widths) + 1 > console.width:
        if title is not None:
            console.print(title)
        for row in rows:
            print_facts(dict(zip(columns, row, strict=True)))
        return
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        is_text = any(isinstance(row[index], str) for row in rows)
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    _print(table)


def _print(table: Table) -> None:
    _console().print(table)


def _console() -> Console:
    """Return a console of the terminal's width, or of what COLUMNS says. Without either, as in a
    pipe, it has enough for every column.
    """
    from rich.console import Console

    return Console(width=_width(), markup=False)


def _width() -> int:
    return shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns


def _cell(value: object) -> str:
    """Show three digits of a fraction."""
    if value is None:
        return "-"
    if isinstance(value, float) and abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}" if isinstance(value, int | float) else plain(str(value))


def plain(text: str) -> str:
    """Return a text without what a terminal would obey: others choose the names of namespaces."""
    return "".join(one if one.isprintable() else "?" for one in text)


def print_facts(facts: Mapping[str, object], legend: Legend | None = None) -> None:
    """Print names and values, one pair on each line. A legend explains all these names."""
    if legend is not None and (unknown := set(facts) - set(legend)):
        raise KeyError(f"the legend lacks {', '.join(sorted(unknown))}")
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(justify="right", overflow="fold")
    for name, value in facts.items():
        table.add_row(name, _cell(value))
    _print(table)


def say(text: str) -> None:
    """Print a line for a person on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@contextmanager
def progress(what: str, *, shown: bool = True) -> Iterator[Advance]:
    """Show a bar on stderr that the yielded function moves.

    It appears with the first move, so a command that is refused earlier prints only its error.
    """
    if not shown:
        yield lambda done, total: None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns: tuple[rich_progress.ProgressColumn, ...] = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeElapsedColumn(),
    )
    bar = rich_progress.Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(what, total=None)

    def advance(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
