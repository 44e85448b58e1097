# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The server's process: the poll loop, in C without Python's lock, and the registered handlers."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from beluga._ffi import ffi, lib
from beluga.errors import BelugaError, RpcError, check

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
    turn_request_max: int
    turn_key_max: int
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
    ``beat_lost_s``: how many seconds the heartbeat of a session that cannot be proven alive or
    dead may stand still; then what it could still write to is held back until there is proof.
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
        beat_lost_s: float = 5.0,
        quota: Quota | None = None,
    ) -> None:
        self._pool = pool
        self._thread: threading.Thread | None = None
        self._failure: BelugaError | OSError | None = None
        self._contexts: list[Any] = []  # what keeps handlers alive while C may call them
        out = ffi.new("bl_server **")
        directory = os.fsencode(pool.runtime_dir)
        number = pool.host_number(host)
        check(lib.bl_server_create(pool.handle, directory, number, out), "starting a server")
        self._server = out[0]
        if declared_gone:
            status = lib.bl_server_declare_gone(self._server)
            if status < 0:
                lib.bl_server_destroy(self._server)
                self._server = None
                check(status, "declaring others gone")
        _servers.add(self)
        lib.bl_server_beat_lost(self._server, int(beat_lost_s * 1e9))
        quota = quota or Quota()
        limits = ffi.new("bl_quota *")
        limits.grant_count, limits.pin_count = quota.grants, quota.pins
        limits.bytes, limits.calls_per_s = quota.bytes, quota.calls_per_s
        lib.bl_server_limit(self._server, limits)
        check(
            lib.bl_server_handle_method(
                self._server, lib.BL_METHOD_PING, lib.bl_echo_handler, ffi.NULL
            )
        )

    def _running(self) -> Any:
        """The ``bl_server *``; after :meth:`stop`, and in a forked child, there is none."""
        if self._server is None:
            raise RpcError("this server has stopped; make a new one")
        return self._server

    def handle(self, method: int, handler: Handler) -> None:
        """Answer ``method`` (METHOD_USER..255) with ``handler(request) -> reply``.

        The handler runs on the server's thread: a slow one delays everybody. If it raises, the
        caller gets :class:`~beluga.errors.HandlerError` and the server's log the traceback.
        """
        context = ffi.new_handle(handler)
        self._contexts.append(context)
        check(
            lib.bl_server_handle_method(self._running(), method, lib.bl_python_handler, context),
            f"registering method {method}",
        )

    def start(self) -> None:
        """Take the pool over and serve it on a thread of its own."""
        self._take()
        self._pool.before_close(self.stop)
        self._thread = threading.Thread(target=self._serve, name="beluga-server", daemon=True)
        self._thread.start()

    def watch(self, timeout_s: float, *, silent_s: float) -> bool:
        """Before :meth:`start`: whether it is time to take over, looked for at most ``timeout_s``.

        It is when nobody serves the pool, when its server is gone, or when that one's beat has
        stood still for ``silent_s`` seconds. Raises :class:`~beluga.errors.EpochDamagedError`.
        """
        return bool(
            check(
                lib.bl_server_watch(self._running(), int(silent_s * 1e9), int(timeout_s * 1e9)),
                "watching the pool's server",
            )
        )

    def serve_forever(self) -> None:
        """Take the pool over and serve it on this thread until :meth:`request_stop` is called.

        Raises :class:`~beluga.errors.DeposedError` if another server takes over.
        """
        self._take()
        self._pool.run_near()
        check(lib.bl_server_run(self._server), "serving")

    def stop(self) -> None:
        """Stop serving and say so in the pool, so that a successor need not prove it."""
        if self._server is None:
            return
        lib.bl_server_stop(self._server)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        _servers.discard(self)
        self._destroy()
        self._server = None

    def _forget(self) -> None:
        """In a forked child: the server is the parent's."""
        if self._server is not None:
            lib.bl_server_forked(self._server)
        self._server = self._thread = None

    def stat(self) -> ServerStat:
        """Counters of the running server."""
        out = ffi.new("bl_server_stat *")
        lib.bl_server_describe(self._running(), out)
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
        lib.bl_server_stop(self._running())

    def _take(self) -> None:
        check(lib.bl_server_serve_lanes(self._running()), "taking the pool over")

    def _serve(self) -> None:
        self._pool.run_near()
        try:
            check(lib.bl_server_run(self._server), "serving")
        except (BelugaError, OSError) as error:
            self._failure = error
            log.error("%s", error)

    def _destroy(self) -> None:
        lib.bl_server_destroy(self._server)

    def __enter__(self) -> Server:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for server in _servers:
        server._forget()
    _servers.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


@ffi.def_extern(error=-lib.BL_ERROR_HANDLER)  # type: ignore[untyped-decorator]
def bl_python_handler(context: Any, call: Any) -> int:
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
