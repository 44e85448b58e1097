# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The output of commands: JSON or tables on stdout, progress on stderr, and a page's origin."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from beluga.cli import logs
from beluga.cli.frame import Legend, fill

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def origin() -> dict[str, str]:
    """Return the names and values for the page's header."""
    import datetime
    import platform
    import shlex

    import beluga_bench  # slow to import

    system = platform.uname()
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {
        "Command": command,
        "Version": f"beluga-kv {beluga_bench.version()}, Python {platform.python_version()}",
        "Machine": f"{beluga_bench.cpu_model()}, {system.system} {system.release}",
        "Date": datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


_PIPE_WIDTH = 200  # columns
_TEXT_MIN = 16  # columns; longer text is wrapped to this width at least
_INDENT = 2  # indentation of a row's continuation lines

# Called with the completed and the total bytes or requests.
Advance = Callable[[int, int], None]


def print_json(value: object, *, lines: bool = False) -> None:
    """Print one JSON value on stdout; with ``lines``, on a single line."""
    import msgspec

    text = msgspec.json.encode(value, enc_hook=str)
    print_line((text if lines else msgspec.json.format(text, indent=2)).decode())


def print_line(text: str) -> None:
    """Print a line on stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_row(text: str) -> None:
    """Print a line on stdout. On a narrow terminal, its continuation lines are indented."""
    room = _width()
    if len(text) > room:
        first, *others = fill(" ".join(text.split()), room - _INDENT)
        text = "\n".join([first, *(" " * _INDENT + line for line in others)])
    print_line(text)


def announce(text: str, event: str, *, json: bool = False, **fields: object) -> None:
    """Report the state of a running command: text on stderr, like logs, and with ``json`` one JSON
    object per line on stdout.
    """
    if json:
        import msgspec

        line = msgspec.json.encode({"event": event, **fields}, enc_hook=str)
        try:
            sys.stdout.write(line.decode() + "\n")
            sys.stdout.flush()
        except BrokenPipeError:  # a server outlives the reader of its events
            _discard(sys.stdout)
            logs.log_message("the reader of standard output has ended; events are only logged")
    logs.log_message(text, event=event, **fields)


def _discard(stream: TextIO) -> None:
    """Send a stream's further output, and what it has buffered, to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def print_table(
    legend: Legend,
    rows: Sequence[Sequence[object]],
    *,
    columns: Sequence[str] | None = None,
    title: str | None = None,
    spare: Sequence[str] = (),
    wide: bool = False,
) -> None:
    """Print a table with the headings of a legend, or with some of them: ``columns``. Columns
    without text are right-aligned, and None is a dash.

    On a narrow terminal, text is wrapped, and ``spare`` columns are dropped, in their order, unless
    ``wide`` is set. If that is not enough, each row becomes a table of names and values. The legend
    is shown in the command's help (:func:`beluga.cli.frame.explains`).
    """
    columns = list(legend) if columns is None else list(columns)
    if unknown := {*columns, *spare} - set(legend):
        raise KeyError(f"the legend lacks {', '.join(sorted(unknown))}")
    room: float = _width(0) or math.inf  # a pipe has no limit
    shown = columns
    if not wide:
        shown = _fitting(columns, rows, spare, room)
    width = _width_min(columns, shown, rows)
    if width > room and not wide:
        if title is not None:
            _console().print(title)
        for row in rows:
            print_facts(dict(zip(columns, row, strict=True)))
        return
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index in map(columns.index, shown):
        is_text = _is_text(rows, index)
        table.add_column(
            columns[index],
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=not is_text,
            min_width=min(_longest(columns, rows, index), _TEXT_MIN) if is_text else None,
        )
    for row in rows:
        table.add_row(*(_cell(row[columns.index(name)]) for name in shown))
    _print(table, max(width, int(min(room, _PIPE_WIDTH))))
    if left_out := [name for name in columns if name not in shown]:
        print_note(f"not shown in {room} columns: {', '.join(left_out)} (--wide)")


def _fitting(
    columns: list[str], rows: Sequence[Sequence[object]], spare: Sequence[str], room: float
) -> list[str]:
    """Return the columns that fit, dropping spare ones in order."""
    shown = list(columns)
    for name in spare:
        if _width_min(columns, shown, rows) <= room:
            break
        if name in shown:
            shown.remove(name)
    return shown


def _width_min(columns: list[str], shown: list[str], rows: Sequence[Sequence[object]]) -> int:
    """Return the smallest width of a table of the shown columns, with wrapped text."""
    widths = [
        min(width, _TEXT_MIN) if _is_text(rows, index) else width
        for index in map(columns.index, shown)
        for width in [_longest(columns, rows, index)]
    ]
    return sum(widths) + 3 * len(widths) + 1


def _longest(columns: list[str], rows: Sequence[Sequence[object]], index: int) -> int:
    return max(len(_cell(row[index])) for row in [columns, *rows])


def _is_text(rows: Sequence[Sequence[object]], index: int) -> bool:
    return any(isinstance(row[index], str) for row in rows)


def _print(table: Table, width: int | None = None) -> None:
    _console(width).print(table)


def _console(width: int | None = None) -> Console:
    """Return a console of this width, or of the terminal's."""
    from rich.console import Console

    return Console(width=width or _width(), markup=False)


def _width(otherwise: int = _PIPE_WIDTH) -> int:
    import shutil  # slow to import

    return shutil.get_terminal_size((otherwise, 24)).columns


def _cell(value: object) -> str:
    """Format a value; fractions have three digits."""
    if value is None:
        return "-"
    if isinstance(value, float) and abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}" if isinstance(value, int | float) else plain(str(value))


def plain(text: str) -> str:
    """Remove control characters from a text: clients choose the names of namespaces."""
    return "".join(character if character.isprintable() else "?" for character in text)


def print_facts(facts: Mapping[str, object], legend: Legend | None = None) -> None:
    """Print names and values, one pair per line. A legend must have all of these names."""
    if legend is not None and (unknown := set(facts) - set(legend)):
        raise KeyError(f"the legend lacks {', '.join(sorted(unknown))}")
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(justify="right", overflow="fold")
    for name, value in facts.items():
        table.add_row(name, _cell(value))
    _print(table)


def print_note(text: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@contextmanager
def progress(what: str, *, shown: bool = True) -> Iterator[Advance]:
    """Show a progress bar on stderr, which the yielded function advances.

    It appears with the first step, so a command that fails earlier prints only its error.
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
        rich_progress.TimeRemainingColumn(elapsed_when_finished=True),
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
