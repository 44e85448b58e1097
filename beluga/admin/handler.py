# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Serves one connection's requests by the routes, after the checks of all requests."""

from __future__ import annotations

import http.client
import logging
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote

from beluga.admin.health import HEALTHZ, READYZ
from beluga.admin.route import AdminRequest, AdminResponse
from beluga.errors import BelugaError
from beluga.listening import KnownHosts, Token

if TYPE_CHECKING:
    import threading

    from beluga.admin.route import Routes
    from beluga.listening import ConnectionSlot

log = logging.getLogger(__name__)

HEAD_MAX = 1 << 15  # bytes of a request's line and headers
BODY_MAX = 1 << 16  # bytes; only the local socket accepts a body
METRICS = "/metrics"
_HEALTH = {HEALTHZ, READYZ}
_ANY_NAME = {METRICS, *_HEALTH}  # these are not protected by the check of names
_TURN_S = 5.0  # how long a request waits for a free slot to run its route
_LOOK_S = 0.05  # between checks whether its connection has lost its place
_PIECE = 1 << 16  # bytes of an answer that are sent at once
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Access:
    """The access rules over TCP. ``loopback``: only this machine can connect."""

    hosts: KnownHosts
    loopback: bool
    token: Token | None = None


@dataclass(frozen=True, slots=True)
class _Target:
    """The target of a request: the path and query, and the host of a whole URL. A path has one
    spelling, as it was sent: the standard library would drop some characters, and join slashes.
    """

    path: str
    query: str
    authority: tuple[str, ...] = ()  # empty, or one

    @classmethod
    def of(cls, line: str) -> _Target | None:
        """Parse a request's line. Returns None if its target has no path."""
        path, _, query = line.split()[1].partition("?")
        scheme, colon, rest = path.partition("://")
        authority: tuple[str, ...] = ()
        if colon and scheme.lower() in ("http", "https"):
            host, slash, path = rest.partition("/")
            authority, path = (host,), slash + path
        return cls(path, query, authority) if path.startswith("/") else None


