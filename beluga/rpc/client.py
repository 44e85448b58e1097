# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Client sessions and calls, and their behavior in a forked child."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar, cast, overload

from beluga._ffi import core, ffi, lib
from beluga._shared import OfThisProcess, when_forked
from beluga.arguments import nanoseconds, short, whole
from beluga.errors import (
    BadRequestError,
    BadTypeError,
    BadValueError,
    ForkedSessionError,
    NoMethodError,
    NoServerError,
    RpcError,
    raise_for_status,
)
from beluga.rpc.handlers import LIST, HandlerInfo, Handlers, converted
from beluga.rpc.messages import exchange, result_of
from beluga.rpc.messages import request as request_of
from beluga.rpc.report import Figure, Report
from beluga.rpc.server import refuse_unstarted

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self

    from beluga.pool import Pool

log = logging.getLogger(__name__)

Buffer: TypeAlias = "bytes | bytearray | memoryview | NDArray[np.generic]"
"""Types of a request. Other objects with a contiguous buffer are also accepted."""

_NUMBER_MAX = (1 << 32) - 1
_P = ParamSpec("_P")
_T = TypeVar("_T")

_FOREVER_NS = 3 * 10**18  # nearly a century

# Longest wait at exit for the call of a daemon thread. If it elapses, the session ends when the
# kernel frees the liveness lock.
EXIT_WAIT_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class ClientStat:
    """Counters of one session. ``reattach_count`` counts attachments after the first: because the
    server was replaced, the server dropped the session, or a call timed out. ``mismatch_count``
    counts blocks of gets whose entry or bytes differed from the expected ones; ``checksum_count``
    counts those among them with a wrong checksum.
    """

    epoch: int
    nonce: int
    lane: int
    call_count: int
    reattach_count: int
    mismatch_count: int
    checksum_count: int


