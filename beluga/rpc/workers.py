# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Server threads that run handlers, and the format of calls and results.

The poll loop hands each call to a thread and continues (``csrc/rpc/jobs.h``), so a slow handler
delays its caller and the calls that wait for a free thread, but not the block index.
"""

from __future__ import annotations

import logging
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
_TEXT_MAX = 1000  # characters of an error that a message carries


class Workers:
    """Threads that run a server's handlers until the server stops.

    ``running`` yields the ``bl_server *``, and raises RpcError once the server has stopped.
    """

    def __init__(self, handlers: Handlers, running: Running, room: int, threads: int) -> None:
        self._handlers, self._running = handlers, running
        self._assembly = Assembly(self._run, room)
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

    def _run(self, message: bytearray) -> bytearray:
        """Call the handler of a request, and return the message with its result."""
        try:
            name, arguments, named = _request_of(message)
            bound = self._handlers.bind(name, arguments, named)
        except (BadRequestError, BadTypeError, NoMethodError) as error:
            return _failure(error)
        try:
            result = bound()
        # Includes sys.exit(), because other callers share the thread
        except BaseException as error:
            log.exception("the handler %s raised", name)
            text = " ".join(f"{type(error).__name__}: {error}".split())[:_TEXT_MAX]
            return _failure(HandlerError(f"the handler {name} raised {text}; see the server's log"))
        try:
            kind = self._handlers.returns(name)
            made = pack({"result": converted(result, kind, f"the result of {name}")})
            if len(made) > MESSAGE_MAX:
                raise BadTypeError(
                    f"the result of {name} has more than {MESSAGE_MAX} bytes; return less"
                )
        except BadTypeError as error:
            log.error("%s", error)
            return _failure(HandlerError(str(error)))
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
