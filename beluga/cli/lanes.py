# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands ``cxl-rpc serve`` and ``call``: the lanes of a pool without the block index."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from beluga.cli import logs, serve
from beluga.cli.options import (
    Host,
    Json,
    JsonLines,
    LogFormat,
    LogLevel,
    PoolPaths,
    Timeout,
    open_pool,
    read_at_most,
)
from beluga.cli.output import print_json
from beluga.rpc import METHOD_USER, Client, Server


def serve_lanes(
    pool: PoolPaths = None,
    host: Host = None,
    declare_gone: serve.DeclaredGone = False,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    json: JsonLines = False,
) -> None:
    """Serve the pool's lanes. The first free method returns the request."""
    logs.begin(log_level, log_format)
    with open_pool(pool) as opened:
        server = Server(opened, host=host, declared_gone=declare_gone)
        server.handle(METHOD_USER, bytes)
        serve.serve_until_told(server, json=json)


def call(
    request: Annotated[
        str, typer.Argument(help="The text of the request; - is standard input.")
    ] = "",
    method: Annotated[
        int, typer.Option(min=0, max=255, help="The number of the method.")
    ] = METHOD_USER,
    pool: PoolPaths = None,
    host: Host = None,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Call a method of the server and print its reply."""
    with open_pool(pool) as opened:
        data = request.encode()
        if request == "-":
            data = read_at_most(opened.geometry.bulk_size, Path("-"), "a request")
        with Client(opened, host=host, timeout_s=timeout) as client:
            reply = client.call(method, data)
    if json:
        print_json({"method": method, "reply": reply.decode(errors="backslashreplace")})
    else:
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()
