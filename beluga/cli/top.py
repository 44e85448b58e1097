# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands ``beluga top`` and ``dashboard``: live views of what the server of a pool does."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from beluga.cli.frame import Option, explains, width
from beluga.cli.options import Json, PoolPaths, runtime_dir_of
from beluga.cli.output import print_json, print_note
from beluga.cli.top_frame import LEGENDS, draw_frame
from beluga.errors import AdminError, BelugaError, NoServerError

if TYPE_CHECKING:
    from beluga.admin import AdminRequest, AdminResponse
    from beluga.live import Snapshot

_MEASURE_S = 1.0  # rates need two snapshots


@explains(*LEGENDS)
def top(
    pool: PoolPaths = None,
    interval: Annotated[float, Option(min=0.1, max=3600)] = 1.0,
    once: bool = False,
    json: bool = False,
) -> None:
    """Show the state of the pool's server, live, until q or Ctrl-C.

    Run it on the server's host. If there is no server, it waits for one, and it continues with the
    next one after a takeover.

    --interval: The refresh interval in seconds.
    --once: Print one frame and exit.
    --json: Print snapshots as JSON, one per line, as in GET /live.
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


def dashboard(
    pool: PoolPaths = None,
    open_page: Annotated[bool, Option("--open")] = False,
    port: Annotated[int, Option(min=0, max=65535)] = 0,
    json: Json = False,
) -> None:
    """Print the URL of the page that shows what the pool's server does.

    A server that was started with --admin has the page. Otherwise this command serves it on
    127.0.0.1 until Ctrl-C, even while the pool has no server.

    --open: Open the page in this user's browser.
    --port: The port of this command's own page; 0 for a free one.
    """
    from beluga.admin import Admin, page_routes, request_any

    directory = runtime_dir_of(pool)
    url = _servers_url(directory)
    if url and not port:
        _print_url(url, open_page, json)
        return

    def live(request: AdminRequest) -> AdminResponse:
        query = "?history=1" if "history" in request.query else ""
        return request_any(directory, f"/live{query}")

    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    admin = Admin({("GET", "/live"): live, **page_routes()}, address=("127.0.0.1", port))
    admin.start()
    try:
        _print_url(admin.url, open_page, json)
        print_note("serving the page until Ctrl-C")
        stopped.wait()
    finally:
        admin.stop()


def _servers_url(directory: Path) -> str:
    """Return the URL of the server's own page, or "" if it has none or no server is running."""
    from beluga.admin import request_json

    try:
        return str(request_json(directory, "/endpoint", dict)["url"])
    except BelugaError:
        return ""


def _print_url(url: str, open_page: bool, json: bool) -> None:
    if json:
        print_json({"url": url})
    else:
        click.echo(url)
    if not open_page:
        return
    import webbrowser  # slow to import

    if not webbrowser.open(url):
        print_note("no browser could be started; open the page yourself")
