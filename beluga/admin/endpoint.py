# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Listens on the local socket and on TCP, and gives each connection a thread."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beluga.admin.address import LOOPBACK, KnownHosts, is_ipv6, url_host
from beluga.admin.handler import METRICS, Handler
from beluga.admin.local_socket import LocalSocket
from beluga.admin.route import json_answer
from beluga.errors import AdminError
from beluga.threads import Thread

if TYPE_CHECKING:
    from beluga.admin.route import Routes

log = logging.getLogger(__name__)

_CONNECTIONS_MAX = 64  # a listener closes further ones at once
_POLL_S = 0.5


class Admin:
    """Answers by the routes, and ``GET /endpoint`` with the page's address, between :meth:`start`
    and :meth:`stop`.

    ``directory`` is the pool's runtime directory: its socket answers everything. ``address`` is a
    host and a port for TCP, which answers only what reads; port 0 takes a free one. Both are taken
    when the endpoint is made, before a server takes its pool over. Raises AdminError if the address
    cannot be had. A directory that cannot have sockets is only logged, because blocks are served
    without it.
    """

    def __init__(
        self,
        routes: Routes,
        *,
        directory: Path | None = None,
        address: tuple[str, int] | None = None,
    ) -> None:
        self._routes = {("GET", "/endpoint"): lambda _: json_answer({"url": self.url})} | dict(
            routes
        )
        self._tcp = self._listen(*address) if address else None
        self._local = self._bind(directory) if directory else None
        self._listeners: list[_Listener] = [*filter(None, [self._tcp])]
        if self._local is not None:
            self._listeners.append(_UnixListener(self._local.socket, self._handler(None)))
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        """Where the page is, over TCP; "" without it."""
        if self._tcp is None:
            return ""
        return f"http://{url_host(self._tcp.host)}:{self._tcp.server_address[1]}/"

    @property
    def metrics_url(self) -> str:
        """Where Prometheus finds the metrics, over TCP; "" without it."""
        return self.url and self.url.rstrip("/") + METRICS

    def start(self) -> None:
        """Begin to answer."""
        for listener in self._listeners:
            thread = Thread(
                target=listener.serve_forever, args=(_POLL_S,), name="beluga-admin", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def claim(self) -> None:
        """Take the name of the server that serves, for the local socket."""
        if self._local is not None:
            try:
                self._local.claim()
            except OSError as error:
                log.warning("the admin socket: %s", error)

    def stop(self) -> None:
        """End the threads, close all connections, and give the port and the socket back."""
        if self._local is not None:
            self._local.remove()
        if self._threads:
            for listener in self._listeners:
                listener.shutdown()
        for thread in self._threads:
            thread.join()
        for listener in self._listeners:
            listener.server_close()
            listener.close_connections()

    def _handler(self, hosts: KnownHosts | None, loopback: bool = True) -> type[Handler]:
        facts = {"routes": self._routes, "hosts": hosts, "loopback": loopback}
        return type("BoundHandler", (Handler,), facts)

    def _listen(self, host: str, port: int) -> _Listener:
        handler = self._handler(KnownHosts(host), host in {LOOPBACK, "::1", "localhost"})
        kind = _Listener6 if is_ipv6(host) else _Listener
        try:
            return kind((host, port), handler)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else None
            raise AdminError(
                f"the admin endpoint cannot have {host} port {port} ({why or error}); name another "
                "with --admin, or 0 for a free port"
            ) from None

    @staticmethod
    def _bind(directory: Path) -> LocalSocket | None:
        try:
            return LocalSocket(directory)
        except OSError as error:
            log.warning("no admin socket in %s: %s", directory, error)
            return None


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    request_queue_size = 128

    def __init__(self, address: Any, handler: type[Handler], bind: bool = True) -> None:
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(address, handler, bind)
        self.host = str(address[0])

    def server_bind(self) -> None:
        """Take the address; the standard library would look the machine's name up as well."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection on a thread of its own, or close it if there are too many."""
        with self._lock:
            crowded = len(self._open) >= _CONNECTIONS_MAX
            if not crowded:
                self._open.add(request)
        if crowded:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """Shut all connections down; their threads end."""
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection that broke; browsers break them all the time."""
        log.debug("a connection to the admin endpoint broke", exc_info=True)


class _Listener6(_Listener):
    address_family = socket.AF_INET6


class _UnixListener(_Listener):
    address_family = socket.AF_UNIX

    def __init__(self, bound: socket.socket, handler: type[Handler]) -> None:
        super().__init__(("", 0), handler, False)
        self.socket.close()
        self.socket = bound
