# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Answers ``GET /metrics`` over HTTP, on the loopback address unless another one is named."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from beluga.errors import ExporterError
from beluga.metrics import prometheus_text

if TYPE_CHECKING:
    from beluga.exporter.collect import Collector

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_IDLE_S = 60.0


def read_address(text: str) -> tuple[str, int]:
    """Return the host and the port of ``[HOST:]PORT``; an IPv6 address stands in brackets.

    Raises ExporterError.
    """
    host, _, port = text.rpartition(":")
    if not (port.isdecimal() and port.isascii()) or int(port) > 65535:
        raise ExporterError(f"{text!r} names no port; give [HOST:]PORT, such as 9466")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)


class Exporter:
    """Serves the metrics of a :class:`Collector` between :meth:`start` and :meth:`stop`.

    The address is taken when the exporter is made, before the server takes its pool over. Port 0
    takes a free one. Raises ExporterError if the address cannot be had.
    """

    def __init__(self, collector: Collector, host: str = LOOPBACK, port: int = 0) -> None:
        lock = threading.Lock()

        class Handler(_Handler):
            def text(self) -> bytes:
                with lock:
                    return prometheus_text(collector.collect()).encode()

        kind = _Server6 if _is_ipv6(host) else _Server
        try:
            self._server = kind((host, port), Handler)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else None
            raise ExporterError(
                f"the metrics cannot have {host} port {port} ({why or error}); name another with "
                "--metrics, or 0 for a free port"
            ) from None
        self.host = host
        self.port = int(self._server.server_address[1])
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where the metrics are."""
        host = f"[{self.host}]" if _is_ipv6(self.host) else self.host
        return f"http://{host}:{self.port}/metrics"

    def start(self) -> None:
        """Begin to answer."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="beluga-metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread and give the port back."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "beluga"
    sys_version = ""
    timeout = _IDLE_S

    def text(self) -> bytes:
        """Return the metrics."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """Answer with the metrics."""
        if self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, b"the metrics are at /metrics\n", "text/plain")
            return
        self._answer(HTTPStatus.OK, self.text(), CONTENT_TYPE)

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name
        """Log at the level that is usually off."""
        log.debug(format, *args)


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
