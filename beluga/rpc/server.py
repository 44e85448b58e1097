# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The server process: a poll loop in C that runs without the GIL, and registered handlers.

A standby waits to take over (:func:`stand_by`); ``csrc/rpc/reason.c`` has the reasons why servers
take over and lose pools.
"""

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
from beluga.arguments import nanoseconds, of_type, short, whole
from beluga.choices import SILENT_S
from beluga.errors import (
    BadTypeError,
    BadValueError,
    BelugaError,
    DeviceMissingError,
    NoServerError,
    RpcError,
    ServerAliveError,
    raise_for_status,
)
from beluga.figures import Counters, counters
from beluga.metrics import REGISTRY
from beluga.rpc.handlers import Handlers, Workers
from beluga.rpc.report import ReportTotals
from beluga.threads import Thread, refuse_green_threads

if TYPE_CHECKING:
    from typing_extensions import Self

    from beluga.pool import Pool


_TEXTS = {
    lib.BL_REASON_NONE: ("none", "it has not taken the pool over"),
    lib.BL_REASON_FIRST: ("first", "no server had served the pool"),
    lib.BL_REASON_STOPPED: ("stopped", "{server} stopped cleanly"),
    lib.BL_REASON_DECLARED: ("declared", "{server} was declared gone"),
    lib.BL_REASON_GONE: ("gone", "{server} ended without stopping cleanly"),
    lib.BL_REASON_STUCK: (
        "stuck",
        "{server} lives, but its heartbeat stood still for {silent_s:.1f} s",
    ),
    lib.BL_REASON_SILENT: ("silent", "the heartbeat of {server} stood still{silence}"),
}

REASONS = tuple(name for name, _ in _TEXTS.values() if name != "none")
"""The reasons of takeovers, as in labels of metrics."""

DEMOTIONS = ("deposed",)
"""Why a server loses its pool: another server took it over."""

TAKEN = REGISTRY.counter(
    "beluga_takeovers_total",
    "Takeovers by this process, by reason: first (the pool had no server before), stopped "
    "(the previous server stopped cleanly), declared (an operator declared it gone), gone (it "
    "ended otherwise), stuck (its process lives, but its heartbeat has stopped), silent (the "
    "heartbeat of another host has stopped).",
)
LOST = REGISTRY.counter(
    "beluga_demotions_total",
    "Pools that this process lost, by reason: deposed (another server took over).",
)
for _reason in REASONS:
    TAKEN.add(0, reason=_reason)
for _reason in DEMOTIONS:
    LOST.add(0, reason=_reason)


@dataclasses.dataclass(frozen=True, slots=True)
class TakeoverCause:
    """The previous server, and why it was replaced.

    ``reason`` is one of :data:`REASONS`, or "none" before the takeover. ``epoch`` and ``host``
    identify the previous server; ``epoch`` is 0 if there was none. ``silent_s`` is how many seconds
    its heartbeat did not advance, as observed by a standby.
    """

    epoch: int
    host: int
    reason: str
    silent_s: float

    def __str__(self) -> str:
        text = next(text for name, text in _TEXTS.values() if name == self.reason)
        return text.format(
            server=f"the server of epoch {self.epoch} on host {self.host}",
            silent_s=self.silent_s,
            silence=f" for {self.silent_s:.1f} s" if self.silent_s else "",
        )


def takeover_cause(found: core.bl_takeover_cause) -> TakeoverCause:
    """Convert the record in C. An unknown reason, of a damaged trace, becomes "none"."""
    name = _TEXTS.get(found.reason, _TEXTS[lib.BL_REASON_NONE])[0]
    return TakeoverCause(int(found.epoch), int(found.host), name, found.silent_ns / 1e9)


log = logging.getLogger(__name__)

Handler = Callable[[bytes], bytes]

_made: weakref.WeakSet[Server] = weakref.WeakSet()
_FILES_LOOK_S = 0.5  # interval of checks whether the devices' files still exist

METHOD_USER: int = lib.BL_METHOD_USER
"""Method numbers below this one are reserved for Beluga."""

METHOD_COUNTERS = 255
"""The method that returns the counters of lower tiers, or nothing if there are none."""

_METHODS = {
    getattr(lib, name): name.removeprefix("BL_METHOD_").lower()
    for name in dir(lib)
    if name.startswith("BL_METHOD_") and name != "BL_METHOD_USER"
} | {METHOD_COUNTERS: "counters"}


def method_name(method: int) -> str:
    """Return the name of a method; methods of programs keep their number."""
    return _METHODS.get(method, str(method))


def method_names() -> list[str]:
    """Return the names of Beluga's own methods, in the order of their numbers."""
    return [_METHODS[number] for number in sorted(_METHODS)]