class Client(OfThisProcess):
    """A session with the pool's server. A process needs only one, because its threads may share it:
    their calls wait for each other, and their copies of blocks do not. For calls that run in
    parallel, threads need a client each.

    If the server is replaced, the session attaches to the new one and repeats a call that got no
    reply. After :func:`os.fork` the child's copy raises :class:`~beluga.errors.ForkedSessionError`;
    create a new Client there.

    Raises :class:`~beluga.errors.NoServerError`, :class:`~beluga.errors.NoLaneError`,
    :class:`~beluga.errors.HostClashError`, :class:`~beluga.errors.CallTimeoutError`, or
    :class:`~beluga.errors.SecondHostError` (the pool has hardware coherence and another host uses
    it).
    """

    def __init__(self, pool: Pool, *, host: int | None = None, timeout_s: float = 5.0) -> None:
        timeout_ns = nanoseconds(timeout_s)
        if not hasattr(pool, "using"):
            raise BadTypeError(f"a session needs a Pool, not {short(pool)}; open one")
        self.pool = pool
        self._timeout_s, self._timeout_ns = timeout_s, timeout_ns
        self.report = Report()
        """Counters of this session for the server's exporter; see :meth:`send_report`."""
        self._mismatches = 0, 0
        self._exchanging, self._number = threading.Lock(), 0
        self._held = _Held()
        self._reply_size = pool.geometry.bulk_size
        self._reply = ffi.new("uint8_t[]", self._reply_size)
        self._reply_bytes = ffi.buffer(self._reply)
        self._forked = False
        self._end = weakref.finalize(self, self._held.end_at_exit)
        when_forked(self)
        try:
            with self._held.lock:  # a thread that closes the pool waits for this lock
                pool.before_close(self.close)
                where = os.fsencode(pool.runtime_dir), pool.host_number(host), timeout_ns
                handle = self._held.mapped.enter_context(pool.using())
                code = lib.bl_session_open(handle, *where, self._held.out)
                try:
                    pool.raise_for_status(code, "attaching to the pool's server")
                except NoServerError:
                    refuse_unstarted(pool)
                    raise
                self._held.session = self._held.out[0]
        except BaseException:
            self.close()
            raise

    @overload
    def call(
        self, method: int, request: Buffer | str = b"", /, *, timeout_s: float | None = None
    ) -> bytes: ...

    @overload
    def call(
        self,
        method: str,
        /,
        *arguments: object,
        returns: type[_T],
        timeout_s: float | None = None,
    ) -> _T: ...

    @overload
    def call(
        self, method: str, /, *arguments: object, timeout_s: float | None = None
    ) -> object: ...

    def call(
        self,
        method: int | str,
        /,
        *arguments: object,
        returns: object = object,
        timeout_s: float | None = None,
    ) -> object:
        """Call a handler by name, or a method by number.

        By name, ``arguments`` must have the types that the handler is annotated with, and the
        result is checked against the type ``returns``. Arguments and result have up to 1 GiB each:
        what is larger than ``bulk_size`` is sent in parts. If the server is replaced, the call is
        repeated, so a handler may run twice.

        By number, the only argument is the request: bytes, a contiguous buffer, or text, which is
        sent as UTF-8. Request and reply have at most ``bulk_size`` bytes each.

        Raises :class:`~beluga.errors.CallTimeoutError` when no server replies within ``timeout_s``
        seconds (default: that of the client), :class:`~beluga.errors.NoMethodError` if the server
        has no such handler, :class:`~beluga.errors.BadTypeError` for arguments of other types,
        :class:`~beluga.errors.HandlerError` if the handler raised,
        :class:`~beluga.errors.BadRequestError` for a request that is too large, and
        :class:`~beluga.errors.QuotaError` for more calls than the server's quota allows.
        """
        if isinstance(method, str):
            return self._call_handler(method, arguments, {}, returns, timeout_s)
        if len(arguments) > 1:
            raise BadTypeError(
                f"method {short(method)} takes one request, but got {len(arguments)} arguments; "
                "give bytes, or call a handler by its name"
            )
        request = arguments[0] if arguments else b""
        data = request if type(request) is bytes else _bytes_of(request)
        return self._call_method(method, data, timeout_s)

    def remote(
        self, handler: Callable[_P, _T], *, timeout_s: float | None = None
    ) -> Callable[_P, _T]:
        """Return a function that calls the server's handler named like ``handler``. A type checker
        sees the handler's parameters and result::

            scale = client.remote(jobs.scale)
            scale(values, by=3.0)

        Its calls raise the errors of :meth:`call`.
        """
        returns = Handlers(handler).returns(handler.__name__)

        def call(*arguments: _P.args, **named: _P.kwargs) -> _T:
            found = self._call_handler(handler.__name__, arguments, named, returns, timeout_s)
            return cast("_T", found)

        return call

    def handlers(self, *, timeout_s: float | None = None) -> list[HandlerInfo]:
        """Return the server's handlers. Raises the errors of :meth:`call`; a server without
        handlers raises :class:`~beluga.errors.NoMethodError`.
        """
        return self.call(LIST, returns=list[HandlerInfo], timeout_s=timeout_s)

    def _call_handler(
        self,
        name: str,
        arguments: tuple[object, ...],
        named: dict[str, object],
        returns: object,
        timeout_s: float | None,
    ) -> object:
        # First, because encoding imports msgspec: if a thread of the parent was importing it at the
        # fork, a child would wait for that thread's lock
        if self._held.session is None:
            raise self._ended()
        message = request_of(name, arguments, named)
        limit_s = nanoseconds(self.timeout_s if timeout_s is None else timeout_s) / 1e9
        # While a message is sent in parts, the session makes no other handler call
        with self._exchanging:
            self._number = self._number % _NUMBER_MAX + 1
            number, method = self._number, int(lib.BL_METHOD_FUNCTION)

            def call(part: bytes, left_s: float) -> bytes:
                return self._call_method(method, part, left_s, f"the handler {name}")

            try:
                reply = exchange(call, message, number, self._reply_size, limit_s)
            except NoMethodError:
                raise NoMethodError(
                    f"the server has no handlers, so it cannot call {name}; start it with "
                    "handlers: "
                    "'cxl-rpc serve MODULE:NAME', or 'beluga serve --handlers MODULE:NAME'"
                ) from None
        return converted(result_of(reply), returns, f"the result of {name}")

    def _call_method(
        self, number: int, request: bytes, timeout_s: float | None, what: str = ""
    ) -> bytes:
        method = number if type(number) is int else whole("method", number)
        if not 0 <= method <= _NUMBER_MAX:
            raise BadValueError(f"method {method} is out of range; give a number from 0 to 254")
        size, capacity, reply = len(request), self._reply_size, self._reply
        if size > capacity:
            raise BadRequestError(
                f"the request has {size} bytes, but at most {capacity} fit; create the pool with a "
                "larger --bulk-size, or call a handler by its name"
            )
        timeout_ns = self._timeout_ns if timeout_s is None else nanoseconds(timeout_s)
        with self._held.lock:
            size = lib.bl_session_call_bytes(
                self.session, method, request, size, reply, capacity, timeout_ns
            )
            if size < 0:
                raise_for_status(size, f"calling {what or f'method {method}'}")
            return self._reply_bytes[:size]

    def send_report(self) -> None:
        """Send the :attr:`report` if one is due. If the call fails, the counts are lost."""
        if not self.report.due:
            return
        try:
            self._count_mismatches()
            if (request := self.report.take()) is not None:
                self.call(lib.BL_METHOD_REPORT, request)
        except NoMethodError:
            self.report.never()
        except RpcError as error:
            log.debug("sending a report failed, its counts are lost: %s", error)

    def _count_mismatches(self) -> None:
        stat, (mismatches, failures) = self.stat(), self._mismatches
        self._mismatches = stat.mismatch_count, stat.checksum_count
        self.report.add(Figure.MISMATCHES, stat.mismatch_count - mismatches)
        self.report.add(Figure.CHECKSUM_FAILURES, stat.checksum_count - failures)

    def ping(self, *, timeout_s: float | None = None) -> float:
        """Return the round-trip time to the server in seconds."""
        start = time.perf_counter()
        self.call(lib.BL_METHOD_PING, b"", timeout_s=timeout_s)
        return time.perf_counter() - start

    @property
    def session(self) -> core.bl_session:
        """The ``bl_session *``, for C functions that any thread may call: if another thread closes
        this client meanwhile, they return an error. Raises RpcError if it is closed, and
        ForkedSessionError in a forked child.
        """
        session = self._held.session
        if session is not None:
            return session
        raise self._ended()

    def _ended(self) -> RpcError:
        if self._forked:
            return ForkedSessionError(
                "this session belongs to the parent process; make a new Client after fork"
            )
        return RpcError("this client is closed; make a new one")

    @property
    def timeout_s(self) -> float:
        """The timeout of a call in seconds. Setting it raises BadValueError if it is out of range,
        or BadTypeError.
        """
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._timeout_ns = nanoseconds(seconds)
        self._timeout_s = seconds

    def stat(self) -> ClientStat:
        """Return the session's counters."""
        out = ffi.new("bl_session_stat *")
        raise_for_status(lib.bl_session_describe(self.session, out), "requesting counters")
        names = (field.name for field in dataclasses.fields(ClientStat))
        return ClientStat(**{name: getattr(out, name) for name in names})

    def close(self) -> None:
        """Free the lane. If no server is running, the next one finds the freed lane in the pool."""
        self._held.end()

    def _after_fork(self) -> None:
        """Drop the session in a forked child: the session and its lock belong to the parent."""
        # The session is NULL if the fork happened while it was attaching.
        if self._held.out[0] != ffi.NULL:
            lib.bl_session_forked(self._held.out[0])
        self._held, self._forked = _Held(), True
        self._exchanging = threading.Lock()
        self._end.detach()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.pool!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bytes_of(request: object) -> bytes:
    """Return a request as bytes. Raises BadTypeError."""
    if isinstance(request, str):
        return request.encode()
    try:
        view = memoryview(request)  # type: ignore[arg-type]
        if "O" in view.format:
            raise TypeError
    except (TypeError, ValueError, BufferError):
        raise BadTypeError(
            f"the request is {short(request)}; give bytes, a buffer such as a numpy array, or text"
        ) from None
    return view.tobytes()


