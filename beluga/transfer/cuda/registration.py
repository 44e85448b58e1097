# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Register the pool with the driver in windows, one by one, in the background.

Each memory device of a pool is divided into windows of equal size, a power of two of stripes. A
piece of a plan lies in one stripe, and so in one window. ``csrc/cuda/windows.c`` has their table:
which are ready, which copies need, and which copies hold, until the events of their parts have
ended.

Windows that a copy requested come first, then low offsets, which the allocator fills first. Copies
of a window that cannot be registered always use a bounce buffer.

The driver keeps 16 bytes per 4 KiB page for each process that registers it, in kernel memory, and
registers for one process at a time, with locks that block the CUDA calls of other processes. So the
host has a cap, and processes take turns (:class:`Claims`). At the cap, no window is registered
ahead of need. Once the bounced bytes of a window equal its size, it replaces the least recently
used idle window of this process. Registering a window costs about as much as bouncing its bytes
(0.1 s/GB), so the total cost is at most twice the optimum.

All engines of a process for one pool and one GPU share a registration, so that registered memory
counts once for the cap, although a connector has one engine for loads and one for saves. The
registration ends with the last engine.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import core, ffi, lib
from beluga.pool import STRIPE_SIZE, Pool, filesystem
from beluga.threads import Thread
from beluga.transfer.cuda.device import CudaDevice, DriverError

_SLICE_NS = 100_000_000  # of waiting in C, between which Python handles signals