@dataclasses.dataclass(frozen=True, slots=True)
class Quota:
    """Limits of each session. 0 means no limit.

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
                raise BadValueError(
                    f"{field.name} is {value}, but must be from 0 to {(1 << bits) - 1}"
                )


@counters("bl_server_stat")
class ServerStat(Counters):
    """Counters since the takeover.

    ``quantum_*_max`` is the most work that one session did in one quantum. ``wait_*_max`` is the
    most work that other sessions did while the oldest request of one session waited. ``draining``
    is 1 once all grants are refused and none is being made. ``trace_status`` is 0, or a negative
    errno: why this server writes no trace. ``takeover`` describes the previous server and the
    reason of the takeover. ``housekeeping_count`` increases many times a second while the poll loop
    runs; it wraps at 2^32.
    """

    takeover: TakeoverCause


class Calls(NamedTuple):
    """Counts of one method: its calls, and the calls that returned an error."""

    calls: int
    errors: int


def refuse_unstarted(pool: Pool) -> None:
    """Raise NoServerError if this process created a server of this pool but did not start it."""
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
    now can no longer write. It is only needed when one of them died on another machine, where this
    process cannot check. It does not cover servers and sessions that appear later. Raises
    :class:`~beluga.errors.ServerAliveError` or :class:`~beluga.errors.SessionAliveError`, now or at
    :meth:`start`, if a heartbeat contradicts the statement.

    ``heartbeat_lost_s`` is the number of seconds without a heartbeat after which a session is
    suspect, unless its process is proven alive or dead. The space that a suspect session could
    still write to is quarantined until there is proof.

    ``quota`` limits every session.

    Raises :class:`~beluga.errors.ServerAliveError` from :meth:`start` if the pool has a server, and
    :class:`~beluga.errors.HostClashError` if that server runs on another machine that uses this
    host number.

    The server stops once the file of a device was removed, since no process can attach any more:
    :attr:`failure` is then a :class:`~beluga.errors.DeviceMissingError`.
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
            raise BadTypeError(f"a server needs a Pool, not {short(pool)}; open one")
        self._pool = pool
        self._failure: BelugaError | OSError | None = None
        # The handles keep the handlers alive while C may call them.
        self._contexts: list[core.void_p] = []
        self._server: core.bl_server | None = None
        self._workers: Workers | None = None
        self._serves = self._stopped = False
        self._unlock()
        out = ffi.new("bl_server **")
        with self._ending:  # a thread that closes the pool waits for this lock
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
                raise_for_status(status, "declaring predecessors gone")
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
        self.handle(METHOD_COUNTERS, lambda _: b"")  # until a service of lower tiers replaces it

    def limit(self, quota: Quota) -> None:
        """Limit every session by ``quota``; the poll loop applies it within a millisecond.

        Sessions keep their present grants and pins. The quota is lost when this server ends.
        """
        of_type("quota", quota, Quota)
        limits = ffi.new("bl_quota *")
        limits.grant_count, limits.pin_count = quota.grants, quota.pins
        limits.bytes, limits.calls_per_s = quota.bytes, quota.calls_per_s
        with self._running() as server:
            lib.bl_server_limit(server, limits)
        self._quota = quota

    def __repr__(self) -> str:
        state = "stopped" if self._over.is_set() else "serving" if self._serves else "not started"
        return f"<{type(self).__name__} of {self._pool!r}, {state}>"

    @property
    def pool(self) -> Pool:
        """The pool of this server."""
        return self._pool

    @property
    def quota(self) -> Quota:
        """The limits of each session, as last set by :meth:`limit`."""
        return self._quota

    def drain(self, draining: bool = True) -> None:
        """Refuse new grants with :class:`~beluga.errors.DrainingError`, or allow them again.

        Lookups, gets, and commits of existing grants continue. The poll loop applies this within a
        millisecond, after which :meth:`stat` reports ``draining``. The state is lost when this
        server ends.
        """
        with self._running() as server:
            lib.bl_server_drain(server, draining)

    def _unlock(self) -> None:
        """Create new, unlocked locks."""
        self._ending = threading.RLock()  # held while a thread creates or destroys the C server
        self._lock = threading.Lock()  # unlike a Condition, acquired and released in C
        self._life = threading.Condition(self._lock)
        self._users: dict[object, int] = {}  # threads inside C calls with the server
        self._over = threading.Event()  # set when it has stopped

    @contextmanager
    def _running(self) -> Iterator[core.bl_server]:
        """Yield the ``bl_server *`` and keep it alive meanwhile. Raises RpcError after :meth:`stop`
        and in a forked child.
        """
        use = object()
        try:  # everything is inside, because an interrupt may come anywhere
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
        """Serve ``method`` (METHOD_USER..254) with ``handler(request) -> reply``.

        255 is the method of the lower tiers' counters (:data:`METHOD_COUNTERS`).

        The handler runs in the poll loop, so a slow one delays every client; use :meth:`register`
        for functions of any duration, with types. If it raises, the caller gets
        :class:`~beluga.errors.HandlerError` and the traceback goes to the server's log.
        """
        if not callable(handler):
            raise BadTypeError(
                f"the handler of method {method} is not callable; give a function of bytes"
            )
        if not 0 <= whole("method", method) < 1 << 32:
            raise BadValueError(f"method {method} is out of range; give a number from 192 to 254")
        context = ffi.new_handle(handler)
        self._contexts.append(context)
        with self._running() as server:
            raise_for_status(
                lib.bl_server_handle_method(server, method, lib.bl_python_handler, context),
                f"registering method {method}",
            )

    def register(self, handlers: Handlers, *, threads: int = 1) -> None:
        """Serve these functions on ``threads`` threads (1 to 64) of this process.

        A slow handler delays its caller and the calls that wait for a free thread, but neither the
        poll loop nor the block index. A server has one set of handlers, registered before or after
        :meth:`start`. Stopping the server does not wait for a running handler.

        Raises :class:`~beluga.errors.RpcError` if handlers are registered already.
        """
        of_type("handlers", handlers, Handlers)
        if not 1 <= whole("threads", threads) <= lib.BL_FUNCTION_THREADS_MAX:
            most = lib.BL_FUNCTION_THREADS_MAX
            raise BadValueError(f"threads is {threads}, but must be from 1 to {most}")
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
        """Whether this server is for the pool and was neither started nor stopped."""
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
                # The pool was taken over, but no thread serves it
                if not serves and self.stat().epoch:
                    self.stop()
            raise

    def watch(self, timeout_s: float, *, silent_s: float) -> bool:
        """Wait up to ``timeout_s`` for a reason to take over, and return whether there is one.

        Call this before :meth:`start`. The reasons: the pool has no server, its server has ended,
        or the server's heartbeat has not moved for ``silent_s`` seconds (15 times as long if its
        process is proven alive). Raises :class:`~beluga.errors.EpochDamagedError`.
        """
        times = nanoseconds(silent_s), nanoseconds(timeout_s)
        with self._running() as server:
            code = lib.bl_server_watch(server, *times)
            return bool(self._pool.raise_for_status(code, "watching the pool's server"))

    def serve_forever(self) -> None:
        """Take the pool over and serve it on this thread.

        Returns after :meth:`request_stop`, after :meth:`stop` from another thread, or when another
        thread closes the pool. Raises :class:`~beluga.errors.DeposedError` if another server takes
        over, and the error of :meth:`fail`.
        """
        with self._running() as server:
            self._begin()
            self._pool.run_near()
            raise_for_status(lib.bl_server_run(server), "serving")
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop serving and record it in the pool, so that a successor needs no other proof.

        Raises RpcError inside a handler, because it would wait for that handler; use
        :meth:`request_stop` there.
        """
        if threading.get_ident() in self._users.values():
            raise RpcError("stop() cannot be called inside a handler; call request_stop()")
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

    def _after_fork(self) -> None:
        """Drop the server in a forked child, because it belongs to the parent."""
        if self._server is not None:
            lib.bl_server_forked(self._server)
        self._server = None
        self._unlock()  # the parent's threads hold the old locks

    def stat(self) -> ServerStat:
        """Return the running server's counters."""
        out = ffi.new("bl_server_stat *")
        with self._running() as server:
            lib.bl_server_describe(server, out)
        return ServerStat.of(out, takeover=takeover_cause(out.takeover))

    def calls(self) -> dict[str, Calls]:
        """Return the calls of each method that was called, by name or, for methods of programs, by
        number. Method 255 (the counters') includes all higher numbers.
        """
        out = ffi.new("bl_calls[]", 256)
        with self._running() as server:
            lib.bl_server_calls(server, out, 256)
        return {
            method_name(method): Calls(found.call_count, found.error_count)
            for method, found in enumerate(out)
            if found.call_count
        }

    def reported(self, kind: int) -> ReportTotals:
        """Return the sums of what clients of this kind reported; ``kind`` is an index of
        :data:`~beluga.rpc.KINDS`.
        """
        out = ffi.new("uint64_t[]", lib.BL_REPORT_FIGURES)
        with self._running() as server:
            lib.bl_server_reported(server, kind, out)
        return ReportTotals(list(out))

    @property
    def failure(self) -> BelugaError | OSError | None:
        """The error that ended the serving thread, or None."""
        return self._failure

    def fail(self, failure: BelugaError) -> None:
        """Stop serving because of ``failure``, which :attr:`failure` then returns. Thread-safe."""
        with self._running() as server:
            self._failure = failure
            lib.bl_server_stop(server)

    def request_stop(self) -> None:
        """Ask the loop to end. Safe in a signal handler and from any thread."""
        with self._running() as server:
            lib.bl_server_stop(server)

    def _begin(self) -> None:
        """Take the pool over. This succeeds at most once; a failed attempt may be repeated."""
        with self._lock:
            if self._serves:
                raise RpcError("this server was started already; make a new one")
            self._serves = True
        try:
            with self._running() as server:
                self._take(server)
        except BaseException:
            self._serves = False
            raise
        stat = self.stat()
        TAKEN.add(reason=stat.takeover.reason)
        if stat.trace_status < 0:
            log.warning(
                ("this server writes no trace of its calls: %s"), os.strerror(-stat.trace_status)
            )
        Thread(target=self._watch_files, name="beluga-files", daemon=True).start()

    def _take(self, server: core.bl_server) -> None:
        self._pool.raise_for_status(lib.bl_server_serve_lanes(server), "taking the pool over")

    def _watch_files(self) -> None:
        """Fail and stop once the file of a device was removed. The poll loop cannot detect this: it
        makes no call that may block, and a removed file stays mapped.
        """
        while self._failure is None and not self._over.wait(_FILES_LOOK_S):
            try:
                self._pool.refuse_removed()
            except DeviceMissingError as error:
                with suppress(RpcError):  # the server has stopped meanwhile
                    self.fail(error)
                    log.error("%s", error)
                self.stop()  # clients then find no server instead of waiting for a reply

    def _serve(self) -> None:
        """Serve on this thread. The thread registers itself as a user of the C server, because
        after an interrupt at its start no other thread has a reference to it.
        """
        with ExitStack() as running:
            try:
                server = running.enter_context(self._running())
            except RpcError:
                return  # stopped before this thread got here
            self._pool.run_near()
            try:
                raise_for_status(lib.bl_server_run(server), "serving")
            except (BelugaError, OSError) as error:
                self._failure = error
                log.error("%s", error)

    def _destroy(self, server: core.bl_server) -> None:
        lib.bl_server_destroy(server)

    def __enter__(self) -> Self:
        serves = self._serves
        try:
            self.start()
        except BaseException:
            if not serves:  # an already running server continues
                self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@ffi.def_extern(error=-lib.BL_ERROR_HANDLER)
