# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The server's process: the poll loop, in C without Python's lock, and the registered handlers."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from beluga._ffi import core, ffi, lib
from beluga._shared import when_forked
from beluga.errors import BelugaError, RpcError, raise_for_status
from beluga.rpc.times import nanoseconds

if TYPE_CHECKING:
    from beluga.pool import Pool

log = logging.getLogger(__name__)

Handler = Callable[[bytes], bytes]

METHOD_USER: int = lib.BL_METHOD_USER
"""Methods below this number belong to Beluga itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Quota:
    """What each session may have at a time; 0: no limit of its own.

    ``bytes`` counts the payload of its grants and of the blocks it has pinned; ``grants`` and
    ``pins`` count blocks. ``calls_per_s`` may come at once, and as many again every second. What is
    refused is refused at once, with :class:`~beluga.errors.QuotaError` (pins:
    :class:`~beluga.errors.PinLimitError`), and counted in :class:`ServerStat`.
    """

    grants: int = 0
    pins: int = 0
    bytes: int = 0
    calls_per_s: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            bits = 64 if field.name == "bytes" else 32
            if not 0 <= getattr(self, field.name) < 1 << bits:
                raise ValueError(f"{field.name} is out of range: {getattr(self, field.name)}")


@dataclasses.dataclass(frozen=True, slots=True)
class ServerStat:
    """Counters since the server took the pool over.

    ``turn_*_max``: the most that one session had done in one turn; ``wait_*_max``: the most that
    others had done, while a session's oldest request was there.
    """

    epoch: int
    call_count: int
    error_count: int
    key_count: int
    torn_count: int
    quota_call_count: int
    quota_grant_count: int
    quota_pin_count: int
    quantum_request_max: int
    quantum_key_max: int
    wait_request_max: int
    wait_key_max: int
    attach_count: int
    end_count: int
    live_count: int
    inherited_count: int
    watched_count: int


class Server:
    """Serves a pool's lanes; one server per pool at a time.

    ``host`` is this machine's number among those that share the pool (Pool.host_number).
    ``declared_gone``: an operator's word that every server and session that the pool knows of now
    can write no more (only needed when one on another machine died and cannot be asked). It is
    about no later ones, however late this server starts. Raises
    :class:`~beluga.errors.ServerAliveError` or :class:`~beluga.errors.SessionAliveError` where a
    heartbeat proves it wrong, now or at :meth:`start`.
    ``heartbeat_lost_s``: how many seconds the heartbeat of a session that cannot be proven alive or
    dead may stand still; then what it could still write to is quarantined until there is proof.
    ``quota`` bounds every session.

    Raises :class:`~beluga.errors.ServerAliveError` from :meth:`start` if the pool has a server,
    :class:`~beluga.errors.HostClashError` if that is another machine's with this host number.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        host: int | None = None,
        declared_gone: bool = False,
        heartbeat_lost_s: float = 5.0,
        quota: Quota | None = None,
    ) -> None:
        lost_ns = nanoseconds(heartbeat_lost_s)
        self._pool = pool
        self._thread: threading.Thread | None = None
        self._failure: BelugaError | OSError | None = None
        self._contexts: list[core.void_p] = []  # what keeps handlers alive while C may call them
        self._server: core.bl_server | None = None
        self._serves = self._stopped = False
        self._unlock()
        out = ffi.new("bl_server **")
        with self._ending:  # from here on whoever closes the pool waits for this
            pool.before_close(self.stop)
            directory, number = os.fsencode(pool.runtime_dir), pool.host_number(host)
            with pool.using() as handle:
                code = lib.bl_server_create(handle, directory, number, out)
            raise_for_status(code, "starting a server")
            self._server = out[0]
            status = lib.bl_server_declare_gone(out[0]) if declared_gone else 0
            if status < 0:
                self._server = None
                lib.bl_server_destroy(out[0])
                raise_for_status(status, "declaring others gone")
        when_forked(self)
        quota = quota or Quota()
        limits = ffi.new("bl_quota *")
        limits.grant_count, limits.pin_count = quota.grants, quota.pins
        limits.bytes, limits.calls_per_s = quota.bytes, quota.calls_per_s
        with self._running() as server:
            lib.bl_server_heartbeat_lost(server, lost_ns)
            lib.bl_server_limit(server, limits)
            echo = lib.bl_echo_handler
            raise_for_status(
                lib.bl_server_handle_method(server, lib.BL_METHOD_PING, echo, ffi.NULL)
            )

    def _unlock(self) -> None:
        """Locks that nobody holds."""
        self._ending = threading.RLock()  # of whoever makes or ends the C server
        self._life = threading.Condition()
        self._users: list[int] = []  # threads that are in C with it

    @contextmanager
    def _running(self) -> Iterator[core.bl_server]:
        """The ``bl_server *``, which lives as long as this; after :meth:`stop`, and in a forked
        child, there is none."""
        me = threading.get_ident()
        with self._life:
            if self._server is None or self._stopped:
                raise RpcError("this server has stopped; make a new one")
            server = self._server
            self._users.append(me)
        try:
            yield server
        finally:
            with self._life:
                self._users.remove(me)
                self._life.notify_all()

    def handle(self, method: int, handler: Handler) -> None:
        """Answer ``method`` (METHOD_USER..255) with ``handler(request) -> reply``.

        The handler runs on the server's thread: a slow one delays everybody. If it raises, the
        caller gets :class:`~beluga.errors.HandlerError` and the server's log the traceback.
        """
        context = ffi.new_handle(handler)
        self._contexts.append(context)
        with self._running() as server:
            raise_for_status(
                lib.bl_server_handle_method(server, method, lib.bl_python_handler, context),
                f"registering method {method}",
            )

    def start(self) -> None:
        """Take the pool over and serve it on a thread of its own. Once: then make another."""
        with self._ending:  # a stop meanwhile finds the thread
            self._begin()
            arguments = (self._server,)  # which lives until stop() has joined the thread
            run = threading.Thread(
                target=self._serve, args=arguments, name="beluga-server", daemon=True
            )
            run.start()
            self._thread = run

    def watch(self, timeout_s: float, *, silent_s: float) -> bool:
        """Before :meth:`start`: whether it is time to take over, looked for at most ``timeout_s``.

        It is when nobody serves the pool, when its server is gone, or when that one's heartbeat has
        stood still for ``silent_s`` seconds. Raises :class:`~beluga.errors.EpochDamagedError`.
        """
        times = nanoseconds(silent_s), nanoseconds(timeout_s)
        with self._running() as server:
            code = lib.bl_server_watch(server, *times)
            return bool(self._pool.raise_for_status(code, "watching the pool's server"))

    def serve_forever(self) -> None:
        """Take the pool over and serve it on this thread until :meth:`request_stop` is called, or
        :meth:`stop` from another thread, or the pool is closed there.

        Raises :class:`~beluga.errors.DeposedError` if another server takes over.
        """
        with self._running() as server:
            self._begin()
            self._pool.run_near()
            raise_for_status(lib.bl_server_run(server), "serving")

    def stop(self) -> None:
        """Stop serving and say so in the pool, so that a successor need not prove it.

        Raises RpcError inside a handler, whose end it would wait for: use :meth:`request_stop`.
        """
        me = threading.get_ident()
        if me in self._users or (self._thread is not None and self._thread.ident == me):
            raise RpcError("a server cannot be stopped from within; call request_stop()")
        with self._ending:
            with self._life:
                self._stopped = True
            if self._server is None:
                return
            lib.bl_server_stop(self._server)
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            with self._life:
                while self._users:
                    self._life.wait()
            server, self._server = self._server, None
            self._destroy(server)

    def _forget(self) -> None:
        """In a forked child: the server is the parent's."""
        if self._server is not None:
            lib.bl_server_forked(self._server)
        self._server = self._thread = None
        self._unlock()  # their holders are the parent's threads

    def stat(self) -> ServerStat:
        """Counters of the running server."""
        out = ffi.new("bl_server_stat *")
        with self._running() as server:
            lib.bl_server_describe(server, out)
        return ServerStat(**{f.name: getattr(out, f.name) for f in dataclasses.fields(ServerStat)})

    @property
    def failure(self) -> BelugaError | OSError | None:
        """Why the serving thread ended by itself, or None."""
        return self._failure

    def fail(self, failure: BelugaError) -> None:
        """End serving because of ``failure``, which is then this server's; from any thread."""
        self._failure = failure
        self.request_stop()

    def request_stop(self) -> None:
        """Ask the loop to end; safe in a signal handler, and from another thread."""
        with self._running() as server:
            lib.bl_server_stop(server)

    def _begin(self) -> None:
        """Take the pool over: once, however often it is refused."""
        with self._life:
            if self._serves:
                raise RpcError("this server serves already, or did; make a new one")
            self._serves = True
        try:
            with self._running() as server:
                self._take(server)
        except BaseException:
            self._serves = False
            raise

    def _take(self, server: core.bl_server) -> None:
        self._pool.raise_for_status(lib.bl_server_serve_lanes(server), "taking the pool over")

    def _serve(self, server: core.bl_server) -> None:
        self._pool.run_near()
        try:
            raise_for_status(lib.bl_server_run(server), "serving")
        except (BelugaError, OSError) as error:
            self._failure = error
            log.error("%s", error)

    def _destroy(self, server: core.bl_server) -> None:
        lib.bl_server_destroy(server)

    def __enter__(self) -> Server:
        serves = self._serves
        try:
            self.start()
        except BaseException:
            if not serves:  # it is to serve on
                self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@ffi.def_extern(error=-lib.BL_ERROR_HANDLER)
def bl_python_handler(context: core.void_p, call: core.bl_call) -> int:
    """Run a handler registered from Python for the C poll loop."""
    handler: Handler = ffi.from_handle(context)
    try:
        reply = handler(bytes(ffi.buffer(call.request, call.request_size)))
        if len(reply) > call.reply_capacity:
            raise ValueError(f"a reply has {len(reply)} bytes, {call.reply_capacity} is the most")
    except Exception:
        log.exception("the handler of method %d raised", call.method)
        return -int(lib.BL_ERROR_HANDLER)
    ffi.memmove(call.reply, reply, len(reply))
    call.reply_size = len(reply)
    return 0
