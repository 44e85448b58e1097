# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Server threads that run handlers, and the format of calls and results.

The poll loop hands each call to a thread and continues (``csrc/rpc/jobs.h``), so a slow handler
delays its caller and the calls that wait for a free thread, but not the block index.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from beluga._ffi import core, ffi, lib
from beluga.errors import (
    BadRequestError,
    BadTypeError,
    BelugaError,
    HandlerError,
    NoMethodError,
    QuotaError,
    RpcError,
)
from beluga.metrics import REGISTRY
from beluga.rpc.encoding import converted, pack, unpack
from beluga.rpc.handlers import Handlers
from beluga.rpc.parts import MESSAGE_MAX, Assembly
from beluga.threads import Thread

log = logging.getLogger(__name__)

Running: TypeAlias = "Callable[[], AbstractContextManager[core.bl_server]]"

_RAISED: dict[str, type[BelugaError]] = {
    one.__name__: one
    for one in (BadRequestError, BadTypeError, HandlerError, NoMethodError, QuotaError)
}
_CALLS = REGISTRY.counter("beluga_handler_calls_total", "Calls of each handler (`handler`).")
_ERRORS = REGISTRY.counter(
    "beluga_handler_errors_total", "Calls of each handler that returned an error."
)
_SECONDS = REGISTRY.histogram(
    "beluga_handler_seconds", "Duration of each handler's calls, in seconds, without waiting."
)
_UNKNOWN = "(unknown)"  # the label of calls of handlers that do not exist; no name has parentheses
_TEXT_MAX = 1000  # characters of an error that a message carries


class Workers:
    """Threads that run a server's handlers until the server stops.

    ``running`` yields the ``bl_server *``, and raises RpcError once the server has stopped.
    """

    def __init__(self, handlers: Handlers, running: Running, room: int, threads: int) -> None:
        self._handlers, self._running = handlers, running
        self._assembly = Assembly(self._counted, room)
        for name in handlers:  # a rate needs a first value
            _CALLS.add(0, handler=name)
            _ERRORS.add(0, handler=name)
        for number in range(threads):
            Thread(target=self._work, name=f"beluga-handler-{number}", daemon=True).start()

    def _work(self) -> None:
        taken = ffi.new("bl_function_call *")
        try:
            while True:
                with self._running() as server:
                    if lib.bl_function_take(server, taken) <= 0:
                        return
                    call = bytearray(ffi.buffer(taken.request, taken.request_size))
                reply, status = self._answer(int(taken.lane), int(taken.nonce), call)
                with self._running() as server:
                    data = ffi.from_buffer("uint8_t[]", reply)
                    lib.bl_function_answer(server, taken.number, data, len(reply), status)
        except RpcError:  # the server has stopped
            return

    def _answer(self, lane: int, nonce: int, call: bytearray) -> tuple[bytes | bytearray, int]:
        """Return the reply and the status of a call."""
        try:
            return self._assembly.answer(lane, nonce, call), 0
        except Exception as error:
            log.warning("a handler call was refused: %s", error)
            known = isinstance(error, QuotaError)
            return b"", -(lib.BL_ERROR_QUOTA if known else lib.BL_ERROR_BAD_REQUEST)

    def _counted(self, message: bytearray) -> bytearray:
        """Call the handler of a request, count the call, and return the message with its result."""
        started_s, name = time.perf_counter(), _UNKNOWN
        try:
            called, arguments, named = _request_of(message)
            if called in self._handlers:
                name = called
            reply = self._run(called, self._handlers.bind(called, arguments, named))
        except BelugaError as error:
            _ERRORS.add(handler=name)
            reply = _failure(error)
        _CALLS.add(handler=name)
        _SECONDS.observe(time.perf_counter() - started_s, handler=name)
        return reply

    def _run(self, name: str, bound: Callable[[], object]) -> bytearray:
        """Call a handler, and return the message with its result. Raises HandlerError."""
        try:
            result = bound()
        # Includes sys.exit(), because other callers share the thread
        except BaseException as error:
            log.exception("the handler %s raised", name)
            text = " ".join(f"{type(error).__name__}: {error}".split())[:_TEXT_MAX]
            raise HandlerError(f"the handler {name} raised {text}; see the server's log") from None
        try:
            kind = self._handlers.returns(name)
            made = pack({"result": converted(result, kind, f"the result of {name}")})
            if len(made) > MESSAGE_MAX:
                raise BadTypeError(
                    f"the result of {name} has more than {MESSAGE_MAX} bytes; return less"
                )
        except BadTypeError as error:
            log.error("%s", error)
            raise HandlerError(str(error)) from None
        return made


def _request_of(message: bytearray) -> tuple[str, list[object], dict[str, object]]:
    fields = unpack(message)
    name, arguments = fields.get("handler"), fields.get("arguments")
    named = fields.get("named")
    if not (isinstance(name, str) and isinstance(arguments, list) and isinstance(named, dict)):
        raise BadRequestError("a call has no handler name or no list of arguments")
    return name, arguments, named


def _failure(error: BelugaError) -> bytearray:
    return pack({"error": [type(error).__name__, str(error)]})


def request(name: str, arguments: tuple[object, ...], named: dict[str, Any]) -> bytearray:
    """Encode a handler call. Raises BadTypeError for a value that cannot be sent."""
    return pack({"handler": name, "arguments": list(arguments), "named": named})


def result_of(message: bytearray) -> object:
    """Return a handler's result. Raises the error in the reply."""
    fields = unpack(message)
    if "result" in fields:
        return fields["result"]
    error = fields.get("error")
    if not isinstance(error, list) or not all(isinstance(one, str) for one in error):
        raise BadRequestError("a reply has neither a result nor an error")
    name, text = error
    raise _RAISED.get(name, HandlerError)(text)
