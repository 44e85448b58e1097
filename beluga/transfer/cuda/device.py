# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A GPU, by NVIDIA's driver (``csrc/cuda/driver.c``): memory, streams and events.

A process opens each GPU once, in its primary context, which torch and cupy use, too. Addresses and
handles are plain integers; those of other libraries' streams are found without importing these
libraries.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import threading
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import core, ffi, lib
from beluga.errors import EngineUnavailableError, TransferError, raise_for_status
from beluga.transfer.cuda import nvrtc as compiler

_LIBRARY = "libcuda.so.1"
_NO_DRIVER = "the CUDA engine needs NVIDIA's driver"
_URGENT, _PATIENT = -5, 0  # CUDA clamps them to the GPU's range


class DriverError(TransferError):
    """A CUDA call failed; the error does not affect later calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pinned:
    """Memory of this process that the GPU reaches at ``address``."""

    array: NDArray[np.uint8]
    address: int


@runtime_checkable
class TorchStream(Protocol):
    """``torch.cuda.Stream``."""

    cuda_stream: int


@runtime_checkable
class CupyStream(Protocol):
    """``cupy.cuda.Stream`` and ``ExternalStream``."""

    ptr: int


@runtime_checkable
class ForeignStream(Protocol):
    """Anything with the protocol of cuda.core."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


StreamLike: TypeAlias = int | TorchStream | CupyStream | ForeignStream


def stream_handle(stream: StreamLike) -> int:
    """Return the ``cudaStream_t``. The stream must exist until the transfer has ended.

    Raises :class:`~beluga.errors.TransferError` for other objects than streams.
    """
    if isinstance(stream, int):
        return stream
    if isinstance(stream, TorchStream):
        return int(stream.cuda_stream)
    if isinstance(stream, ForeignStream):
        return int(stream.__cuda_stream__()[1])
    if isinstance(stream, CupyStream):
        return int(stream.ptr)
    raise TransferError(
        f"{stream!r} is not a CUDA stream; give a handle, or a stream of torch or cupy"
    )


