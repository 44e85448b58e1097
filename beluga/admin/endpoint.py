# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Listens on the local socket and on TCP, and gives each connection a thread."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beluga.admin.address import is_ipv6, url_host
from beluga.admin.handler import METRICS, Access, Handler
from beluga.admin.local_socket import LocalSocket
from beluga.admin.route import json_response
from beluga.errors import AdminError
from beluga.listening import ConnectionSlot, ConnectionSlots, KnownHosts, Token, is_loopback
from beluga.threads import Thread

if TYPE_CHECKING:
    from beluga.admin.route import Routes

log = logging.getLogger(__name__)

_CONNECTIONS_MAX = 64  # per listener; a further one gets the place of the slowest client
_TURNS = 4  # routes that run at a time, except those of health
_POLL_S = 0.5
_LOOK_S = 0.01  # between checks for a free place
_LAG_MIN_S = 0.25  # the least lag of a client that loses its place
_PATIENT_S = 0.5


class Admin:
    """Serves the routes, and ``GET /endpoint`` with the page's address, between :meth:`start` and
    :meth:`stop`.

    ``directory`` is the pool's runtime directory: its socket serves all requests. ``address`` is a
    host and a port for TCP, which serves only read requests; port 0 takes a free one. Over TCP all
    but health needs the ``token`` if there is one, and ``context`` is that of TLS. Socket and port
    are bound on construction, before a server takes its pool over. Raises AdminError if the address
    cannot be bound. A directory without support for sockets is only logged, because the server
    works without the socket.
    """

    def __init__(
        self,
        routes: Routes,
        *,
        directory: Path | None = None,
        address: tuple[str, int] | None = None,
        token: Token | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._token, self._context = token, context
        self._turns = threading.Semaphore(_TURNS)
        self._routes = {("GET", "/endpoint"): lambda _: json_response({"url": self.url})} | dict(
            routes
        )
        self._tcp = self._listen(*address) if address else None
        if self._tcp is not None and token is None and not is_loopback(self._tcp.host):
            log.warning(
                "other machines reach the admin port at %s, and need no token to read; "
                "give --admin-token FILE",
                self.url,
            )
        self._local = self._bind(directory) if directory else None
        self._listeners: list[_Listener] = [*filter(None, [self._tcp])]
        if self._local is not None:
            self._listeners.append(_UnixListener(self._local.socket, self._handler(None)))
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        """The URL of the page over TCP; "" without TCP."""
        if self._tcp is None:
            return ""
        scheme = "http" if self._context is None else "https"
        return f"{scheme}://{url_host(self._tcp.host)}:{self._tcp.server_address[1]}/"

    @property
    def metrics_url(self) -> str:
        """The URL of the metrics over TCP; "" without TCP."""
        return self.url and self.url.rstrip("/") + METRICS

    def start(self) -> None:
        """Start the threads."""
        for listener in self._listeners:
            thread = Thread(
                target=listener.serve_forever, args=(_POLL_S,), name="beluga-admin", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def claim(self) -> None:
        """Give the local socket the name of the active server."""
        if self._local is not None:
            try:
                self._local.claim()
            except OSError as error:
                log.warning("the admin socket: %s", error)

    def stop(self) -> None:
        """End the threads, close all connections, and release the port and the socket."""
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

    def _handler(self, access: Access | None) -> type[Handler]:
        facts = {"routes": self._routes, "access": access, "turns": self._turns}
        return type("BoundHandler", (Handler,), facts)

    def _listen(self, host: str, port: int) -> _Listener:
        handler = self._handler(Access(KnownHosts(host), is_loopback(host), self._token))
        kind = _Listener6 if is_ipv6(host) else _Listener
        try:
            return kind((host, port), handler, context=self._context)
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
    """Threads that serve connections. Only its own thread closes a socket; other threads shut it
    down, which ends every wait in that thread.
    """

    request_queue_size = 1024  # the kernel drops further ones: seconds of delay

    def __init__(
        self,
        address: Any,
        handler: type[Handler],
        bind: bool = True,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._places: ConnectionSlots[socket.socket] = ConnectionSlots()
        self._lock = threading.Lock()
        self._context = context
        super().__init__(address, handler, bind)
        self.host = str(address[0])

    def server_bind(self) -> None:
        """Bind the address; the standard library would also look up the machine's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Its TLS handshake runs with its first bytes, on its thread."""
        client, peer = self.socket.accept()
        if self._context is not None:
            client = self._context.wrap_socket(
                client, server_side=True, do_handshake_on_connect=False
            )
        return client, peer

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on its own thread. If all places are taken, it gets that of the
        slowest client.
        """
        end_s = time.monotonic() + _PATIENT_S
        while not self._take(request, client_address, any_lag=time.monotonic() > end_s):
            time.sleep(_LOOK_S)
        super().process_request(request, client_address)

    def _take(self, request: socket.socket, peer: Any, *, any_lag: bool) -> bool:
        """Take a place for a connection. Returns False if there is none yet. A client that has just
        connected or received data loses its place only with ``any_lag``.
        """
        with self._lock:
            if len(self._places) >= _CONNECTIONS_MAX:
                for slowest in self._places.slowest(lag_min_s=0.0 if any_lag else _LAG_MIN_S):
                    self._break(slowest)
            free = len(self._places) < _CONNECTIONS_MAX
            if free:
                self._places.take(request, str(peer[:1]))
            return free

    def service_actions(self) -> None:
        """Close the connections of clients that lag too long; called at least every _POLL_S."""
        with self._lock:
            for place in self._places.overdue():
                self._break(place)

    def place_of(self, request: socket.socket) -> ConnectionSlot[socket.socket]:
        """Return the place of a connection."""
        with self._lock:
            return self._places.of(request) or ConnectionSlot(
                request, "", 0.0
            )  # the socket has just been closed

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._places.leave(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """Shut all connections down; their threads end."""
        with self._lock:
            for place in list(self._places):
                self._break(place)

    def _break(self, place: ConnectionSlot[socket.socket]) -> None:
        """End a connection, whose thread closes it. The caller has the lock."""
        place.lost = True
        self._places.leave(place.connection)
        with suppress(OSError):
            place.connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a broken connection; browsers often break them."""
        log.debug("a connection to the admin endpoint broke", exc_info=True)


class _Listener6(_Listener):
    address_family = socket.AF_INET6


class _UnixListener(_Listener):
    address_family = socket.AF_UNIX

    def __init__(self, bound: socket.socket, handler: type[Handler]) -> None:
        super().__init__(("", 0), handler, False)
        self.socket.close()
        self.socket = bound
