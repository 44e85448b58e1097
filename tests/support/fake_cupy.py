# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A stand-in for the functions of cupy and libcuda that this project calls, on the host-compiled
kernels.

Signatures, results and errors are those of cupy 14.2 (``cupy_backends/cuda/api/runtime.pyx``) and
of CUDA's driver, so that the code which calls them runs without a GPU. Numbers must be integers,
flags those that exist. While :attr:`FakeCuda.capturing_elsewhere`, calls that CUDA takes for unsafe
fail in a thread that is not in the relaxed mode.
"""

# ruff: noqa: N802  names are cupy's

from __future__ import annotations

import ctypes
import operator
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from beluga_bench.gpu.host_driver import HostDriver
from support.cuda_capture import begin_capture, end_capture, replay

from beluga.transfer.cuda import driver as source
from beluga.transfer.cuda.driver import DriverError, Grid, Pinned

INVALID, NOT_READY, LAUNCH_FAILED, CAPTURE_UNSUPPORTED = 1, 600, 719, 900


class CUDARuntimeError(RuntimeError):
    """cupy's."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"cudaError{status}: made up")


class CompileException(Exception):  # noqa: N818
    """cupy's."""


class FakeArray(np.ndarray[Any, Any]):
    """The part of ``cupy.ndarray`` that is used."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self) -> Any:
        return np.array(self)


class FakeRuntime:
    """``cupy_backends.cuda.api.runtime``."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self._host = cuda, cuda.host
        self._pinned: dict[int, Pinned] = {}
        self._gpu_addresses: dict[int, int] = {}

    def getDeviceCount(self) -> int:
        return 1

    def setDevice(self, device: int) -> None:
        assert operator.index(device) == 0

    def deviceGetPCIBusId(self, device: int) -> str:
        return f"0000:0{operator.index(device)}:00.0"

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        return {"name": f"Made up {operator.index(device)}".encode()}

    def check_status(self, status: int) -> None:
        if status:
            raise CUDARuntimeError(status)

    def malloc(self, size: int) -> int:
        self._cuda.refuse_in_capture()
        return self._host.allocate(operator.index(size))

    def free(self, ptr: int) -> None:
        self._cuda.refuse_in_capture()
        self._host.free(operator.index(ptr))

    def hostAlloc(self, size: int, flags: int) -> int:
        self._cuda.refuse_in_capture()
        assert flags & ~7 == 0
        pinned = self._host.pin(operator.index(size))
        address = int(pinned.array.ctypes.data)
        self._pinned[address], self._gpu_addresses[address] = pinned, pinned.address
        return address

    def freeHost(self, ptr: int) -> None:
        self._cuda.refuse_in_capture()
        del self._gpu_addresses[ptr]
        self._host.unpin(self._pinned.pop(ptr))

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:
        self._cuda.refuse_in_capture()
        assert flags & ~15 == 0
        try:
            self._gpu_addresses[ptr] = self._host.register(ptr, operator.index(size))
        except DriverError:
            raise CUDARuntimeError(INVALID) from None

    def hostUnregister(self, ptr: int) -> None:
        self._cuda.refuse_in_capture()
        del self._gpu_addresses[ptr]
        self._host.unregister(ptr)

    def pointerGetAttributes(self, ptr: int) -> Any:
        return SimpleNamespace(devicePointer=self._gpu_addresses.get(ptr, 0), hostPointer=ptr)

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        assert 0 <= kind <= 4
        self._host.copy(*map(operator.index, (dst, src, size, stream)))

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:
        assert flags in (0, 1)
        return self._host.make_stream(urgent=operator.index(priority) < 0)

    def streamDestroy(self, stream: int) -> None:
        self._host.end_stream(stream)

    def streamIsCapturing(self, stream: int) -> bool:
        return self._host.capturing(operator.index(stream))

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        assert flags == 0
        self._host.follow(operator.index(stream), event)

    def eventCreateWithFlags(self, flags: int) -> int:
        assert flags & ~7 == 0
        return self._host.make_event()

    def eventDestroy(self, event: int) -> None:
        self._host.free_event(event)

    def eventRecord(self, event: int, stream: int) -> None:
        self._host.record(event, operator.index(stream))

    def eventQuery(self, event: int) -> int:
        try:
            self._cuda.refuse_in_capture()
            return 0 if self._host.ended(event) else NOT_READY
        except DriverError:
            return LAUNCH_FAILED
        except CUDARuntimeError as error:
            return error.status

    def eventSynchronize(self, event: int) -> None:
        self._cuda.refuse_in_capture()
        try:
            self._host.wait(event)
        except DriverError:
            raise CUDARuntimeError(LAUNCH_FAILED) from None

    def eventElapsedTime(self, start: int, end: int) -> float:
        if not (self._host.ended(start) and self._host.ended(end)):
            raise CUDARuntimeError(NOT_READY)
        return self._host.elapsed_s(start, end) * 1e3

    def deviceSynchronize(self) -> None:
        """The tests' own work has ended by then."""