def why_no_cuda() -> str | None:
    """Return in one line why there is no CUDA engine here, as far as known without opening a
    GPU."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return f"{_NO_DRIVER}: {error}"
    if next(compiler.installed(), None):
        return None
    try:
        compiler.find(None, 1 << 16)
    except EngineUnavailableError as error:
        return str(error)
    return None


@dataclasses.dataclass(slots=True)
class _Opened:
    handle: core.bl_cuda
    facts: core.bl_cuda_facts
    loaded: bool = False


_lock = threading.Lock()
_opened: dict[tuple[int, str, int], _Opened] = {}  # a forked child opens its own


class CudaDevice:
    """The GPU of a number. All calls except :meth:`wait` return at once; failed ones raise
    :class:`DriverError`.

    ``library`` and ``nvrtc`` are paths of the driver's library and of NVRTC's, for a stand-in;
    ``name`` is then the engine's name. Raises :class:`~beluga.errors.EngineUnavailableError` if
    there is no such GPU, or its kernels cannot be compiled.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        library: str = _LIBRARY,
        nvrtc: str | None = None,
        name: str = "cuda",
    ) -> None:
        self.name = name
        """The name of the engine."""
        with _lock:
            key = (os.getpid(), library, index)
            opened = _opened.get(key) or _open(library, index)
            _opened[key] = opened
            self.handle = opened.handle
            """The ``bl_cuda *`` for C."""
            if not opened.loaded:
                self._load(opened.facts, nvrtc)
                opened.loaded = True
        gpu, bus = (ffi.string(text).decode() for text in (opened.facts.name, opened.facts.bus))
        self.identity = f"{gpu}-{bus}".replace(" ", "-").replace(":", "-")
        """The identity of the GPU, under which measurements are kept."""

    def allocate(self, size: int) -> int:
        """Allocate ``size`` bytes of GPU memory and return the address."""
        address = ffi.new("uint64_t *")
        self.check(lib.bl_cuda_allocate(self.handle, size, address))
        return int(address[0])

    def free(self, address: int) -> None:
        """Free GPU memory."""
        self.check(lib.bl_cuda_free(self.handle, address))

    def pin(self, size: int) -> Pinned:
        """Allocate page-locked memory of this process."""
        host, address = ffi.new("void **"), ffi.new("uint64_t *")
        self.check(lib.bl_cuda_pin(self.handle, size, host, address))
        memory = (ctypes.c_uint8 * size).from_address(int(ffi.cast("uintptr_t", host[0])))
        return Pinned(np.ctypeslib.as_array(memory), int(address[0]))

    def unpin(self, pinned: Pinned) -> None:
        """Free page-locked memory."""
        self.check(lib.bl_cuda_unpin(self.handle, ffi.cast("void *", pinned.array.ctypes.data)))

    def register(self, address: int, size: int) -> int:
        """Page-lock memory of this process, and return its address for the GPU."""
        found = ffi.new("uint64_t *")
        self.check(lib.bl_cuda_register(self.handle, ffi.cast("void *", address), size, found))
        return int(found[0])

    def unregister(self, address: int) -> None:
        """End a registration."""
        self.check(lib.bl_cuda_unregister(self.handle, ffi.cast("void *", address)))

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy ``size`` bytes by a copy engine of the GPU, in stream order."""
        self.check(lib.bl_cuda_memcpy(self.handle, target, source, size, stream))

    def make_stream(self, *, urgent: bool) -> int:
        """Make a stream that waits for no other; ``urgent`` streams have priority."""
        stream = ffi.new("uint64_t *")
        priority = _URGENT if urgent else _PATIENT
        self.check(lib.bl_cuda_stream(self.handle, priority, stream))
        return int(stream[0])

    def end_stream(self, stream: int) -> None:
        """Destroy a stream."""
        self.check(lib.bl_cuda_end_stream(self.handle, stream))

    def make_event(self) -> int:
        """Make an event."""
        event = ffi.new("uint64_t *")
        self.check(lib.bl_cuda_event(self.handle, event))
        return int(event[0])

    def free_event(self, event: int) -> None:
        """Destroy an event."""
        self.check(lib.bl_cuda_free_event(self.handle, event))

    def record(self, event: int, stream: int) -> None:
        """Record an event at the present end of a stream."""
        self.check(lib.bl_cuda_record(self.handle, event, stream))

    def follow(self, stream: int, event: int) -> None:
        """Make later work on ``stream`` wait for the event's last recording.

        The event may be freed or recorded again meanwhile.
        """
        self.check(lib.bl_cuda_follow(self.handle, stream, event))

    def ended(self, event: int) -> bool:
        """Return whether all work before the event has ended. Raises :class:`DriverError` if any
        failed."""
        return self.check(lib.bl_cuda_query(self.handle, event)) == 1

    def wait(self, event: int) -> None:
        """Block until :meth:`ended` is true."""
        self.check(lib.bl_cuda_wait(self.handle, event))

    def elapsed_s(self, first: int, last: int) -> float:
        """Return the seconds between two events that have ended."""
        ms = ffi.new("double *")
        self.check(lib.bl_cuda_elapsed(self.handle, ms, first, last))
        return float(ms[0]) / 1e3

    def check(self, code: int) -> int:
        """Return a result of C. Raises :class:`DriverError` for a failed call of CUDA, and the
        errors of :func:`~beluga.errors.raise_for_status`."""
        if code < 0 and (text := lib.bl_cuda_text(self.handle, code)) != ffi.NULL:
            raise DriverError(f"CUDA: {ffi.string(text).decode(errors='replace')}")
        return raise_for_status(code)

    def _load(self, facts: core.bl_cuda_facts, path: str | None) -> None:
        """Load the kernels from the cache, or compile them."""
        nvrtc = compiler.find(path, facts.version // 1000)
        architecture = f"sm_{facts.major}{facts.minor}"
        kept = compiler.cubin_path(nvrtc, architecture)
        if kept.exists():
            try:
                self._load_cubin(kept.read_bytes())
            except (DriverError, OSError):  # damaged: compile it again
                pass
            else:
                return
        cubin = nvrtc.compile(architecture)
        try:
            self._load_cubin(cubin)
        except DriverError as error:
            raise EngineUnavailableError(f"the kernels cannot be loaded: {error}") from None
        compiler.keep(kept, cubin)

    def _load_cubin(self, cubin: bytes) -> None:
        self.check(lib.bl_cuda_load(self.handle, cubin))


def _open(library: str, index: int) -> _Opened:
    """Open a GPU. Raises :class:`~beluga.errors.EngineUnavailableError`."""
    fault, handle = ffi.new("char[]", 256), ffi.new("bl_cuda **")
    if lib.bl_cuda_open(library.encode(), index, fault, len(fault), handle) < 0:
        text = ffi.string(fault).decode(errors="replace")
        reason = text if "GPU" in text or not text else f"{_NO_DRIVER}: {text}"
        raise EngineUnavailableError(reason or "out of memory")
    return _Opened(handle[0], lib.bl_cuda_facts_of(handle[0]))
