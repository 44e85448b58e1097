# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga dashboard``: the web page of a pool's server."""

from __future__ import annotations

import signal
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from beluga.cli.frame import Option
from beluga.cli.options import Json, PoolPaths, runtime_dir_of
from beluga.cli.output import print_json, print_note
from beluga.errors import BelugaError

if TYPE_CHECKING:
    from beluga.admin import AdminRequest, AdminResponse

Open = Annotated[bool, Option("--open", help="Open the page in this user's browser.")]
Port = Annotated[
    int,
    Option(min=0, max=65535, help="The port of this command's own page; 0 for a free one."),
]


def dashboard(
    pool: PoolPaths = None, open_page: Open = False, port: Port = 0, json: Json = False
) -> None:
    """Print the URL of the page that shows what the pool's server does.

    A server that was started with --admin has the page. Otherwise this command serves it on
    127.0.0.1 until Ctrl-C, even while the pool has no server.
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
    if open_page and not webbrowser.open(url):
        print_note("no browser could be started; open the page yourself")
