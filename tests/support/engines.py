# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The engines that ``test_conformance.py`` tests, and the memory that each of them can address.
Every engine has a line in :data:`ENGINES`, and its tests' names start with its name.
"""

import ctypes
import dataclasses
import itertools
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from beluga_bench.gpu.stub import StandIn, library
from numpy.typing import NDArray
from support.soft_dsa import soft_engine, soft_portal

from beluga import coherence
from beluga._ffi import ffi, lib
from beluga.errors import ChecksumError, EngineUnavailableError, LayoutError
from beluga.pool import Pool
from beluga.transfer import (
    CopyEngine,
    CopySettings,
    CpuEngine,
    DsaEngine,
    IoHandle,
    Link,
    LinkSettings,
    Plan,
    Speed,
)
from beluga.transfer.cuda import CudaDevice, CudaEngine
from beluga.transfer.dsa import nearest, why_none, work_queues
from beluga.transfer.policy import CacheMaintenance, probe

Bytes = NDArray[np.uint8]
ODD = CopySettings(part=64, window=100, step=65, ahead=3, past=0, head=9, direct=1000)


class EngineMemory(Protocol):
    """Memory that an engine can address, exactly as long as its initial bytes."""

    @property
    def address(self) -> int: ...

    def content(self) -> Bytes:
        """Return the present content."""
        ...


class HostMemory:
    """This process's own memory."""

    def __init__(self, content: Bytes) -> None:
        self._array = content.copy()
        self.address = self._array.ctypes.data

    def content(self) -> Bytes:
        return self._array.copy()


@dataclasses.dataclass(frozen=True)
class EngineCase:
    """How one engine is created, and the memory that it copies from and to. ``missing`` is the
    reason why this machine cannot run it, or empty.
    """

    name: str
    make: Callable[[Pool], CopyEngine]
    memory: Callable[[Bytes], EngineMemory] = HostMemory
    missing: Callable[[], str | None] = lambda: None


def pool_bytes(pool: Pool, offset: int, size: int) -> Any:
    """Return a writable view of bytes within one stripe."""
    return ffi.buffer(lib.bl_pool_address(pool.handle, offset), size)


class Ended:
    """A transfer that has already ended."""

    def __init__(self, error: ChecksumError | None = None) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        del timeout_s
        if self._error:
            raise self._error


class ReferenceEngine:
    """Copies piece by piece with simple code: the reference for the other engines."""

    name = "reference"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def gather_write(self, plan: Plan) -> Ended:
        if plan.sparse:
            raise LayoutError("a sparse plan can only be read")
        plan.refuse_beyond(self._pool.geometry.size)
        for address, offset, length, _ in plan.pieces.tolist():
            pool_bytes(self._pool, offset, length)[:] = ctypes.string_at(address, length)
        for index, (offset, length, _) in enumerate(plan.chunks.tolist()):
            blank = -length % 64
            if blank:
                pool_bytes(self._pool, offset + length, blank)[:] = bytes(blank)
            if plan.checksums is not None:
                plan.checksums[index] = self._sum(offset, length)
        return Ended()

    def scatter_read(self, plan: Plan) -> Ended:
        plan.refuse_beyond(self._pool.geometry.size)
        for address, offset, length, _ in plan.pieces.tolist():
            ctypes.memmove(address, bytes(pool_bytes(self._pool, offset, length)), length)
        if plan.checksums is not None:
            sums = [self._sum(offset, length) for offset, length, _ in plan.chunks.tolist()]
            if sums != plan.checksums.tolist():
                return Ended(ChecksumError("bytes that were read are not those that were written"))
        return Ended()

    def close(self) -> None:
        pass

    def _sum(self, offset: int, length: int) -> int:
        return coherence.crc32c(peek(self._pool, offset, length).tobytes())


def peek(pool: Pool, offset: int, size: int) -> Bytes:
    """Return a copy of bytes of the pool."""
    pieces = [bytes(pool_bytes(pool, at, piece)) for at, piece in _stripes(offset, size)]
    return np.frombuffer(b"".join(pieces), np.uint8)


def poke(pool: Pool, offset: int, content: Bytes) -> None:
    """Overwrite bytes of the pool."""
    for at, piece in _stripes(offset, len(content)):
        pool_bytes(pool, at, piece)[:] = content[at - offset : at - offset + piece].tobytes()


def _stripes(offset: int, size: int) -> list[tuple[int, int]]:
    edges = [offset, *range((offset >> 21) + 1 << 21, offset + size, 1 << 21), offset + size]
    return [(at, end - at) for at, end in itertools.pairwise(edges)]


def dsa_missing() -> str | None:
    """Return why there is no DSA here, or None."""
    queues = work_queues()
    return None if nearest(queues, set()) else why_none(queues)


