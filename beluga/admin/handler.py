# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Answers one connection's requests by the routes, after the checks that all requests pass."""

from __future__ import annotations

import logging
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from beluga.admin.health import HEALTHZ, READYZ
from beluga.admin.route import Answer, Request
from beluga.errors import BelugaError

if TYPE_CHECKING:
    from beluga.admin.address import KnownHosts
    from beluga.admin.route import Routes

log = logging.getLogger(__name__)

IDLE_S = 60.0
BODY_MAX = 1 << 20
METRICS = "/metrics"
_ANY_NAME = {METRICS, HEALTHZ, READYZ}  # these tell other machines nothing that a name protects
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Handler(BaseHTTPRequestHandler):
    """One connection. A subclass has the routes; ``hosts`` is None on a local socket, where
    ``changes`` are allowed. ``loopback`` says that only this machine can connect.
    """

    protocol_version = "HTTP/1.1"
    server_version = "beluga"
    sys_version = ""
    timeout = IDLE_S
    wbufsize = 1 << 16
    routes: Routes
    hosts: KnownHosts | None = None
    loopback = True

    def do_GET(self) -> None:
        """Answer a request that reads."""
        self._send(self._answer("GET"))

    def do_POST(self) -> None:
        """Answer a request that may change something."""
        self._send(self._answer("POST"))

    def _answer(self, method: str) -> Answer:
        url = urlsplit(self.path)
        refusal = self._refuse(method, url.path)
        if refusal is not None:
            self.close_connection = True  # its body is not read
            return refusal
        body = self._body()
        if isinstance(body, Answer):
            return body
        query = {unquote(name): value for name, value in parse_qsl(url.query)}
        request = Request(url.path, query, body)
        try:
            return self.routes[method, url.path](request)
        except BelugaError as error:
            return _refusal(HTTPStatus.CONFLICT, str(error))
        except ValueError as error:
            return _refusal(HTTPStatus.BAD_REQUEST, str(error))
        except Exception:
            log.exception("answering %s %s", method, url.path)
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "see the server's log")

    def _refuse(self, method: str, path: str) -> Answer | None:
        """Return the answer to a request that no route sees, or None."""
        if not self._known_host(path):
            return _refusal(
                HTTPStatus.MISDIRECTED_REQUEST,
                "this endpoint does not answer to that name; use the machine's address or name",
            )
        if method != "GET" and self.hosts is not None:
            return _refusal(
                HTTPStatus.FORBIDDEN, "over TCP nothing can be changed; use the admin socket"
            )
        if (method, path) not in self.routes:
            paths = ", ".join(f"{kind} {path}" for kind, path in sorted(self.routes))
            return _refusal(HTTPStatus.NOT_FOUND, f"there is {paths}")
        return None

    def _known_host(self, path: str) -> bool:
        """Return whether the Host header is fit for this path. Where other machines may connect,
        their scrapers and probes find these by any name, such as that of a service.
        """
        if self.hosts is None or (path in _ANY_NAME and not self.loopback):
            return True
        return self.headers.get("Host", "") in self.hosts

    def _body(self) -> bytes | Answer:
        """Return the request's body, or the answer to a body that cannot be read."""
        said = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (said.isascii() and said.isdecimal()):
            self.close_connection = True
            return _refusal(HTTPStatus.LENGTH_REQUIRED, "give Content-Length")
        if int(said) > BODY_MAX:
            self.close_connection = True
            return _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {BODY_MAX} bytes")
        return self.rfile.read(int(said))

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in (_HEADERS | dict(answer.headers)).items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name
        """Log at the level that is usually off."""
        log.debug(format, *args)


def _refusal(status: HTTPStatus, text: str) -> Answer:
    return Answer(f"{text}\n".encode(), status=status)
