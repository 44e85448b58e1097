# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The driver of a real GPU calls CUDA's runtime and NVRTC through cupy.

cupy clears CUDA's last error before it raises, so a failed registration does not appear as the
error of another kernel. After calls that return a status, this module clears the error.

While a thread captures a graph in the global mode (torch's default), CUDA rejects calls of other
threads that could be unsafe in that graph (allocation, registration, event queries), and the
capture fails, too. These calls are never part of a graph here, so they run in the relaxed mode.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beluga.errors import EngineUnavailableError
from beluga.transfer.cuda.driver import (
    KERNELS,
    NVRTC_OPTIONS,
    DriverError,
    Grid,
    Pinned,
    kernel_text,
)

_REGISTER = 1 | 2  # cudaHostRegisterPortable | Mapped; not IoMemory: devdax is ordinary memory
_ALLOC = 1 | 2  # cudaHostAllocPortable | Mapped
_STREAM = 1  # cudaStreamNonBlocking
_EVENT = 1  # cudaEventBlockingSync: a thread that waits sleeps
_COPY = 4  # cudaMemcpyDefault: the addresses determine the kind of memory
_NOT_READY = 600  # cudaErrorNotReady
_URGENT, _PATIENT = -5, 0  # cudaStreamCreateWithPriority clamps to the GPU's range
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_BYTES = np.dtype("V32")  # a JOB: cupy would list the fields of its type at each launch


@dataclasses.dataclass(frozen=True, slots=True)
class _Handle:
    """A stream for cupy's kernels. ``ExternalStream`` is deprecated since cupy 14."""

    ptr: int


_NEEDS_CUPY = "the CUDA engine needs cupy (pip install 'beluga-kv[cuda13]')"


def why_no_cupy() -> str | None:
    """Return in one line why there is no CUDA engine here, as far as known without importing
    cupy."""
    if "cupy" in sys.modules:
        return None if sys.modules["cupy"] else _NEEDS_CUPY
    return None if importlib.util.find_spec("cupy") else _NEEDS_CUPY


class CupyDriver:
    """The calls of :class:`~beluga.transfer.cuda.driver.Driver`, on one GPU.

    Raises :class:`~beluga.errors.EngineUnavailableError` if there is no cupy or no such GPU.
    """

    name = "cuda"

    def __init__(self, device: int = 0) -> None:
        self._device = device
        try:
            import cupy
            from cupy_backends.cuda.api import runtime
        except ImportError as error:
            raise EngineUnavailableError(f"{_NEEDS_CUPY}: {error}") from None
        if not hasattr(runtime, "streamCreateWithPriority"):
            raise EngineUnavailableError(
                f"cupy {cupy.__version__} is too old for the CUDA engine; install cupy 14 or later"
            )
        self._runtime = runtime
        self._error = runtime.CUDARuntimeError
        try:
            count = runtime.getDeviceCount()
        except (self._error, RuntimeError) as error:
            raise EngineUnavailableError(f"there is no usable GPU here: {error}") from None
        if device >= count:
            raise EngineUnavailableError(f"there is no GPU {device} here; there are {count}")
        self.use()
        bus = runtime.deviceGetPCIBusId(device)
        name = runtime.getDeviceProperties(device)["name"].decode()
        self.identity = f"{name}-{bus}".replace(" ", "-").replace(":", "-")
        try:
            self._exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
            with self._relaxed():
                module = cupy.RawModule(code=kernel_text(), options=NVRTC_OPTIONS, backend="nvrtc")
                self._kernels = {name: module.get_function(name) for name in KERNELS}
        except (cupy.cuda.compiler.CompileException, RuntimeError, OSError) as error:
            first = next(iter(str(error).splitlines()), "no message")
            raise EngineUnavailableError(f"the kernels cannot be compiled: {first}") from error

    def use(self) -> None:
        self._call(self._runtime.setDevice, self._device)

    def allocate(self, size: int) -> int:
        return int(self._call_apart(self._runtime.malloc, size))

    def free(self, address: int) -> None:
        self._call_apart(self._runtime.free, address)

    def pin(self, size: int) -> Pinned:
        host = int(self._call_apart(self._runtime.hostAlloc, size, _ALLOC))
        array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(host))
        return Pinned(array, self._gpu_address(host))

    def unpin(self, pinned: Pinned) -> None:
        self._call_apart(self._runtime.freeHost, pinned.array.ctypes.data)

    def register(self, address: int, size: int) -> int:
        self._call_apart(self._runtime.hostRegister, address, size, _REGISTER)
        return self._gpu_address(address)

    def unregister(self, address: int) -> None:
        self._call_apart(self._runtime.hostUnregister, address)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self._call(self._runtime.memcpyAsync, target, source, size, _COPY, stream)

    def launch(self, kernel: str, grid: Grid, job: NDArray[np.void], stream: int) -> None:
        run = functools.partial(self._kernels[kernel], stream=_Handle(stream))
        self._call(run, (grid.blocks,), (grid.threads,), (job.reshape(1).view(_BYTES),))

    def make_stream(self, *, urgent: bool) -> int:
        priority = _URGENT if urgent else _PATIENT
        return int(self._call(self._runtime.streamCreateWithPriority, _STREAM, priority))

    def end_stream(self, stream: int) -> None:
        self._call(self._runtime.streamDestroy, stream)

    def capturing(self, stream: int) -> bool:
        return stream != 0 and bool(self._call(self._runtime.streamIsCapturing, stream))

    def make_event(self) -> int:
        return int(self._call(self._runtime.eventCreateWithFlags, _EVENT))

    def free_event(self, event: int) -> None:
        self._call(self._runtime.eventDestroy, event)

    def record(self, event: int, stream: int) -> None:
        self._call(self._runtime.eventRecord, event, stream)

    def follow(self, stream: int, event: int) -> None:
        self._call(self._runtime.streamWaitEvent, stream, event)

    def ended(self, event: int) -> bool:
        try:
            with self._relaxed():
                status = int(self._runtime.eventQuery(event))
            self._runtime.check_status(status)  # this also clears "not ready"
        except self._error as error:
            if status != _NOT_READY:
                raise DriverError(f"a kernel or a copy failed: {error}") from None
        return status == 0

    def wait(self, event: int) -> None:
        self._call_apart(self._runtime.eventSynchronize, event)

    def elapsed_s(self, first: int, second: int) -> float:
        return float(self._call(self._runtime.eventElapsedTime, first, second)) / 1e3

    def close(self) -> None:
        self._kernels.clear()

    def _gpu_address(self, address: int) -> int:
        """Return the address of cudaHostGetDevicePointer, which cupy has among the attributes."""
        return int(self._call(self._runtime.pointerGetAttributes, address).devicePointer)

    def _call_apart(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a function that a capture by another thread would reject."""
        with self._relaxed():
            return self._call(function, *arguments)

    @contextlib.contextmanager
    def _relaxed(self) -> Iterator[None]:
        mode = ctypes.c_int(_RELAXED)
        self._exchange(ctypes.byref(mode))
        try:
            yield
        finally:
            self._exchange(ctypes.byref(mode))  # restore the mode

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:  # errors of the runtime, the driver and cupy
            raise DriverError(str(error)) from None
