# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A stand-in for a GPU that can be paused, inspected and made to fail, and blocks to copy."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from beluga_bench.gpu.stub import StandIn
from support.engines import peek

from beluga._ffi import ffi, lib
from beluga.pool import Pool
from beluga.transfer import Plan, plan_blocks
from beluga.transfer.cuda import CudaEngine, DriverError

STRIPE = 2 << 20
PATIENCE_S = 60
NO_MEMORY, NOT_READY, UNKNOWN = 2, 600, 999  # results of CUDA

_HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64)
_hooks: list[Any] = []  # threads of C may call them until the process ends
_STARTS = {
    *("cuMemcpyAsync", "cuLaunchKernel", "cuMemAlloc", "cuMemHostAlloc", "cuEventCreate"),
    *("cuStreamCreateWithPriority", "cuEventRecord", "cuStreamWaitEvent"),
}
_ENDS = {"cuEventQuery", "cuEventSynchronize", "cuStreamSynchronize"}


class Gate:
    """While it is closed, kernels do not start."""

    def __init__(self, gpu: StandIn) -> None:
        self._gpu, self._open = gpu, True

    def is_set(self) -> bool:
        return self._open

    def set(self) -> None:
        self._open = True
        self._gpu.library.stub_gate(self._gpu.index, 1)

    def clear(self) -> None:
        self._open = False
        self._gpu.library.stub_gate(self._gpu.index, 0)


class Gpu(StandIn):
    """Another GPU, unless ``index`` is given.

    The call of a start whose number is in ``fail_at`` (1: the next one) fails before it has done
    anything. While ``silent``, waits and queries fail. ``before_register`` is called with the
    address and the size of a registration; with a DriverError it fails. ``bounced``: all of them
    fail. ``seen`` is called with each call's function and its first argument.
    """

    def __init__(
        self,
        before_register: Callable[[int], None] | None = None,
        *,
        index: int | None = None,
        bounced: bool = False,
    ) -> None:
        super().__init__(index)
        self.before_register = refuse if bounced else before_register
        self.fail_at, self.silent = 0, False
        self.seen: Callable[[str, int], int | None] = lambda function, first: None
        self.gate = Gate(self)
        _hooks.append(_HOOK(self._hook))
        self.library.stub_hook(self.index, _hooks[-1])
        self.library.stub_launch.restype = ctypes.c_char_p

    def _hook(self, name: bytes, first: int, second: int) -> int:
        function = name.decode()
        try:
            if function == "cuMemHostRegister" and self.before_register is not None:
                self.before_register(second)
        except DriverError:
            return NO_MEMORY
        if function in _STARTS and self.fail_at > 0:
            self.fail_at -= 1
            if self.fail_at == 0:
                return UNKNOWN
        if function in _ENDS and self.silent:
            return UNKNOWN
        return self.seen(function, first) or 0

    @property
    def launches(self) -> list[str]:
        """The kernels that were launched."""
        count = self.library.stub_launches(self.index)
        return [self.library.stub_launch(self.index, i).decode() for i in range(count)]

    @property
    def counts(self) -> list[int]:
        """The numbers of events, and of ranges of GPU, pinned and registered memory."""
        found = (ctypes.c_uint64 * 4)()
        self.library.stub_count(self.index, found)
        return list(found)

    def break_stream(self, stream: int) -> None:
        """Let later work on the stream fail, as after a kernel's fault."""
        self.library.stub_break(self.index, ctypes.c_uint64(stream))

    def begin_capture(self, stream: int) -> None:
        """Record the work that is put on the stream, without doing it."""
        self.library.stub_begin_capture(self.index, ctypes.c_uint64(stream))

    def end_capture(self, stream: int) -> ctypes.c_void_p:
        """End the recording and return the graph."""
        end = self.library.stub_end_capture
        end.restype = ctypes.c_void_p
        return ctypes.c_void_p(end(self.index, ctypes.c_uint64(stream)))

    def replay(self, graph: ctypes.c_void_p, stream: int) -> int:
        """Replay a graph, and wait for its end. Return the number of its operations."""
        count: int = self.library.stub_replay(self.index, graph, ctypes.c_uint64(stream))
        self.drain(stream)
        return count

    def drain(self, stream: int) -> None:
        """Wait until all work on the stream has ended."""
        event = self.make_event()
        self.record(event, stream)
        self.wait(event)
        self.free_event(event)


def enqueue(gpu: StandIn, stream: int, work: Callable[[], object]) -> None:
    """Put a function on a stream."""
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: work() and None)
    _hooks.append(call)
    gpu.library.cuCtxPushCurrent_v2(ctypes.c_uint64(gpu.index + 1))
    gpu.library.cuLaunchHostFunc(ctypes.c_uint64(stream), call, None)
    gpu.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_uint64()))


def refuse(_: int) -> None:
    raise DriverError("made up")


@dataclasses.dataclass
class Blocks:
    """Blocks of 16 fragments of 20 KB, one after the other in the pool, and their memory."""

    memory: Any
    plan: Plan

    @classmethod
    def make(cls, pool: Pool, count: int = 3, *, stripe: int = 0) -> Blocks:
        size, fragments = 20480, 16
        memory = np.random.default_rng(5).integers(0, 256, count * fragments * size, np.uint8)
        addresses = memory.ctypes.data + np.arange(count * fragments) * size
        start = pool.geometry.data_offset + stripe * STRIPE
        offsets = start + np.arange(count) * fragments * size
        plan = plan_blocks(
            addresses.reshape(count, fragments).astype(np.uint64),
            np.full(fragments, size),
            offsets.astype(np.uint64),
            chunk_size=16384,
        )
        return cls(memory, plan)

    def stored(self, pool: Pool) -> bool:
        content = peek(pool, int(self.plan.chunks["offset"][0]), len(self.memory))
        return bool((content == self.memory).all())


def engine_on(pool: Pool, gpu: StandIn, **options: Any) -> CudaEngine:
    options = {"window_size": STRIPE, "blocks": 2} | options
    return CudaEngine(pool, gpu, **options)


def windows_of(engine: CudaEngine, pool: Pool, plan: Plan) -> set[int]:
    """Return the windows in which a plan's bytes lie."""
    touched = np.zeros(len(engine.registrar.windows), np.uint8)
    with pool.using() as handle:
        windows = engine.registrar.struct(handle)
        lib.bl_spans_touch(windows, plan.struct(), ffi.from_buffer("uint8_t[]", touched))
    return set(np.flatnonzero(touched).tolist())


def held(engine: CudaEngine) -> set[int]:
    """Return the windows that copies hold."""
    handle = engine.registrar.handle
    return {
        index
        for index in range(len(engine.registrar.windows))
        if lib.bl_cuda_windows_at(handle, index).holds
    }


def nothing_under_way(engine: CudaEngine) -> bool:
    """Return whether no buffer is in use, and no window is held."""
    stat = ffi.new("bl_cuda_stat *")
    lib.bl_cuda_engine_stat(engine._handle, stat)
    return stat.buffers == 0 and held(engine) == set()
