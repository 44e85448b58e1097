# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Register the pool's windows with the driver one by one, in the background.

Windows that a copy requested come first, then low offsets, which the allocator fills first. Copies
of a window that cannot be registered always use a bounce buffer.

At the host's cap, no window is registered ahead of need. Once the bounced bytes of a window equal
its size, it replaces the least recently used idle window of this process. Registering a window
costs about as much as bouncing its bytes (0.1 s/GB), so the total cost is at most twice the
optimum.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections.abc import Collection, Mapping
from contextlib import ExitStack

from beluga._ffi import core, ffi, lib
from beluga.errors import TransferError
from beluga.pool import Pool, filesystem
from beluga.threads import Thread
from beluga.transfer.engines.cuda.claims import Claims
from beluga.transfer.engines.cuda.driver import Driver, DriverError
from beluga.transfer.engines.cuda.holds import Hold, Holds, WindowId
from beluga.transfer.engines.cuda.windows import Windows


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