class _Head:
    """A connection's file, with a limit of :data:`HEAD_MAX` bytes for the next lines."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.left = HEAD_MAX

    def readline(self, most: int) -> bytes:
        line: bytes = self._file.readline(min(most, self.left + 1))
        self.left -= len(line)
        if self.left < 0:
            raise http.client.LineTooLong("head")
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Handler(BaseHTTPRequestHandler):
    """One connection. A subclass has the routes; ``access`` is None on a local socket, where
    changes are allowed. ``turns`` limits how many routes run at a time.
    """

    protocol_version = "HTTP/1.1"
    server_version = "beluga"
    sys_version = ""
    wbufsize = 1 << 16
    routes: Routes
    turns: threading.Semaphore
    access: Access | None = None

    def setup(self) -> None:
        """Prepare to read requests."""
        slot = self.server.place_of(self.request)  # type: ignore[attr-defined]
        self.place: ConnectionSlot[Any] = slot
        super().setup()
        self.rfile = self._head = _Head(self.rfile)  # type: ignore[assignment]

    def handle_one_request(self) -> None:
        """Wait for a request and answer it."""
        self._head.left = HEAD_MAX
        self.place.wait()
        try:
            super().handle_one_request()
        except http.client.LineTooLong:  # the first line; the standard library catches the others
            self.command = self.requestline = self.request_version = ""
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            self.close_connection = True

    def do_GET(self) -> None:
        """Serve a read request."""
        self._send(self._answer("GET"))

    def do_HEAD(self) -> None:
        """Serve a read request without its body, as some health checks send it."""
        self._send(self._answer("GET"))

    def do_POST(self) -> None:
        """Serve a request that may change something."""
        self._send(self._answer("POST"))

    def _answer(self, method: str) -> AdminResponse:
        target = _Target.of(self.requestline)
        if target is None:
            self.close_connection = True
            return _refusal(HTTPStatus.BAD_REQUEST, "the request has no path")
        refusal = self._refuse(method, target)
        if refusal is not None:
            self.close_connection = True  # the request's body is not read
            return refusal
        body = self._body(method)
        if isinstance(body, AdminResponse):
            self.close_connection = True
            return body
        query = {unquote(name): value for name, value in parse_qsl(target.query)}
        request = AdminRequest(target.path, query, body)
        if target.path in _HEALTH:  # served regardless of the number of other requests
            return self._by_route(method, request)
        if not self._turn():
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests; send fewer")
        try:
            return self._by_route(method, request)
        finally:
            self.turns.release()

    def _turn(self) -> bool:
        """Wait until a route may run. Returns False after a timeout, or if the connection is
        lost."""
        end_s = time.monotonic() + _TURN_S
        while not self.turns.acquire(timeout=_LOOK_S):
            if self.place.lost or time.monotonic() > end_s:
                return False
        return True

    def _by_route(self, method: str, request: AdminRequest) -> AdminResponse:
        self.place.work()
        try:
            return self.routes[method, request.path](request)
        except BelugaError as error:
            return _refusal(HTTPStatus.CONFLICT, str(error))
        except ValueError as error:
            return _refusal(HTTPStatus.BAD_REQUEST, str(error))
        except Exception:
            log.exception("answering %s %s", method, request.path)
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "see the server's log")

    def _refuse(self, method: str, target: _Target) -> AdminResponse | None:
        """Return the answer to a request that reaches no route, or None."""
        path = target.path
        if self.access is not None:
            refusal = self._refuse_caller(self.access, target)
            if refusal is not None:
                return refusal
            if method != "GET":
                return _refusal(
                    HTTPStatus.FORBIDDEN, "over TCP nothing can be changed; use the admin socket"
                )
        if (method, path) not in self.routes:
            paths = ", ".join(f"{kind} {path}" for kind, path in sorted(self.routes))
            return _refusal(HTTPStatus.NOT_FOUND, f"there is {paths}")
        return None

    def _refuse_caller(self, access: Access, target: _Target) -> AdminResponse | None:
        """Return the answer to a caller over TCP without access to this path, or None. Where other
        machines may connect, their scrapers and probes use any host name, such as a service's.
        """
        path, hosts = target.path, self.headers.get_all("Host", [""])
        any_name = path in _ANY_NAME and not access.loopback
        own = all(host in access.hosts for host in (hosts[0], *target.authority))
        if len(hosts) > 1 or not (any_name or own):
            return _refusal(
                HTTPStatus.MISDIRECTED_REQUEST,
                "the Host header is not allowed; use the machine's address or name",
            )
        shown = self.headers.get("Authorization", "")
        if access.token is None or path in _HEALTH or access.token.shown_by(shown):
            return None
        return AdminResponse(
            b"this needs the token of --admin-token\n",
            status=HTTPStatus.UNAUTHORIZED,
            headers={"WWW-Authenticate": 'Basic realm="beluga: any user, the token as password"'},
        )

    def _body(self, method: str) -> bytes | AdminResponse:
        """Return the request's body, or the answer to a body that cannot be read."""
        length, *more = self.headers.get_all("Content-Length", ["0"])
        chunked = "Transfer-Encoding" in self.headers
        if more or chunked or not (length.isascii() and length.isdecimal()):
            return _refusal(HTTPStatus.LENGTH_REQUIRED, "give one Content-Length")
        most = BODY_MAX if method == "POST" else 0
        if len(length) > len(str(BODY_MAX)) or int(length) > most:
            return _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {most} bytes")
        return self.rfile.read(int(length))

    def _send(self, answer: AdminResponse) -> None:
        self.send_response(answer.status)
        for name, value in (_HEADERS | dict(answer.headers)).items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.place.wait()
        self.end_headers()
        body = b"" if self.command == "HEAD" else answer.body
        for start in range(0, len(body), _PIECE):
            piece = body[start : start + _PIECE]
            self.wfile.write(piece)
            self.place.wait()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name
        """Log at the debug level."""
        log.debug(format, *args)


def _refusal(status: HTTPStatus, text: str) -> AdminResponse:
    return AdminResponse(f"{text}\n".encode(), status=status)