class FakeStream:
    """``cupy.cuda.Stream``; ``null`` is the legacy default one."""

    def __init__(self, cuda: FakeCuda, ptr: int | None = None) -> None:
        self._cuda = cuda
        self.ptr = cuda.host.make_stream(urgent=False) if ptr is None else ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    def begin_capture(self) -> None:
        begin_capture(self._cuda.host, self.ptr)

    def end_capture(self) -> Any:
        graph = end_capture(self._cuda.host, self.ptr)
        return SimpleNamespace(launch=lambda stream: replay(self._cuda.host, graph, stream.ptr))

    def synchronize(self) -> None:
        event = self._cuda.host.make_event()
        self._cuda.host.record(event, self.ptr)
        self._cuda.host.wait(event)
        self._cuda.host.free_event(event)


class FakeCuda:
    """All of the fake, as modules; ``libcuda`` has the two functions that are called directly."""

    def __init__(self) -> None:
        self.host = HostDriver()
        self.capturing_elsewhere = False
        self.compile_error: str | None = None
        self.options: tuple[str, ...] = ()
        self._mode = threading.local()
        self.libcuda = SimpleNamespace(
            cuThreadExchangeStreamCaptureMode=self._exchange, cuMemcpyBatchAsync=self._batch
        )
        self.runtime = FakeRuntime(self)

    def install(self, patch: pytest.MonkeyPatch) -> Any:
        """Install the fake for ``import cupy``. Returns the module."""
        load: Callable[..., Any] = ctypes.CDLL

        def loaded(name: str | None, *given: Any, **named: Any) -> Any:
            return self.libcuda if name == "libcuda.so.1" else load(name, *given, **named)

        patch.setattr(ctypes, "CDLL", loaded)
        runtime = ModuleType("cupy_backends.cuda.api.runtime")
        for name in dir(self.runtime):
            if not name.startswith("_"):
                setattr(runtime, name, getattr(self.runtime, name))
        api = ModuleType("cupy_backends.cuda.api")
        api.runtime = runtime  # type: ignore[attr-defined]
        cupy = self._module(runtime)
        for module in (api, runtime, cupy):
            patch.setitem(sys.modules, module.__name__, module)
        for name in ("cupy_backends", "cupy_backends.cuda"):
            patch.setitem(sys.modules, name, ModuleType(name))
        return cupy

    def refuse_in_capture(self) -> None:
        """As CUDA does while another thread captures in the global mode."""
        if self.capturing_elsewhere and getattr(self._mode, "value", 0) != 2:
            raise CUDARuntimeError(CAPTURE_UNSUPPORTED)

    def _module(self, runtime: ModuleType) -> Any:
        cupy: Any = ModuleType("cupy")
        cupy.__version__ = "14.2.0"
        cupy.RawModule = self._raw_module
        cupy.asarray = lambda values: np.array(values).view(FakeArray)
        cupy.zeros = lambda count, dtype: np.zeros(count, dtype).view(FakeArray)
        cupy.arange, cupy.matmul = np.arange, np.matmul
        cupy.empty_like, cupy.uint8, cupy.float16 = np.empty_like, np.uint8, np.float16
        null = FakeStream(self, 0)
        cupy.cuda = SimpleNamespace(
            compiler=SimpleNamespace(CompileException=CompileException),
            get_current_stream=lambda: null,
            runtime=runtime,
            Stream=lambda non_blocking=False: FakeStream(self),
        )
        return cupy

    def _raw_module(self, *, code: str, options: tuple[str, ...], backend: str) -> Any:
        assert isinstance(code, str) and isinstance(options, tuple) and backend == "nvrtc"
        self.options = options
        return SimpleNamespace(get_function=self._function)

    def _function(self, name: str) -> Callable[..., None]:
        if self.compile_error:
            raise CompileException(self.compile_error)
        assert name in source.KERNELS

        def run(grid: tuple[int], block: tuple[int], args: tuple[Any], *, stream: Any) -> None:
            (job,) = args
            # otherwise it is not passed by value
            assert isinstance(job, np.ndarray) and job.size == 1
            self.host.launch(name, Grid(*grid, *block), job, operator.index(stream.ptr))

        return run

    def _exchange(self, mode: Any) -> int:
        before = getattr(self._mode, "value", 0)
        self._mode.value, mode._obj.value = mode._obj.value, before
        return 0

    def _batch(self, *given: Any) -> int:
        """With the nine arguments of CUDA 12.8, whose symbol later drivers keep."""
        targets, sources, sizes, count, attributes, first, kinds, _, stream = given
        assert (attributes._obj.order, first._obj.value, kinds.value) == (1, 0, 1)
        assert stream.value  # the default stream is refused
        for index in range(count.value):
            self.host.copy(targets[index], sources[index], sizes[index], stream.value)
        return 0
