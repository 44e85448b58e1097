# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A copy engine as C calls it in a put or get (``csrc/kvcache/engine.c``), piece by piece as a link
admits the pieces.

Space may be reused only when no transfer can still write to it (D15). So a put or get returns only
after all its transfers have ended. If that cannot be established, the session abandons its nonce,
and the server quarantines the space until this process has ended.

No interrupt can stop a batch between its grants and their end: those of the main thread run on the
cache's worker (``ring.py``).
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from beluga._ffi import core, ffi, lib
from beluga.errors import (
    ChecksumError,
    DeviceFaultError,
    NoRoomError,
    UnsettledError,
)
from beluga.transfer import CHUNK, PIECE, Direction, LinkSettings, Plan, keep_for_good, settle

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from beluga.transfer import CopyEngine, Transfer


_CODES: tuple[tuple[type[Exception], int], ...] = (
    (ChecksumError, -errno.EBADMSG),
    (DeviceFaultError, -lib.BL_ERROR_DEVICE_FAULT),  # reports the failed memory to the server
    (NoRoomError, -lib.BL_ERROR_NO_ROOM),  # the blocks are refused
    (UnsettledError, -errno.EINPROGRESS),  # the grants remain
)
_RESULTS = (ChecksumError, NoRoomError)  # the call continues, and reports them by block


@runtime_checkable
class NativeEngine(Protocol):
    """An engine in C, such as :class:`beluga.transfer.CudaEngine`."""

    def table(self, piece_sizes: list[int]) -> core.bl_engine:
        """Return the engine as C calls it."""
        ...

    def raise_for_copy(self, code: int) -> None:
        """Raise the error of a copy that C called, if the code is one of this engine's."""
        ...


class EngineTable:
    """The table ``bl_engine`` of a copy engine, for one batch at a time. ``settings`` are those of
    the link, if there is one.

    ``owners`` keep the memory of the batch.
    """

    def __init__(self, engine: CopyEngine, settings: LinkSettings | None = None) -> None:
        self._engine = engine
        self.piece_sizes = [
            0 if settings is None else piece_size(engine, settings, direction)
            for direction in (Direction.READ, Direction.WRITE)
        ]
        self.is_native = isinstance(engine, NativeEngine)
        """Whether C copies without Python; then the engine has its own lock."""
        if isinstance(engine, NativeEngine):
            self.struct = engine.table(self.piece_sizes)
        else:
            self._self = ffi.new_handle(self)
            self.struct = ffi.new(
                "bl_engine *",
                {
                    "context": self._self,
                    "start": lib.bl_python_engine_start,
                    "wait": lib.bl_python_engine_wait,
                    "piece_size": self.piece_sizes,
                },
            )
        self._transfers: dict[int, Transfer] = {}  # by number
        self._count = 0
        self._error: BaseException | None = None
        self._owners: tuple[object, ...] = ()

    def raise_for_copy(self, code: int, owners: tuple[object, ...]) -> None:
        """Raise the error of a native engine's copy, if the code is one; then ``owners`` are kept
        if it may still write to them.
        """
        if isinstance(self._engine, NativeEngine):
            if code == -errno.EINPROGRESS:
                keep_for_good(owners)
            self._engine.raise_for_copy(code)

    def begin(self, owners: tuple[object, ...]) -> None:
        """Begin a batch."""
        self._owners, self._error = owners, None

    def end(self) -> None:
        """End the batch, and raise the first error of the engine."""
        error, self._error, self._owners = self._error, None, ()
        if error is not None:
            raise error

    def start(self, plan: Plan, *, write: bool) -> int:
        """Start a copy. Returns its number."""
        copy = self._engine.gather_write if write else self._engine.scatter_read
        self._count += 1
        self._transfers[self._count] = copy(plan)
        return self._count

    def wait(self, number: int) -> None:
        """Wait until the copy has ended. It is not in progress after an error, either, except after
        :class:`~beluga.errors.UnsettledError`.
        """
        transfer = self._transfers.pop(number)
        try:
            transfer.wait()
        except BaseException:
            settle([transfer])
            raise

    def failed(self, error: BaseException) -> int:
        """Keep the error of a copy for :meth:`end`, unless it is a result. Returns its code."""
        unsettled = isinstance(error, UnsettledError)
        if not isinstance(error, _RESULTS) and (self._error is None or unsettled):
            self._error = error
        return next((code for kind, code in _CODES if isinstance(error, kind)), -errno.ECANCELED)

    def plan(self, struct: core.bl_plan) -> Plan:
        """Return the plan over the arrays of C, which exist until the copy has ended."""

        def rows(pointer: core.CData, count: int, kind: np.dtype[Any]) -> NDArray[Any]:
            return np.frombuffer(memoryview(ffi.buffer(pointer, count * kind.itemsize)), kind)

        sums = struct.checksums
        return Plan(
            rows(struct.pieces, struct.piece_count, PIECE),
            rows(struct.chunks, struct.chunk_count, CHUNK),
            rows(sums, struct.chunk_count, np.dtype(np.uint32)) if sums else None,
            sparse=bool(struct.sparse),
            owners=self._owners,
            piece_base=struct.piece_base,
            chunk_base=struct.chunk_base,
        )


_PIECE_PS = 100_000_000
"""The time of a piece on the link if the engine has no ``piece_size``. Starting a piece costs some
20 microseconds of Python.
"""


def piece_size(engine: CopyEngine, settings: LinkSettings, direction: Direction) -> int:
    """Return the bytes of an engine's pieces.

    That is the engine's ``piece_size``, or the bytes of 100 microseconds on the link, and never
    less than a piece of a copying thread.
    """
    speed = settings.write if direction is Direction.WRITE else settings.read
    own: int = getattr(engine, "piece_size", 0) or speed.longest(_PIECE_PS)
    return max(own, settings.piece_size)


@ffi.def_extern(error=-errno.ECANCELED)
def bl_python_engine_start(
    context: core.void_p, plan: core.bl_plan, write: int, copy: core.CPointer[core.void_p]
) -> int:
    """Start a copy for C."""
    table: EngineTable = ffi.from_handle(context)
    try:
        copy[0] = ffi.cast("void *", table.start(table.plan(plan), write=bool(write)))
    except BaseException as error:  # the caller of the batch gets it
        return table.failed(error)
    return 0


@ffi.def_extern(error=-errno.EINPROGRESS)
def bl_python_engine_wait(context: core.void_p, copy: core.void_p) -> int:
    """Wait for a copy for C."""
    table: EngineTable = ffi.from_handle(context)
    try:
        table.wait(int(ffi.cast("uintptr_t", copy)))
    except BaseException as error:  # the caller of the batch gets it
        return table.failed(error)
    return 0
