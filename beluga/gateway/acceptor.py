# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The acceptor takes clients' connections only while enough file descriptors are left for their
requests.

A running request needs two descriptors, one for its client and one for its engine. Example: of 64
descriptors 11 are open at the start, and 6 are for operators. 11 of the other 47 are spare, for
health checks and for clients that get an error because there is no room. So 18 requests can run and
23 clients can be connected. When all are connected, the slowest are disconnected
(``beluga/http_server.py``), and others wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from beluga.errors import BadValueError, ListenError
from beluga.gateway.protocol import Refusal
from beluga.gateway.settings import Address, Settings
from beluga.http_server import Share, accept
from beluga.listening import KnownHosts, from_other_site, is_loopback
from beluga.open_files import file_limit, files_left

_SPARE_MAX = 64
_OPERATORS_MAX = 64
_CONNECTIONS_MAX = 8192  # each needs memory, and one event loop serves them all
_BACKLOG = 1024


def raise_file_limit() -> None:
    """Raise this process's limit of open files to the system's hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def shares(reserved: int = 0) -> tuple[Share, Share]:
    """Divide the process's descriptors into the shares of clients and operators. ``reserved``
    further files will be opened for other purposes.
    """
    left = max(2, files_left() - reserved)
    operators = min(_OPERATORS_MAX, max(1, left // 8))
    left = max(2, left - operators)
    spare = min(_SPARE_MAX, left // 4)
    requests_max = min(_CONNECTIONS_MAX, max(1, (left - spare) // 2))
    why = f" with the limit of {file_limit()} open files (ulimit -n)"
    clients = Share(requests_max + max(1, spare // 2), requests_max, limited_by=why)
    return clients, Share(operators, limited_by=why)


async def listen(
    stack: contextlib.AsyncExitStack,
    address: Address,
    app: web.Application,
    share: Share,
    tls: ssl.SSLContext | None,
) -> Address:
    """Serve an application on an address until the stack is closed. Returns the address with its
    actual port. Raises ListenError.
    """
    sockets = await _bound_sockets(address)
    app.on_response_prepare.append(share.close_if_crowded)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    server = runner.server
    assert server is not None  # noqa: S101  for mypy
    accept(stack, sockets, server, share, tls)
    return Address(*sockets[0].getsockname()[:2])


async def _bound_sockets(address: Address) -> list[socket.socket]:
    """Listen on an address, which may be several of a host. Raises ListenError."""
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with contextlib.ExitStack() as stack:
            sockets: list[socket.socket] = []
            for family, bound in dict.fromkeys((info[0], info[4]) for info in infos):
                listening = socket.create_server(bound, family=family, backlog=_BACKLOG)
                listening.setblocking(False)
                sockets.append(stack.enter_context(listening))
            stack.pop_all()
    except OSError as error:
        number = error.errno or 0  # the errno of getaddrinfo() is negative
        why = os.strerror(number) if number > 0 else error.strerror
        raise ListenError(
            f"the gateway cannot listen on {address.host} port {address.port} ({why}); give "
            "another --host or --port, or another --admin address"
        ) from error
    return sockets


# ---- Who may call


_READS = ("GET", "HEAD", "OPTIONS")
_HEALTH = ("/health", "/ready")
# Content types that a browser sends to another site without a preflight (a "simple" request).
_FORMS = ("text/plain", "application/x-www-form-urlencoded")
_SIMPLE = (*_FORMS, "multipart/form-data", "")
_NOT_OURS = (
    "this router does not accept the host name %s; use its address, or allow the name with "
    "--allow-host"
)


def of_clients(settings: Settings) -> Middleware:
    """Return the check of the clients' listener. If only this machine can connect, the Host must be
    one of its names, otherwise one of the allowed names if there are any. Health checks accept any
    name. A page of another site may only send requests for which its browser makes a preflight,
    because engines' CORS settings decide about those.
    """
    listening, allowed = settings.listen.host, settings.callers.hosts
    checked = is_loopback(listening) or bool(allowed)
    hosts = KnownHosts(listening, allowed, single_labels=True) if checked else None

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if hosts is not None and request.path not in _HEALTH:
            _check_host(request, hosts)
        if request.method not in _READS:
            _check_kind(request, settings.callers.origins)
        return await handler(request)

    return check


def of_operators(settings: Settings, address: Address) -> Middleware:
    """Return the check of the operators' listener: a Host that is this machine's, no page of
    another site, JSON, and the token if there is one. Raises BadValueError if other machines can
    connect, and need no token.
    """
    token = settings.callers.admin_token
    if token is None and not is_loopback(address.host):
        raise BadValueError(
            f"the admin address {address.host}:{address.port} is reachable from other machines; "
            "give --admin-token FILE, or listen on 127.0.0.1"
        )
    hosts = KnownHosts(address.host, settings.callers.hosts)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        _check_host(request, hosts)
        if request.method not in _READS:
            if from_other_site(request.headers):
                raise Refusal(403, "a page of another site must not change anything here")
            if request.body_exists and request.content_type != "application/json":
                raise Refusal(415, "the body must be JSON; send Content-Type: application/json")
        if token is not None and not token.shown_by(request.headers.get(hdrs.AUTHORIZATION, "")):
            text = "this needs the token of --admin-token; send Authorization: Bearer TOKEN"
            raise Refusal(401, text)
        return await handler(request)

    return check


def _check_host(request: web.Request, hosts: KnownHosts) -> None:
    """Raise Refusal unless a request has at most one Host, an accepted one. Browsers always send
    it. The same holds for the host of a whole URL as the target, which replaces the header's.
    """
    named = request.headers.getall(hdrs.HOST, [])
    if len(named) > 1:
        raise Refusal(400, "a request must have one Host header")
    if not request.raw_path.startswith("/"):
        named = [*named, request.url.raw_authority]
    for name in named:
        if name not in hosts:
            raise Refusal(421, _NOT_OURS % repr(name[:80]))


def _check_kind(request: web.Request, origins: tuple[str, ...]) -> None:
    """Raise Refusal for a content type that no engine accepts, and for one that another site's page
    can send without a preflight. Audio is a form even from legitimate pages, which then send their
    API key.
    """
    if not request.body_exists and request.method != hdrs.METH_POST:
        return  # browsers make a preflight for these methods
    kind = request.content_type if hdrs.CONTENT_TYPE in request.headers else ""
    if kind in _FORMS and request.body_exists:
        raise Refusal(415, f"no engine accepts {kind}; send Content-Type: application/json")
    has_preflight = kind not in _SIMPLE or hdrs.AUTHORIZATION in request.headers
    if not has_preflight and from_other_site(request.headers, origins):
        text = (
            "a page of another site must send JSON or its API key, or be allowed (--allow-origin)"
        )
        raise Refusal(403, text)
