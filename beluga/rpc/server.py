# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The server process: a poll loop in C that runs without Python's lock, and registered handlers."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from beluga._ffi import core, ffi, lib
from beluga._shared import OfThisProcess, when_forked
from beluga.arguments import of_type, short, whole
from beluga.errors import (
    BadTypeError,
    BadValueError,
    BelugaError,
    DeviceMissingError,
    NoServerError,
    RpcError,
    raise_for_status,
)
from beluga.rpc.handlers import Handlers
from beluga.rpc.report import Reported
from beluga.rpc.takeovers import TAKEN, Followed, followed
from beluga.rpc.times import nanoseconds
from beluga.rpc.workers import Workers
from beluga.threads import Thread, refuse_green_threads

if TYPE_CHECKING:
    from beluga.pool import Pool

log = logging.getLogger(__name__)

Handler = Callable[[bytes], bytes]

_made: weakref.WeakSet[Server] = weakref.WeakSet()
_FILES_LOOK_S = 0.5  # between two looks at whether the devices' files are still there

METHOD_USER: int = lib.BL_METHOD_USER
"""Methods below this number belong to Beluga itself."""

METHOD_COUNTERS = 255
"""The method that answers with the lower tiers' counters, and with nothing where there are no such
tiers.
"""

_METHODS = {
    getattr(lib, name): name.removeprefix("BL_METHOD_").lower()
    for name in dir(lib)
    if name.startswith("BL_METHOD_") and name != "BL_METHOD_USER"
} | {METHOD_COUNTERS: "counters"}


def method_name(method: int) -> str:
    """Return the name of a call; those of programs are numbers."""
    return _METHODS.get(method, str(method))


def method_names() -> list[str]:
    """Return the names of Beluga's own calls, in the order of their numbers."""
    return [_METHODS[number] for number in sorted(_METHODS)]


@dataclasses.dataclass(frozen=True, slots=True)
class Quota:
    """The limits of each session. 0 means that there is no limit.

    ``bytes`` counts the payload of the session's grants and of its pinned blocks; ``grants`` and
    ``pins`` count blocks. ``calls_per_s`` is the number of calls allowed in a burst and per second.
    A request beyond a limit is refused at once with :class:`~beluga.errors.QuotaError` (pins:
    :class:`~beluga.errors.PinLimitError`) and counted in :class:`ServerStat`.
    """

    grants: int = 0
    pins: int = 0
    bytes: int = 0
    calls_per_s: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, whole(field.name, getattr(self, field.name)))
            bits = 64 if field.name == "bytes" else 32
            value = getattr(self, field.name)
            if not 0 <= value < 1 << bits:
                raise BadValueError(f"{field.name} is from 0 to {(1 << bits) - 1}; {value} is not")