class _Held:
    """A C session: a separate object because it outlives the client.

    The session's heartbeat writes to the pool, so the pool stays ``mapped`` until the session is
    closed, even if an interrupt prevents the closing. C frees the session with this object, to
    which a thread that is about to use it has a reference. ``lock`` guards the client's buffer for
    replies, and the closing.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.mapped = ExitStack()
        self.out = ffi.new("bl_session **")  # a fork during the attachment uses this
        self.session: core.bl_session | None = None
        self.leaves = False
        """Whether a thread still uses the session at the process's end: it is left alone."""

    def end(self) -> None:
        """Close the session once no thread uses it."""
        with self.lock:
            self._close(_FOREVER_NS)

    def end_at_exit(self) -> None:
        """Close the session, unless a thread still uses it after EXIT_WAIT_S."""
        if self.lock.acquire(timeout=EXIT_WAIT_S):
            try:
                self._close(round(EXIT_WAIT_S * 1e9))
            finally:
                self.lock.release()

    def _close(self, timeout_ns: int) -> None:
        self.session = None
        session = self.out[0]
        if self.leaves or (session != ffi.NULL and not lib.bl_session_end(session, timeout_ns)):
            self.leaves = True
        else:
            self.mapped.close()

    def __del__(self) -> None:
        session, self.out[0] = self.out[0], ffi.NULL
        if session != ffi.NULL and not self.leaves:
            lib.bl_session_free(session)