def bl_python_handler(context: core.void_p, call: core.bl_call) -> int:
    """Run a handler registered from Python. Called by the C poll loop."""
    handler: Handler = ffi.from_handle(context)
    try:
        reply = handler(bytes(ffi.buffer(call.request, call.request_size)))
        if len(reply) > call.reply_capacity:
            raise ValueError(
                f"the reply has {len(reply)} bytes, but at most {call.reply_capacity} fit"
            )
    except Exception:
        log.exception("the handler of method %d raised", call.method)
        return -int(lib.BL_ERROR_HANDLER)
    ffi.memmove(call.reply, reply, len(reply))
    call.reply_size = len(reply)
    return 0


log = logging.getLogger(__name__)

_LOOK_S = 0.2
_RETRY_S = 0.1


def stand_by(
    server: Server,
    stopping: threading.Event,
    *,
    silent_s: float = SILENT_S,
    waits: Callable[[str], None] = lambda why: None,
) -> bool:
    """Watch the pool's server until ``server`` has taken over or ``stopping`` is set.

    Returns True after the takeover, with ``server`` started, and False once ``stopping`` is set. A
    server of this machine is replaced within milliseconds of its death. A server of another machine
    is replaced after ``silent_s`` seconds without a heartbeat, a hanging one of this machine after
    15 times as long.

    ``waits`` is called after each check without a takeover. Its argument is the reason, or empty if
    the pool simply has a server.

    Raises the errors of :meth:`Server.start` except :class:`~beluga.errors.ServerAliveError`, after
    which it continues to watch.
    """
    refused = ""
    while not stopping.is_set():
        if not server.watch(_LOOK_S, silent_s=silent_s):
            waits("")
            continue
        try:
            server.start()
        except ServerAliveError as error:
            if str(error) != refused:
                log.warning("the takeover failed, will retry: %s", error)
                refused = str(error)
            waits(refused)
            stopping.wait(_RETRY_S)
            continue
        return True
    return False