@dataclasses.dataclass(frozen=True, slots=True)
class ServerStat:
    """Counters since the server took the pool over.

    ``quantum_*_max`` is the most that one session has done in one quantum. ``wait_*_max`` is the
    most that other sessions have done while one session's oldest request waited. ``draining`` is 1
    while no grant is made, and none that was asked for before is being made. ``trace_status`` is 0,
    or a negative errno: why this server has no trace. ``followed`` is the server before, and why
    this one took over.
    ``housekeeping_count`` moves, many times a second, while the poll loop lives; it wraps at 2^32.
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
    housekeeping_count: int
    draining: int
    trace_status: int
    followed: Followed


class Calls(NamedTuple):
    """The calls of one method, and those of them that were answered with an error."""

    calls: int
    errors: int


def refuse_unstarted(pool: Pool) -> None:
    """Raise NoServerError if this process made a server of this pool and did not start it."""
    for server in _made:
        if server._unstarted_for(pool):
            raise NoServerError(
                f"the {type(server).__name__} that this process made for the pool was not started; "
                "use it with 'with', or call its start()"
            )


class Server(OfThisProcess):
    """Serves the lanes of a pool. A pool has one server at a time.

    ``host`` is this machine's number among the machines that share the pool (Pool.host_number).

    ``declared_gone`` is an operator's statement that every server and session that the pool lists
    now can no longer write. It is only needed when one of them died on another machine, which
    cannot be asked. It does not cover servers and sessions that appear later, however late this
    server starts. Raises :class:`~beluga.errors.ServerAliveError` or
    :class:`~beluga.errors.SessionAliveError`, now or at :meth:`start`, if a heartbeat contradicts
    the statement.

    ``heartbeat_lost_s`` is the number of seconds without a heartbeat after which a session is
    suspect if nothing proves that it lives or is dead. The space that a suspect session could still
    write to is quarantined until there is proof.

    ``quota`` limits every session.

    Raises :class:`~beluga.errors.ServerAliveError` from :meth:`start` if the pool has a server, and
    :class:`~beluga.errors.HostClashError` if that server runs on another machine that uses this
    host number.

    A server ends itself once the file of a device was removed, since no process can come to it any
    more: :attr:`failure` is a :class:`~beluga.errors.DeviceMissingError` then.
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
        if not hasattr(pool, "using"):
            raise BadTypeError(f"a server is of a Pool, not of {short(pool)}; open one")
        self._pool = pool
        self._failure: BelugaError | OSError | None = None
        # The handles keep the handlers alive while C may call them.
        self._contexts: list[core.void_p] = []
        self._server: core.bl_server | None = None
        self._workers: Workers | None = None
        self._serves = self._stopped = False
        self._unlock()
        out = ffi.new("bl_server **")
        with self._ending:  # A thread that closes the pool waits for this lock.
            pool.before_close(self.stop)
            directory, number = os.fsencode(pool.runtime_dir), pool.host_number(host)
            with pool.using() as handle:
                code = lib.bl_server_create(handle, directory, number, out)
            pool.raise_for_status(code, "starting a server")
            self._server = out[0]
            status = lib.bl_server_declare_gone(out[0]) if declared_gone else 0
            if status < 0:
                self._server = None
                lib.bl_server_destroy(out[0])
                raise_for_status(status, "declaring others gone")
        when_forked(self)
        _made.add(self)
        self.limit(Quota() if quota is None else quota)
        with self._running() as server:
            lib.bl_server_heartbeat_lost(server, lost_ns)
            echo = lib.bl_echo_handler
            raise_for_status(
                lib.bl_server_handle_method(server, lib.BL_METHOD_PING, echo, ffi.NULL)
            )
            report = lib.bl_report_handler
            raise_for_status(
                lib.bl_server_handle_method(server, lib.BL_METHOD_REPORT, report, server)
            )
        self.handle(METHOD_COUNTERS, lambda _: b"")  # until a service of lower tiers answers

    def limit(self, quota: Quota) -> None:
        """Limit every session by ``quota`` from now on; the loop applies it within a millisecond.

        A session keeps what it has: its grants and pins end as they would have. The quota ends with
        this server.
        """
        of_type("quota", quota, Quota)
        limits = ffi.new("bl_quota *")
        limits.grant_count, limits.pin_count = quota.grants, quota.pins
        limits.bytes, limits.calls_per_s = quota.bytes, quota.calls_per_s
        with self._running() as server:
            lib.bl_server_limit(server, limits)
        self._quota = quota

    @property
    def pool(self) -> Pool:
        """The pool that it serves, or is made for."""
        return self._pool

    @property
    def quota(self) -> Quota:
        """The limits of each session, as :meth:`limit` set them last."""
        return self._quota

    def drain(self, draining: bool = True) -> None:
        """Refuse every new grant with :class:`~beluga.errors.DrainingError`, or grant again.

        Lookups, gets, and commits of what was granted before go on. The loop applies this within a
        millisecond: from then on :meth:`stat` says ``draining``. It ends with this server.
        """
        with self._running() as server:
            lib.bl_server_drain(server, draining)

    def _unlock(self) -> None:
        """Make new locks, which no thread holds."""
        self._ending = threading.RLock()  # held by the thread that creates or destroys the C server
        self._lock = threading.Lock()  # unlike a Condition, it is entered and left in C
        self._life = threading.Condition(self._lock)
        self._users: dict[object, int] = {}  # the threads that are inside C calls with the server
        self._over = threading.Event()  # set when it has stopped

    @contextmanager
    def _running(self) -> Iterator[core.bl_server]:
        """Yield the ``bl_server *`` and keep it alive meanwhile. Raises RpcError after :meth:`stop`
        and in a forked child.
        """
        use = object()
        try:  # around all of it: an interrupt may come anywhere
            with self._lock:
                if self._server is None or self._stopped:
                    raise RpcError("this server has stopped; make a new one")
                server = self._server
                self._users[use] = threading.get_ident()
            yield server
        finally:
            with self._lock:
                self._users.pop(use, None)
                self._life.notify_all()

    def handle(self, method: int, handler: Handler) -> None:
        """Answer ``method`` (METHOD_USER..254) with ``handler(request) -> reply``.

        255 is the method of the lower tiers' counters (:data:`METHOD_COUNTERS`).

        The handler runs in the poll loop, so a slow one delays every client; :meth:`register` has
        functions of any length, with types. If it raises, the caller gets
        :class:`~beluga.errors.HandlerError` and the traceback goes to the server's log.
        """
        if not callable(handler):
            raise BadTypeError(f"a handler of method {method} is called; give a function of bytes")
        if not 0 <= whole("method", method) < 1 << 32:
            raise BadValueError(f"method {method} is no number of a call; give 192 to 254")
        context = ffi.new_handle(handler)
        self._contexts.append(context)
        with self._running() as server:
            raise_for_status(
                lib.bl_server_handle_method(server, method, lib.bl_python_handler, context),
                f"registering method {method}",
            )

    def register(self, handlers: Handlers, *, threads: int = 1) -> None:
        """Call these functions for clients, on ``threads`` threads (1 to 64) of this process.

        A slow handler delays its caller, and those that wait for a free thread; the poll loop and
        the block index go on. A server has one set of handlers, registered before or after
        :meth:`start`. Its threads end with it; a handler that runs then is not waited for.

        Raises :class:`~beluga.errors.RpcError` if handlers are registered already.
        """
        of_type("handlers", handlers, Handlers)
        if not 1 <= whole("threads", threads) <= lib.BL_FUNCTION_THREADS_MAX:
            most = lib.BL_FUNCTION_THREADS_MAX
            raise BadValueError(f"{threads} threads are too few or too many; give 1 to {most}")
        refuse_green_threads()
        with self._running() as server:
            if self._workers is not None:
                raise RpcError("this server has handlers already; add yours to them")
            raise_for_status(lib.bl_function_open(server), "registering handlers")
            room = self._pool.geometry.bulk_size
            self._workers = Workers(handlers, self._running, room, threads)
            handler = lib.bl_function_handler
            raise_for_status(
                lib.bl_server_handle_method(server, lib.BL_METHOD_FUNCTION, handler, server)
            )

    def _unstarted_for(self, pool: Pool) -> bool:
        """Return whether this server could serve a pool, and was neither started nor stopped."""
        idle = self._server is not None and not (self._serves or self._stopped)
        return idle and self._pool.runtime_dir == pool.runtime_dir

    def start(self) -> None:
        """Take the pool over and serve it on a new thread. A server can be started only once.

        Raises :class:`~beluga.errors.GreenThreadsError` where threads are greenlets.
        """
        refuse_green_threads()  # before the pool is taken over
        serves = self._serves
        try:
            self._begin()
            Thread(target=self._serve, name="beluga-server", daemon=True).start()
        except BaseException:
            with suppress(RpcError):  # another thread has stopped it
                if not serves and self.stat().epoch:  # the pool was taken, and nobody serves it
                    self.stop()
            raise

    def watch(self, timeout_s: float, *, silent_s: float) -> bool:
        """Wait at most ``timeout_s`` until it is time to take over, and return whether it is.

        Call this before :meth:`start`. It is time when the pool has no server, when its server has
        ended, or when the server's heartbeat has not moved for ``silent_s`` seconds (15 times as
        long if its process is proven alive). Raises :class:`~beluga.errors.EpochDamagedError`.
        """
        times = nanoseconds(silent_s), nanoseconds(timeout_s)
        with self._running() as server:
            code = lib.bl_server_watch(server, *times)
            return bool(self._pool.raise_for_status(code, "watching the pool's server"))

    def serve_forever(self) -> None:
        """Take the pool over and serve it on this thread.

        The call returns after :meth:`request_stop`, after :meth:`stop` from another thread, or when
        another thread closes the pool. Raises :class:`~beluga.errors.DeposedError` if another
        server takes over, and the error of :meth:`fail`.
        """
        with self._running() as server:
            self._begin()
            self._pool.run_near()
            raise_for_status(lib.bl_server_run(server), "serving")
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop serving and note it in the pool, so that a successor needs no further proof.

        Raises RpcError inside a handler, because it would wait for that handler; use
        :meth:`request_stop` there.
        """
        if threading.get_ident() in self._users.values():
            raise RpcError("a server cannot be stopped from within; call request_stop()")
        with self._ending:
            with self._lock:
                self._stopped = True
            self._over.set()
            if self._server is None:
                return
            lib.bl_server_stop(self._server)
            with self._lock:
                while self._users:
                    self._life.wait()
            server, self._server = self._server, None
            self._destroy(server)

    def _forget(self) -> None:
        """Forget the server in a forked child. It belongs to the parent."""
        if self._server is not None:
            lib.bl_server_forked(self._server)
        self._server = None
        self._unlock()  # The parent's threads hold the old locks.

    def stat(self) -> ServerStat:
        """Return the counters of the running server."""
        out = ffi.new("bl_server_stat *")
        with self._running() as server:
            lib.bl_server_describe(server, out)
        counts = {f.name: getattr(out, f.name) for f in dataclasses.fields(ServerStat)}
        return ServerStat(**counts | {"followed": followed(out.followed)})

    def calls(self) -> dict[str, Calls]:
        """Return the calls of each method that was called, by name; methods of programs are
        numbers. The counters' method, 255, has those of all higher numbers, too.
        """
        out = ffi.new("bl_calls[]", 256)
        with self._running() as server:
            lib.bl_server_calls(server, out, 256)
        return {
            method_name(method): Calls(found.call_count, found.error_count)
            for method, found in enumerate(out)
            if found.call_count
        }

    def reported(self, kind: int) -> Reported:
        """Return what clients of this kind, a place in :data:`~beluga.rpc.KINDS`, reported."""
        out = ffi.new("uint64_t[]", lib.BL_REPORT_FIGURES)
        with self._running() as server:
            lib.bl_server_reported(server, kind, out)
        return Reported(list(out))

    @property
    def failure(self) -> BelugaError | OSError | None:
        """The error that ended the serving thread, or None."""
        return self._failure

    def fail(self, failure: BelugaError) -> None:
        """Stop serving because of ``failure``, which :attr:`failure` then returns. Any thread may
        call this.
        """
        with self._running() as server:
            self._failure = failure
            lib.bl_server_stop(server)

    def request_stop(self) -> None:
        """Ask the loop to end. This is safe in a signal handler and from another thread."""
        with self._running() as server:
            lib.bl_server_stop(server)

    def _begin(self) -> None:
        """Take the pool over. This succeeds at most once; an attempt that is refused may be
        repeated.
        """
        with self._lock:
            if self._serves:
                raise RpcError("this server serves already, or did; make a new one")
            self._serves = True
        try:
            with self._running() as server:
                self._take(server)
        except BaseException:
            self._serves = False
            raise
        stat = self.stat()
        TAKEN.add(reason=stat.followed.reason)
        if stat.trace_status < 0:
            log.warning("there is no trace of calls: %s", os.strerror(-stat.trace_status))
        Thread(target=self._watch_files, name="beluga-files", daemon=True).start()

    def _take(self, server: core.bl_server) -> None:
        self._pool.raise_for_status(lib.bl_server_serve_lanes(server), "taking the pool over")

    def _watch_files(self) -> None:
        """Fail and stop once the file of a device was removed. The poll loop makes no call that may
        block, and a removed file stays mapped, so the loop itself sees no difference.
        """
        while self._failure is None and not self._over.wait(_FILES_LOOK_S):
            try:
                self._pool.refuse_removed()
            except DeviceMissingError as error:
                with suppress(RpcError):  # it has stopped meanwhile
                    self.fail(error)
                    log.error("%s", error)
                self.stop()  # so that clients find no server, and wait for no answer

    def _serve(self) -> None:
        """Serve on this thread, which counts itself as a user of the C server: nobody may know it,
        if an interrupt came at its start.
        """
        with ExitStack() as running:
            try:
                server = running.enter_context(self._running())
            except RpcError:
                return  # it was stopped before this thread got here
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
            if not serves:  # a server that was already serving goes on
                self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@ffi.def_extern(error=-lib.BL_ERROR_HANDLER)
def bl_python_handler(context: core.void_p, call: core.bl_call) -> int:
    """Run a handler that Python registered. The C poll loop calls this."""
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
