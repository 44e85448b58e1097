# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga top``: a live view of a pool's server in a terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from beluga.cli.frame import Option, explains, width
from beluga.cli.options import PoolPaths, runtime_dir_of
from beluga.cli.output import print_note
from beluga.cli.top_frame import LEGENDS, draw_frame
from beluga.errors import AdminError, NoServerError

if TYPE_CHECKING:
    from beluga.live import Snapshot

Interval = Annotated[float, Option(min=0.1, max=3600, help="The refresh interval in seconds.")]
Once = Annotated[bool, Option("--once", help="Print one frame and exit.")]
JsonLines = Annotated[
    bool, Option("--json", help="Print snapshots as JSON, one per line, as in GET /live.")
]
_MEASURE_S = 1.0  # rates need two snapshots


@explains(*LEGENDS)
def top(
    pool: PoolPaths = None, interval: Interval = 1.0, once: Once = False, json: JsonLines = False
) -> None:
    """Show the state of the pool's server, live, until q or Ctrl-C.

    Run it on the server's host. If there is no server, it waits for one, and it continues with the
    next one after a takeover.
    """
    directory = runtime_dir_of(pool)
    if once:
        _fetch(directory)
        time.sleep(_MEASURE_S)
        body = _fetch(directory)
        if json:
            _print_line(body)
        else:
            from rich.console import Console

            Console(highlight=False).print(draw_frame(_decode(body), Console().width))
    elif json:
        for body in _follow(directory, interval):
            _print_line(body)
    else:
        _show(directory, interval)


def _fetch(directory: Path) -> bytes:
    from beluga.admin import request_any

    return request_any(directory, "/live").body


def _decode(body: bytes) -> Snapshot:
    import msgspec

    from beluga.live import Snapshot

    try:
        return msgspec.json.decode(body, type=Snapshot)
    except msgspec.ValidationError as error:
        raise AdminError(
            f"the server runs another version of Beluga ({error}); run this command from that "
            "version"
        ) from None


def _print_line(body: bytes) -> None:
    sys.stdout.write(body.decode() + "\n")
    sys.stdout.flush()


def _follow(directory: Path, interval: float) -> Iterator[bytes]:
    printed = ""
    while True:
        try:
            yield _fetch(directory)
            printed = ""
        except (NoServerError, AdminError) as error:
            if str(error) != printed:
                printed = str(error)
                print_note(f"{printed}; retrying")
        time.sleep(interval)


def _show(directory: Path, interval: float) -> None:
    """Show frames until q or Ctrl-C: on the terminal's alternate screen, or one after another."""
    from rich.console import Console
    from rich.live import Live

    if not sys.stdout.isatty():
        console = Console(highlight=False, width=width())  # 80, or COLUMNS
        for body in _follow(directory, interval):
            console.print(draw_frame(_decode(body), console.width))
            console.print()
    console = Console(highlight=False)
    last: Snapshot | None = None
    failure, since = "", ""
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                last = _decode(_fetch(directory))
                failure = ""
            except (NoServerError, AdminError) as error:
                if not failure:
                    since = time.strftime("%H:%M:%S")
                failure = f"no reply since {since}, retrying: {error}"
            live.update(draw_frame(last, console.width, failure=failure), refresh=True)
            if pressed(interval):
                return


@contextmanager
def _keys() -> Iterator[_Pressed]:
    """Read single keys in the meantime; the terminal's mode is restored afterwards."""
    if not sys.stdin.isatty():
        yield _Pressed(None)
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _Pressed(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class _Pressed:
    """Waits for q. ``descriptor`` is a terminal's, or None."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __call__(self, timeout_s: float) -> bool:
        """Return whether q was pressed within this time."""
        until = time.monotonic() + timeout_s
        if self._descriptor is None:
            time.sleep(timeout_s)
            return False
        while (remaining_s := until - time.monotonic()) > 0:
            if not select.select([self._descriptor], [], [], remaining_s)[0]:
                return False
            if os.read(self._descriptor, 16).lower().startswith(b"q"):
                return True
        return False
