# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Register the pool with the driver in windows, one by one, in the background.

Each memory device of a pool is divided into windows of equal size, a power of two of stripes. A
piece of a plan lies in one stripe, and so in one window. ``csrc/transfer/spans.c`` computes the GPU
address of each piece from the table of :class:`Windows`.

Windows that a copy requested come first, then low offsets, which the allocator fills first. Copies
of a window that cannot be registered always use a bounce buffer. A transfer holds its windows until
the events of its parts have ended, whether or not a thread waits for them (:class:`Hold`).

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
import fcntl
import itertools
import os
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import core, ffi, lib
from beluga.errors import LayoutError, TransferError
from beluga.pool import STRIPE_SIZE, Pool, filesystem
from beluga.threads import Thread
from beluga.transfer.cuda.driver import Driver, DriverError
from beluga.transfer.plan import Plan

WindowId = tuple[int, int]  # device, window on that device


class Hold:
    """The hold of one transfer. ``addresses`` has the GPU addresses of the windows that are ready.

    It is a context in which the transfer starts; :meth:`until` adds the events of its parts.
    """

    def __init__(self, holds: Holds, driver: Driver, addresses: Mapping[WindowId, int]) -> None:
        self.driver = driver  # the owner of the events
        self.addresses = addresses
        self.events: set[int] = set()
        self.starting = True
        self._holds = holds

    def until(self, event: int) -> None:
        """Keep the windows until the event has ended."""
        with self._holds.lock:
            self.events.add(event)

    def end(self, event: int) -> None:
        """Remove an event that has ended and is about to be freed."""
        with self._holds.lock:
            self.events.discard(event)
            self._holds.forget(self)

    def started(self) -> None:
        """Declare that no further events follow: the hold ends with the last of them."""
        with self._holds.lock:
            self.starting = False
            self._holds.forget(self)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.started()


class Holds:
    """All holds on a pool's windows. ``lock`` guards the holds and the windows."""

    def __init__(self, lock: threading.Condition) -> None:
        self.lock = lock
        self._all: set[Hold] = set()

    def make(self, driver: Driver, addresses: Mapping[WindowId, int]) -> Hold:
        """Make a hold on these windows, for events of ``driver``. The caller holds the lock."""
        hold = Hold(self, driver, addresses)
        self._all.add(hold)
        return hold

    def forget(self, hold: Hold) -> None:
        """Remove a hold without remaining events. The caller holds the lock."""
        if not hold.starting and not hold.events:
            self._all.discard(hold)

    def used(self) -> set[WindowId]:
        """Return the windows in use now. The caller holds the lock."""
        return {place for hold in self._all if self._busy(hold) for place in hold.addresses}

    def _busy(self, hold: Hold) -> bool:
        try:
            return hold.starting or not all(hold.driver.ended(event) for event in hold.events)
        except DriverError:  # the owner gets the error; work may still run
            return True


