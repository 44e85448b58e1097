# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The client side of calls: sessions, calls, and how both behave in a forked child."""

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
from beluga.arguments import short, whole
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
from beluga.rpc.encoding import converted
from beluga.rpc.handlers import LIST, HandlerInfo, Handlers
from beluga.rpc.parts import exchange
from beluga.rpc.report import Figure, Report
from beluga.rpc.server import refuse_unstarted
from beluga.rpc.times import nanoseconds
from beluga.rpc.workers import request as request_of
from beluga.rpc.workers import result_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from beluga.pool import Pool

log = logging.getLogger(__name__)

Buffer: TypeAlias = "bytes | bytearray | memoryview | NDArray[np.generic]"
"""What a request may be; other objects that have a contiguous buffer are taken, too."""

_NUMBER_MAX = (1 << 32) - 1
_P = ParamSpec("_P")
_T = TypeVar("_T")

# The limit of the wait for a daemon thread's call at exit. After it the kernel frees the liveness
# lock, which ends the session.
EXIT_WAIT_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class ClientStat:
    """Counters of one session. ``reattach_count`` counts how often the session attached again:
    because the server was replaced, because the server gave the session up, or because a call timed
    out. ``mismatch_count`` counts blocks of gets whose entry or bytes were not those expected, and
    ``checksum_count`` those of them whose checksums differed.
    """

    epoch: int
    nonce: int
    lane: int
    call_count: int
    reattach_count: int
    mismatch_count: int
    checksum_count: int