def _kernels_missing() -> str | None:
    """Return why the CUDA kernels cannot be compiled for this CPU."""
    try:
        library()
    except EngineUnavailableError as error:
        return str(error)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class _InRanges(CacheMaintenance):
    """Cache maintenance in ranges of a few KiB."""

    def range_size(self, *, write: bool) -> int:
        del write
        return 6000


def _host_cuda(*, refused: int = 0) -> Callable[[Pool], CopyEngine]:
    """The CUDA engine with the host-compiled kernels and the smallest windows. If one of
    ``refused`` windows cannot be registered, its copies are bounced, and the others are made in
    ranges.
    """

    def make(pool: Pool) -> CopyEngine:
        from support.cuda_gpu import Gpu, refuse  # which need this module

        requested = itertools.count(1)

        def some(size: int) -> None:
            if refused and next(requested) % refused == 0:
                refuse(size)

        safe = probe().row("gpu")
        engine = CudaEngine(
            pool,
            Gpu(some) if refused else StandIn(),
            blocks=2,
            window_size=2 << 20,
            bounce_size=16 << 20,
            maintenance=_InRanges(pool, safe) if refused else None,
        )
        assert engine.settle(60)
        return engine

    return make


class GpuMemory:
    """Memory of the first GPU, or of another one."""

    def __init__(self, content: Bytes, gpu: CudaDevice | None = None) -> None:
        self._gpu = gpu or CudaDevice()
        self._pinned = self._gpu.pin(max(len(content), 1))
        self._size = len(content)
        self.address = self._gpu.allocate(max(self._size, 1))
        self._stream, self._event = self._gpu.make_stream(urgent=True), self._gpu.make_event()
        self.fill(content)

    def fill(self, content: Bytes) -> None:
        """Overwrite it."""
        self._pinned.array[: self._size] = content
        self._copy(self.address, self._pinned.array.ctypes.data)

    def content(self) -> Bytes:
        self._copy(self._pinned.array.ctypes.data, self.address)
        return self._pinned.array[: self._size].copy()

    def _copy(self, target: int, source: int) -> None:
        self._gpu.copy(target, source, self._size, self._stream)
        self._gpu.record(self._event, self._stream)
        self._gpu.wait(self._event)


def _gpu_missing() -> str | None:
    """Return why there is no GPU to use here."""
    try:
        CudaDevice()
    except EngineUnavailableError as error:
        return str(error)
    return None


def _real_cuda(pool: Pool) -> CopyEngine:
    engine = CudaEngine(pool, window_size=2 << 20, bounce_size=16 << 20)
    engine.settle(60)
    return engine


CUDA_ENGINES = (
    EngineCase("cuda", _real_cuda, GpuMemory, missing=_gpu_missing),
    EngineCase("cuda (host-compiled)", _host_cuda(), missing=_kernels_missing),
    EngineCase(
        "cuda (host-compiled), in ranges or bounced",
        _host_cuda(refused=2),
        missing=_kernels_missing,
    ),
)


def _link(name: str, pool: Pool) -> Link:
    """Pieces of 4 KiB, as fast as this machine."""
    speed = Speed(1 << 40)
    settings = LinkSettings(read=speed, write=speed, device=speed, piece_size=4096)
    folder = pool.devices[0].path.parent
    return Link(f"conformance-{name}-{os.getpid()}", settings, pool=pool, directory=folder)


def _linked(pool: Pool, threads: int) -> CopyEngine:
    """The same, by threads that acquire tokens themselves, in the middle of chunks."""
    return CpuEngine(pool, threads, handle=IoHandle(_link(f"cpu-{threads}", pool)))


def stormy_dsa(pool: Pool) -> CopyEngine:
    """The software queue with all kinds of faults at random."""
    kinds = ("full", "fault", "list_fault", "error", "reorder", "late")
    faults = dict.fromkeys(kinds, 6000) | {"seed": 11, "full_run": 3}
    return DsaEngine(pool, soft_portal(faults=faults))


ENGINES: tuple[EngineCase, ...] = (
    EngineCase("reference", ReferenceEngine),
    EngineCase("cpu", lambda pool: CpuEngine(pool, threads=1)),
    EngineCase("cpu-3", lambda pool: CpuEngine(pool, threads=3)),
    EngineCase("cpu-3, oddly set", lambda pool: CpuEngine(pool, 3, settings=ODD)),
    EngineCase("cpu, on a link", lambda pool: _linked(pool, 1)),
    EngineCase("cpu-3, on a link", lambda pool: _linked(pool, 3)),
    EngineCase("dsa-software", soft_engine),
    EngineCase("dsa-stormy", stormy_dsa),
    EngineCase("dsa", DsaEngine, missing=dsa_missing),
    *CUDA_ENGINES,
)