class Claims:
    """This process's share of ``cap`` bytes, kept in ``folder``."""

    def __init__(self, folder: Path, cap: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._cap = folder, cap
        self._path = folder / f"claim-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        with self._locked("book"):
            self._file: IO[str] = self._path.open("w+", encoding="ascii")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._size = 0

    @contextmanager
    def claimed(self, size: int) -> Iterator[bool]:
        """Wait for this process's turn to register ``size`` bytes; yield False if the cap is
        reached.

        An exception in this context releases the claim.
        """
        with self._locked("turn"):
            with self._locked("book"):
                fits = self._others() + self._size + size <= self._cap
                if fits:
                    self._set(self._size + size)
            try:
                yield fits
            except BaseException:
                if fits:
                    self.give_back(size)
                raise

    def give_back(self, size: int) -> None:
        """Reduce the claim by ``size`` bytes that are not registered any more."""
        with self._locked("book"):
            self._set(self._size - size)

    def close(self) -> None:
        """End the claim, because this process has nothing registered any more."""
        with self._locked("book"):
            self._path.unlink(missing_ok=True)
            self._file.close()

    def _set(self, size: int) -> None:
        self._size = size
        self._file.seek(0)
        self._file.write(f"{size:20d}")
        self._file.flush()

    def _others(self) -> int:
        """Return the bytes that living processes claim, and remove the files of dead ones."""
        total = 0
        for path in self._folder.glob("claim-*"):
            if path == self._path:
                continue
            try:
                with path.open("r+", encoding="ascii") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            except BlockingIOError:
                total += int(path.read_text(encoding="ascii") or 0)
            except FileNotFoundError:
                pass
        return total

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self._folder / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@dataclasses.dataclass(frozen=True, slots=True)
class _Window:
    """The memory of a window, and the index of its memory device."""

    address: int
    size: int
    device: int


class Registrar:
    """Registers the windows of a pool, of ``window_size`` bytes; a thread adds windows until
    :meth:`close`. Several engines use it, so it keeps the mapping of its ``pool``."""

    def __init__(self, gpu: CudaDevice, pool: Pool, window_size: int, claims: Claims) -> None:
        stripes = window_size // STRIPE_SIZE
        if stripes * STRIPE_SIZE != window_size or stripes & (stripes - 1) or stripes == 0:
            raise ValueError(f"a window is a power of two of stripes, not {window_size} bytes")
        self._gpu, self._devices, self._claims = gpu, pool.devices, claims
        self._mapped = ExitStack()  # the driver uses the addresses, so they must outlive the pool
        handle = self._mapped.enter_context(pool.using())
        self.fault: str | None = None  # the last failure of a window
        self.unregistered_count = 0  # windows that were replaced by others
        self.refused_count = 0  # requested windows beyond the cap
        count = -(-pool.data_devices[0].stripe_count // stripes)
        self._window_size = window_size
        self.windows = [
            _Window(_base(handle, number) + start, min(window_size, device.size - start), number)
            for number, device in enumerate(pool.devices)
            for start in range(0, count * window_size, window_size)
        ]
        made = ffi.new("bl_cuda_windows **")
        order = np.arange(len(self.windows), dtype=np.uint32)
        order = order.reshape(-1, count)[pool.geometry.data_device :]
        order = np.ravel(order, "F" if pool.geometry.interleaved else "C")  # low offsets first
        sizes = np.array([max(window.size, 0) for window in self.windows], np.uint64)
        gpu.check(
            lib.bl_cuda_windows_open(
                *(len(pool.devices), count, window_size.bit_length() - 1),
                ffi.from_buffer("uint64_t[]", sizes),
                ffi.from_buffer("uint32_t[]", order),
                *(len(order), made),
            )
        )
        self.handle = ffi.gc(made[0], lib.bl_cuda_windows_free)
        """The ``bl_cuda_windows *`` for C."""
        self.shape = len(pool.devices), count
        """Memory devices, and windows of each."""
        self._thread = Thread(target=self._run, name="beluga-register", daemon=True)
        self._thread.start()

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until all windows that can be registered are; return False after the timeout."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            slice_ns = _SLICE_NS
            if until is not None:
                slice_ns = min(slice_ns, max(int((until - time.monotonic()) * 1e9), 0))
            if lib.bl_cuda_windows_settle(self.handle, slice_ns) != -errno.ETIMEDOUT:
                return True
            if until is not None and time.monotonic() >= until:
                return False

    @property
    def ready(self) -> list[int]:
        """Return the indexes of the registered windows."""
        return [index for index in range(len(self.windows)) if self._at(index).base]

    @property
    def size(self) -> int:
        """Return the bytes that are registered."""
        return sum(self.windows[index].size for index in self.ready)

    @property
    def bases(self) -> NDArray[np.uint64]:
        """The GPU addresses of the registered windows, in ascending order."""
        return np.sort(np.array([self._at(index).base for index in self.ready], np.uint64))

    def struct(self, pool: core.bl_pool) -> core.bl_windows:
        """Return the ``bl_windows *`` for C. It is valid while this object and ``pool`` are."""
        made = ffi.new("bl_windows *")
        made.pool, made.bases = pool, lib.bl_cuda_windows_bases(self.handle)
        made.window_count = self.shape[1]
        made.window_shift = self._window_size.bit_length() - 1
        return made

    def close(self) -> None:
        """Stop registering, and unregister all windows. No copy is running."""
        lib.bl_cuda_windows_stop(self.handle)
        self._thread.join()
        for index in self.ready:
            self._set(index, lib.BL_CUDA_WINDOW_NONE)
            self._unregister(index)
        self._claims.close()
        self._mapped.close()

    def _at(self, index: int) -> core.bl_cuda_window:
        return lib.bl_cuda_windows_at(self.handle, index)

    def _set(self, index: int, state: int, base: int = 0) -> None:
        lib.bl_cuda_windows_set(self.handle, index, state, base)

    def _run(self) -> None:
        requested = ffi.new("uint32_t *")
        try:
            while (index := lib.bl_cuda_windows_next(self.handle, requested)) >= 0:
                self._register(index, bool(requested[0]))
        except Exception as error:
            self.fault = f"registering: {error}"
            lib.bl_cuda_windows_stop(self.handle)  # nobody waits for a dead thread

    def _register(self, index: int, requested: bool) -> None:
        if self._at(index).base:  # it was requested during its registration
            return
        size = self.windows[index].size
        try:
            while not self._registered(index):
                if self._at(index).missed < size or not self._unregister_one():
                    self.refused_count += requested
                    self.fault = (
                        "this host's processes have registered all the memory that they may; "
                        "give the engine a higher cap"
                    )
                    lib.bl_cuda_windows_fill_no_more(self.handle)
                    return
        except DriverError as error:
            self.fault = f"{error}; {self._advice(index)}"
            self._set(index, lib.BL_CUDA_WINDOW_NONE)

    def _registered(self, index: int) -> bool:
        """Register a window. Return False if that would exceed the cap."""
        window = self.windows[index]
        with self._claims.claimed(window.size) as fits:
            if fits:
                self._populate(window)
                base = self._gpu.register(window.address, window.size)
                self._set(index, lib.BL_CUDA_WINDOW_READY, base)
        return fits

    def _unregister_one(self) -> bool:
        """Unregister the least recently used idle window. Return False if none is idle."""
        index = lib.bl_cuda_windows_retire(self.handle)
        if index < 0:
            return False
        if self._unregister(index):
            self._claims.give_back(self.windows[index].size)
            self._set(index, lib.BL_CUDA_WINDOW_REFUSED)
            self.unregistered_count += 1
        return True

    def _unregister(self, index: int) -> bool:
        """Unregister a window. Return False if the driver fails: its memory still counts."""
        try:
            self._gpu.unregister(self.windows[index].address)
        except DriverError as error:
            self.fault = f"unregistering: {error}"
            return False
        return True

    def _populate(self, window: _Window) -> None:
        """Fault in pages of files: the driver would do it one by one with its locks held."""
        device = self._devices[window.device]
        if device.kind == "file" and not device.sparse:
            code = lib.bl_device_populate(ffi.cast("void *", window.address), window.size)
            if code < 0:
                raise DriverError(f"filling {window.size} bytes of memory: {os.strerror(-code)}")

    def _advice(self, index: int) -> str:
        device = self._devices[self.windows[index].device]
        if device.kind == "devdax":
            return "is the locked-memory limit (ulimit -l) below the pool's size?"
        kind = filesystem(device.path)
        return f"{device.path} is on {kind}: only devdax and memory in /dev/shm can be registered"


def _base(handle: core.bl_pool, device: int) -> int:
    """Return the address of a device: its superblock's stripe, then its share of the range."""
    address = lib.bl_pool_device(handle, device)
    return int(ffi.cast("uintptr_t", address))


_Key = tuple[int, str, str, str]

_lock = threading.Lock()  # held while a registration ends, before the next one
_there: dict[_Key, tuple[Registrar, set[object]]] = {}


def join(gpu: CudaDevice, pool: Pool, user: object, make: Callable[[], Registrar]) -> Registrar:
    """Return this process's registrar of the pool and GPU, made by ``make`` if there is none.

    ``user`` counts as a user until :func:`leave`.
    """
    key = (os.getpid(), gpu.name, gpu.identity, pool.id)
    with _lock:
        if key not in _there:
            _there[key] = (make(), set())
        registrar, users = _there[key]
        users.add(user)
        return registrar


def leave(registrar: Registrar, user: object) -> None:
    """Remove a user without work in progress. The last one closes the registrar."""
    with _lock:
        (key,) = (key for key, (found, _) in _there.items() if found is registrar)
        users = _there[key][1]
        users.discard(user)
        if not users:
            del _there[key]
            registrar.close()