class Client(OfThisProcess):
    """A session with the pool's server. Threads may share a client: it has one lane and a lock, so
    their calls are made one after the other. Threads that call at the same time have a client each.

    If the server is replaced, the session attaches to the new one by itself and repeats a call that
    was not answered. After :func:`os.fork` the child's copy raises
    :class:`~beluga.errors.ForkedSessionError`; make a new Client there.

    Raises :class:`~beluga.errors.NoServerError`, :class:`~beluga.errors.NoLaneError`,
    :class:`~beluga.errors.HostClashError`, :class:`~beluga.errors.CallTimeoutError`, or
    :class:`~beluga.errors.SecondHostError` (the pool has hardware coherence and another host uses
    it).
    """

    def __init__(self, pool: Pool, *, host: int | None = None, timeout_s: float = 5.0) -> None:
        timeout_ns = nanoseconds(timeout_s)
        if not hasattr(pool, "using"):
            raise BadTypeError(f"a session is of a Pool, not of {short(pool)}; open one")
        self.pool = pool
        self._timeout_s, self._timeout_ns = timeout_s, timeout_ns
        self.report = Report()
        """What this session counts for the server's exporter; see :meth:`tell`."""
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
            with self._held.lock:  # A thread that closes the pool waits for this lock.
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
        """Call a handler by its name, or a method by its number.

        By name, ``arguments`` are what the handler is annotated with, of up to 1 GiB in all, and
        the result is checked to be of the type ``returns``. If the server is replaced, the call is
        made again, so a handler may run twice.

        By number, the one argument is the request: bytes, a contiguous buffer, or text, which is
        sent as UTF-8. Request and reply have at most ``bulk_size`` bytes.

        Raises :class:`~beluga.errors.CallTimeoutError` when no server answers within ``timeout_s``
        seconds (that of the client by default), :class:`~beluga.errors.NoMethodError` if the server
        has no such handler, :class:`~beluga.errors.BadTypeError` for arguments that it does not
        take, :class:`~beluga.errors.HandlerError` if it raised,
        :class:`~beluga.errors.BadRequestError` for a request that is too large, and
        :class:`~beluga.errors.QuotaError` for more calls than the server's quota allows.
        """
        if isinstance(method, str):
            return self._call_handler(method, arguments, {}, returns, timeout_s)
        if len(arguments) > 1:
            raise BadTypeError(
                f"method {short(method)} takes one request, not {len(arguments)} arguments; give "
                "bytes, or call a handler by its name"
            )
        request = arguments[0] if arguments else b""
        data = request if type(request) is bytes else _bytes_of(request)
        return self._call_method(method, data, timeout_s)

    def remote(
        self, handler: Callable[_P, _T], *, timeout_s: float | None = None
    ) -> Callable[_P, _T]:
        """Return a function that calls the server's handler of the name of ``handler``, and has its
        parameters and result for a type checker::

            scale = client.remote(jobs.scale)
            scale(values, by=3.0)

        Its calls raise as :meth:`call` does.
        """
        returns = Handlers(handler).returns(handler.__name__)

        def call(*arguments: _P.args, **named: _P.kwargs) -> _T:
            found = self._call_handler(handler.__name__, arguments, named, returns, timeout_s)
            return cast("_T", found)

        return call

    def handlers(self, *, timeout_s: float | None = None) -> list[HandlerInfo]:
        """Ask the server for its handlers. Raises as :meth:`call` does; a server without handlers
        raises :class:`~beluga.errors.NoMethodError`.
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
        message = request_of(name, arguments, named)
        limit_s = nanoseconds(self.timeout_s if timeout_s is None else timeout_s) / 1e9
        with self._exchanging:  # the parts of a message are the session's only calls of handlers
            self._number = self._number % _NUMBER_MAX + 1
            number, method = self._number, int(lib.BL_METHOD_FUNCTION)

            def call(part: bytes, left_s: float) -> bytes:
                return self._call_method(method, part, left_s, f"the handler {name}")

            try:
                reply = exchange(call, message, number, self._reply_size, limit_s)
            except NoMethodError:
                raise NoMethodError(
                    f"the server has no handlers, so not {name} either; start it with handlers: "
                    "'cxl-rpc serve MODULE:NAME', or 'beluga serve --handlers MODULE:NAME'"
                ) from None
        return converted(result_of(reply), returns, f"the result of {name}")

    def _call_method(
        self, number: int, request: bytes, timeout_s: float | None, what: str = ""
    ) -> bytes:
        method = number if type(number) is int else whole("method", number)
        if not 0 <= method <= _NUMBER_MAX:
            raise BadValueError(f"method {method} is no number of a call; give 0 to 254")
        size, capacity, reply = len(request), self._reply_size, self._reply
        if size > capacity:
            raise BadRequestError(
                f"a request has {size} bytes, {capacity} is the most; create the pool with a "
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

    def tell(self) -> None:
        """Send the :attr:`report` if it is time for one. If that fails, its figures are lost."""
        if not self.report.due:
            return
        try:
            self._count_mismatches()
            if (request := self.report.take()) is not None:
                self.call(lib.BL_METHOD_REPORT, request)
        except NoMethodError:
            self.report.never()
        except RpcError as error:
            log.debug("a report was lost: %s", error)

    def _count_mismatches(self) -> None:
        stat, (mismatches, failures) = self.stat(), self._mismatches
        self._mismatches = stat.mismatch_count, stat.checksum_count
        self.report.add(Figure.MISMATCHES, stat.mismatch_count - mismatches)
        self.report.add(Figure.CHECKSUM_FAILURES, stat.checksum_count - failures)

    def ping(self, *, timeout_s: float | None = None) -> float:
        """Return the seconds that a round trip to the server takes."""
        start = time.perf_counter()
        self.call(lib.BL_METHOD_PING, b"", timeout_s=timeout_s)
        return time.perf_counter() - start

    @property
    def lock(self) -> threading.Lock:
        """The lock that a caller holds while it uses the session::

            with client.lock:
                session = client.session

        Nothing but the lock stands in the ``with``: entered and left in C, it is not left locked
        by an interrupt.
        """
        return self._held.lock

    @property
    def session(self) -> core.bl_session:
        """The ``bl_session *``. The caller holds the :attr:`lock`. Raises RpcError if this client
        is closed, and ForkedSessionError in a forked child.
        """
        session = self._held.session
        if session is not None:
            return session
        if self._forked:
            raise ForkedSessionError(
                "this session belongs to the parent process; make a new Client after fork"
            )
        raise RpcError("this client is closed; make a new one")

    @property
    def timeout_s(self) -> float:
        """The seconds that a call waits for an answer. Raises BadValueError, if it is set out of
        range, or BadTypeError.
        """
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._timeout_ns = nanoseconds(seconds)
        self._timeout_s = seconds

    def stat(self) -> ClientStat:
        """Return the counters of this session."""
        with self.lock:
            out = ffi.new("bl_session_stat *")
            lib.bl_session_describe(self.session, out)
            names = (field.name for field in dataclasses.fields(ClientStat))
            return ClientStat(**{name: getattr(out, name) for name in names})

    def close(self) -> None:
        """Give the lane back. If no server is listening, its successor reads this from the pool."""
        self._held.end()

    def _forget(self) -> None:
        """Forget the session in a forked child. The session and the holder of the lock belong to
        the parent.
        """
        # The session may be NULL: the fork may have come while it was attaching.
        if self._held.out[0] != ffi.NULL:
            lib.bl_session_forked(self._held.out[0])
        self._held, self._forked = _Held(), True
        self._exchanging = threading.Lock()
        self._end.detach()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bytes_of(request: object) -> bytes:
    """Return the bytes of a request by number. Raises BadTypeError."""
    if isinstance(request, str):
        return request.encode()
    try:
        view = memoryview(request)  # type: ignore[arg-type]
        if "O" in view.format:
            raise TypeError
    except (TypeError, ValueError, BufferError):
        raise BadTypeError(
            f"request is {short(request)}; give bytes, a buffer such as a numpy array, or text"
        ) from None
    return view.tobytes()


class _Held:
    """A C session with its lock. It is a separate object because it outlives the client.

    Its heartbeat writes to the pool, so the pool stays ``mapped`` until the session is closed, even
    if an interrupt keeps it from being closed.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.mapped = ExitStack()
        self.out = ffi.new("bl_session **")  # a fork during the attachment finds it here
        self.session: core.bl_session | None = None

    def end(self) -> None:
        """Close the session when nobody uses it."""
        with self.lock:
            self._close()

    def end_at_exit(self) -> None:
        """Close the session, unless a thread keeps using it for longer than EXIT_WAIT_S."""
        if self.lock.acquire(timeout=EXIT_WAIT_S):
            try:
                self._close()
            finally:
                self.lock.release()

    def _close(self) -> None:
        session, self.session = self.out[0], None
        self.out[0] = ffi.NULL
        if session != ffi.NULL:
            lib.bl_session_close(session)
        self.mapped.close()
