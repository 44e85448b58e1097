# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands ``cxl-rpc serve``, ``call`` and ``list``: a server of handlers without the block
index, and calls of any server's handlers.
"""

from __future__ import annotations

import dataclasses
import json as json_library
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from beluga.cli import logs, serve
from beluga.cli.detach import detached
from beluga.cli.frame import Argument, BadParameter
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
    refuse_alone,
)
from beluga.cli.output import plain, print_json, print_row

if TYPE_CHECKING:
    from beluga.rpc import HandlerInfo

_INPUT_MAX = 64 << 20  # bytes of an argument from standard input


def serve_lanes(
    handlers: Annotated[str, Argument()] = "",
    pool: PoolPaths = None,
    host: Host = None,
    declare_gone: serve.DeclaredGone = False,
    handler_threads: serve.HandlerThreads = 1,
    *,
    endpoint: serve.AdminEndpoint,
    detach: serve.Detach = False,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    json: JsonLines = False,
) -> None:
    """Serve handlers over the pool, without the block index. Method 64 echoes its request.

    `beluga serve --handlers` serves handlers and the block index. With --admin, Prometheus reads
    the calls of each handler. See docs/use/rpc.md.

    [MODULE:NAME]: The functions to call for clients: a beluga.Handlers of an installed module, or
        of MODULE.py in the current folder.
    """
    from beluga.admin import ServerHealth, lane_routes
    from beluga.rpc import METHOD_USER, Server

    refuse_alone("MODULE:NAME", handlers, handler_threads=handler_threads != 1)
    registered = serve.named_handlers(handlers)
    if detach:
        detached(pool, json, module="cxl_rpc")
        return
    logs.begin(log_level, log_format)
    with open_pool(pool) as opened:
        server = Server(opened, host=host, declared_gone=declare_gone)
        server.handle(METHOD_USER, bytes)
        if registered is not None:
            server.register(registered, threads=handler_threads)
        health = ServerHealth()
        routes = {**lane_routes(server, opened), **health.routes()}
        with serve.answering(endpoint, routes, opened, json) as admin:
            serve.serve_until_stopped(server, json=json, admin=admin, health=health)


def call(
    handler: Annotated[str, Argument()],
    arguments: Annotated[list[str] | None, Argument()] = None,
    pool: PoolPaths = None,
    host: Host = None,
    timeout: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Call a handler of the server and print its result, or a method and print its reply.

    HANDLER: The handler's name, or the number of a method: 0 to 254.
    [ARGUMENT]...: The arguments: text and bytes as they are, other types as JSON; - is standard
        input. A method takes one, the request.
    """
    from beluga.rpc import Client

    texts = arguments or []
    with open_pool(pool) as opened:
        if handler.isdecimal():
            if len(texts) > 1:
                raise BadParameter("a method takes one argument, the request; give just that")
            data = _bytes(texts[0] if texts else "", opened.geometry.bulk_size)
            with Client(opened, host=host, timeout_s=timeout) as client:
                reply = client.call(int(handler), data)
            _print({"method": int(handler)}, "reply", reply, json)
            return
        with Client(opened, host=host, timeout_s=timeout) as client:
            kinds = _kinds(handler, client.handlers())
            values = [
                _value(text, kinds[at] if at < len(kinds) else "") for at, text in enumerate(texts)
            ]
            result = client.call(handler, *values)
    _print({"handler": handler}, "result", result, json)


def list_handlers(
    pool: PoolPaths = None, host: Host = None, timeout: Timeout = 5.0, json: Json = False
) -> None:
    """List the handlers of the server with their parameters and results."""
    from beluga.rpc import Client

    with open_pool(pool) as opened, Client(opened, host=host, timeout_s=timeout) as client:
        handlers = client.handlers()
    if json:
        print_json([dataclasses.asdict(handler) for handler in handlers])
        return
    for handler in handlers:
        print_row(plain(f"{handler}  {handler.help}".strip()))


def _kinds(handler: str, handlers: list[HandlerInfo]) -> list[str]:
    """Return the types of a handler's parameters; none if it is unknown, because the server then
    reports the error.
    """
    return next((list(info.parameters.values()) for info in handlers if info.name == handler), [])


def _bytes(text: str, limit: int) -> bytes:
    return read_at_most(limit, Path("-"), "an argument") if text == "-" else text.encode()


def _value(text: str, kind: str) -> object:
    """Convert an argument of the command line to a parameter's type."""
    kinds = kind.split(" | ")
    if "bytes" in kinds:
        return _bytes(text, _INPUT_MAX)
    if text == "-":
        text = _bytes(text, _INPUT_MAX).decode()
    if "str" in kinds or not kind:
        return text
    try:
        return json_library.loads(text)
    except (ValueError, RecursionError):
        raise BadParameter(f"'{text:.40}' is not a valid {kind} in JSON") from None


def _print(named: dict[str, object], what: str, value: object, json: bool) -> None:
    import numpy as np

    if isinstance(value, np.ndarray):
        value = value.tolist()
    if json:
        text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
        print_json({**named, what: text})
    elif isinstance(value, bytes | str):
        sys.stdout.buffer.write((value.encode() if isinstance(value, str) else value) + b"\n")
        sys.stdout.buffer.flush()
    else:
        print_json(value, lines=True)