class Windows:
    """The windows of a pool, of ``size`` bytes.

    ``bases`` has the GPU address of each window, or 0: uint64 of shape (devices, windows). A
    metadata device has a row, too, which no copy uses.
    """

    def __init__(self, pool: Pool, window_size: int) -> None:
        stripes = window_size // STRIPE_SIZE
        if stripes * STRIPE_SIZE != window_size or stripes & (stripes - 1) or stripes == 0:
            raise ValueError(f"a window is a power of two of stripes, not {window_size} bytes")
        self.size = window_size
        count = -(-pool.data_devices[0].stripe_count // stripes)
        self.bases: NDArray[np.uint64] = np.zeros((len(pool.devices), count), np.uint64)
        self._table = ffi.from_buffer("uint64_t[]", self.bases)

    def struct(self, pool: core.bl_pool) -> core.bl_windows:
        """Return the ``bl_windows *`` for C. It is valid while this object and ``pool`` are."""
        return self._struct(pool, self._table)

    def touched(self, pool: Pool, plan: Plan) -> set[WindowId]:
        """Return the windows in which a valid plan's bytes lie.

        Raises :class:`~beluga.errors.LayoutError` if a piece lies in two stripes.
        """
        touched = np.zeros(self.bases.shape, np.uint8)
        with pool.using() as handle:
            code = lib.bl_spans_touch(
                self.struct(handle), plan.struct(), ffi.from_buffer("uint8_t[]", touched)
            )
        if code < 0:
            raise LayoutError("a piece of the plan lies in two stripes; cut it where they end")
        return set(zip(*(column.tolist() for column in np.nonzero(touched)), strict=True))

    def reached(
        self, pool: Pool, plan: Plan, addresses: Mapping[WindowId, int]
    ) -> NDArray[np.bool_]:
        """Return for each chunk of a valid plan whether it lies in windows with an address in
        ``addresses``: shape (chunks,)."""
        bases, found = np.zeros_like(self.bases), np.empty(len(plan.chunks), np.uint8)
        for window, address in addresses.items():
            bases[window] = address
        table, reached = (
            ffi.from_buffer("uint64_t[]", bases),
            ffi.from_buffer("uint8_t[]", found),
        )
        with pool.using() as handle:
            lib.bl_spans_reach(self._struct(handle, table), plan.struct(), reached)
        return found.astype(bool)

    def _struct(self, pool: core.bl_pool, table: core.uint64_p) -> core.bl_windows:
        made = ffi.new("bl_windows *")
        made.pool, made.bases = pool, table
        made.window_count, made.window_shift = self.bases.shape[1], self.size.bit_length() - 1
        return made


class BufferWindows:
    """The one window of a buffer that replaces the pool: its offset 0 is ``address``."""

    def __init__(self, address: int) -> None:
        self._table = ffi.from_buffer("uint64_t[]", np.array([address], np.uint64))
        self.struct = ffi.new("bl_windows *")
        """The ``bl_windows *`` for C, which is valid while this object is."""
        self.struct.bases = self._table


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
class _Range:
    address: int
    size: int


class Registrar:
    """Has the ready windows and their GPU addresses; a thread adds windows until :meth:`close`.

    Several engines may use it (``shared.py``), so it keeps the mapping of its ``pool``, and may
    call a closed ``driver``.
    """

    def __init__(self, driver: Driver, pool: Pool, windows: Windows, claims: Claims) -> None:
        self._driver, self._devices, self._claims = driver, pool.devices, claims
        self.windows = windows
        self._mapped = ExitStack()  # the driver uses the addresses, so they must outlive the pool
        handle = self._mapped.enter_context(pool.using())
        self._bases = [_base(handle, pool, device) for device in range(len(pool.devices))]
        self._data_device = pool.geometry.data_device
        self.ready: dict[WindowId, int] = {}
        self.fault: str | None = None  # the last failure of a window
        self.unregistered_count = 0  # windows that were replaced by others
        self.refused_count = 0  # requested windows beyond the cap
        self._changed = threading.Condition()
        self._holds = Holds(self._changed)
        self._kept: dict[object, set[WindowId]] = {}  # by user, until forget()
        self._uses = itertools.count()
        self._used: dict[WindowId, int] = {}  # the last use of each ready window
        self._missed: dict[WindowId, int] = {}  # bounced bytes
        self._wanted: list[WindowId] = []
        self._refused: set[WindowId] = set()  # windows over the cap, which may replace others
        self._left = self._all(interleaved=bool(pool.geometry.interleaved))
        self._working = False
        self._closing = False
        self._thread = Thread(target=self._run, name="beluga-register", daemon=True)
        self._thread.start()

    def hold(self, places: Collection[WindowId], driver: Driver) -> Hold:
        """Hold the windows that are ready.

        They stay ready until the events of ``driver`` that are added to the hold have ended.
        """
        with self._changed:
            now = next(self._uses)
            found = {place: self.ready[place] for place in places if place in self.ready}
            self._used.update(dict.fromkeys(found, now))
            return self._holds.make(driver, found)

    def keep(self, places: Collection[WindowId], user: object) -> Mapping[WindowId, int]:
        """Keep the windows ready until :meth:`forget`, and return their GPU addresses.

        Raises :class:`~beluga.errors.TransferError` unless all of them are ready now.
        """
        with self._changed:
            if not self.ready.keys() >= set(places):
                raise TransferError(
                    "that part of the pool is not registered yet; call settle() before"
                )
            self._kept.setdefault(user, set()).update(places)
            return {place: self.ready[place] for place in places}

    def forget(self, user: object) -> None:
        """Release the windows that ``user`` keeps."""
        with self._changed:
            self._kept.pop(user, None)

    def bounced(self, places: Collection[WindowId], size: int) -> None:
        """Note that copies of ``size`` bytes bounced because these windows were not ready."""
        with self._changed:
            for place in places:
                self._missed[place] = self._missed.get(place, 0) + size // len(places)
            self._wanted = [
                place
                for place in sorted(places)
                if place in self._left
                or (place in self._refused and self._missed[place] >= self._range(place).size)
            ]
            self._changed.notify_all()

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until all windows that can be registered are; return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._left or self._wanted or self._working), timeout_s
            )

    @property
    def size(self) -> int:
        """Return the bytes that are registered."""
        return sum(self._range(place).size for place in list(self.ready))

    def close(self) -> None:
        """Stop registering, and unregister all windows. No copy is running."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        for place in list(self.ready):
            self._unregister(place)
        self.ready.clear()
        self.windows.bases[:] = 0
        self._claims.close()
        self._mapped.close()

    def _all(self, *, interleaved: bool) -> dict[WindowId, None]:
        """Return every window with data, low offsets first."""
        devices, windows = map(range, self.windows.bases.shape)
        devices = devices[self._data_device :]
        if interleaved:
            return dict.fromkeys((d, w) for w in windows for d in devices)
        return dict.fromkeys((d, w) for d in devices for w in windows)

    def _run(self) -> None:
        try:
            self._driver.use()
            while (found := self._next()) is not None:
                self._register(*found)
        except Exception as error:  # otherwise a copy would wait for a dead thread
            self.fault = f"registering: {error}"
        with self._changed:
            self._left.clear()
            self._wanted.clear()
            self._working = False
            self._changed.notify_all()

    def _next(self) -> tuple[WindowId, bool] | None:
        """Return the next window to register and whether copies requested it, or None at the
        end."""
        with self._changed:
            self._working = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closing or self._left or self._wanted)
            if self._closing:
                return None
            self._working = True
            if self._wanted:
                return self._wanted.pop(0), True
            return next(iter(self._left)), False

    def _register(self, place: WindowId, wanted: bool) -> None:
        if place in self.ready:  # the place was requested during its registration
            return
        span = self._range(place)
        try:
            while not self._registered(place, span):
                if self._missed.get(place, 0) < span.size or not self._unregister_one():
                    self.refused_count += wanted
                    self._stop_filling()
                    return
        except DriverError as error:
            self.fault = f"{error}; {self._advice(place)}"
        with self._changed:
            self._left.pop(place, None)
            self._refused.discard(place)

    def _registered(self, place: WindowId, span: _Range) -> bool:
        """Register a window. Return False if that would exceed the cap."""
        with self._claims.claimed(span.size) as fits:
            if fits:
                self._populate(place, span)
                address = self._driver.register(span.address, span.size)
                with self._changed:
                    self.ready[place] = self.windows.bases[place] = address
                    self._used[place] = next(self._uses)
                    self._missed.pop(place, None)
        return fits

    def _unregister_one(self) -> bool:
        """Unregister the least recently used idle window. Return False if none is idle."""
        with self._changed:
            idle = self.ready.keys() - set().union(*self._kept.values()) - self._holds.used()
            if not idle:
                return False
            place = min(idle, key=self._used.__getitem__)
            del self.ready[place]
            self.windows.bases[place] = 0
        if self._unregister(place):
            self._claims.give_back(self._range(place).size)
            with self._changed:
                self._refused.add(place)
            self.unregistered_count += 1
        return True

    def _unregister(self, place: WindowId) -> bool:
        """Unregister a window. Return False if the driver fails: its memory still counts."""
        try:
            self._driver.unregister(self._range(place).address)
        except DriverError as error:
            self.fault = f"unregistering: {error}"
            return False
        return True

    def _stop_filling(self) -> None:
        self.fault = (
            "this host's processes have registered all the memory that they may; "
            "give the engine a higher cap"
        )
        with self._changed:
            self._refused.update(self._left)
            self._left.clear()

    def _populate(self, place: WindowId, span: _Range) -> None:
        """Fault in pages of files: the driver would do it one by one with its locks held."""
        device = self._devices[place[0]]
        if device.kind == "file" and not device.sparse:
            code = lib.bl_device_populate(ffi.cast("void *", span.address), span.size)
            if code < 0:
                raise DriverError(f"filling {span.size} bytes of memory: {os.strerror(-code)}")

    def _range(self, place: WindowId) -> _Range:
        device, window = place
        start = window * self.windows.size
        size = min(self.windows.size, self._devices[device].size - start)
        return _Range(self._bases[device] + start, size)

    def _advice(self, place: WindowId) -> str:
        device = self._devices[place[0]]
        if device.kind == "devdax":
            return "is the locked-memory limit (ulimit -l) below the pool's size?"
        kind = filesystem(device.path)
        return f"{device.path} is on {kind}: only devdax and memory in /dev/shm can be registered"


def _base(handle: core.bl_pool, pool: Pool, device: int) -> int:
    """Return the address of a device: its superblock's stripe, then its share of the range."""
    address = lib.bl_pool_device(handle, device)
    return int(ffi.cast("uintptr_t", address))


_Key = tuple[int, str, str, str]

_lock = threading.Lock()  # held while a registration ends, before the next one
_there: dict[_Key, tuple[Registrar, set[object]]] = {}


def join(driver: Driver, pool: Pool, user: object, make: Callable[[], Registrar]) -> Registrar:
    """Return this process's registrar of the pool and GPU, made by ``make`` if there is none.

    ``user`` counts as a user until :func:`leave`.
    """
    key = (os.getpid(), driver.name, driver.identity, pool.id)
    with _lock:
        if key not in _there:
            _there[key] = (make(), set())
        registrar, users = _there[key]
        users.add(user)
        return registrar


def leave(registrar: Registrar, user: object) -> None:
    """Remove a user without work in progress. The last one closes the registrar."""
    with _lock:
        registrar.forget(user)
        (key,) = (key for key, (found, _) in _there.items() if found is registrar)
        users = _there[key][1]
        users.discard(user)
        if not users:
            del _there[key]
            registrar.close()
