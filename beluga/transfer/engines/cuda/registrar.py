# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool's windows, registered with the driver one by one, in the background.

Windows that a copy wanted come first, then low offsets, which the allocator fills first. What can
not be registered is left alone: copies of it go through a bounce buffer, for ever.

Where the host's cap is reached nothing more is registered ahead of need. A window that copies have
missed then takes the place of this process's least recently used one that nothing is using, once as
many bytes of it were bounced as it has: to register costs about as much as to bounce those (0.1
s/GB), so windows that take turns cost twice the best that could have been done, at most.
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
from beluga.pool import STRIPE_SIZE, Pool, filesystem
from beluga.transfer.engines.cuda.claims import Claims
from beluga.transfer.engines.cuda.driver import Driver, DriverError
from beluga.transfer.engines.cuda.holds import Hold, Holds, Place
from beluga.transfer.engines.cuda.windows import Windows


@dataclasses.dataclass(frozen=True, slots=True)
class _Range:
    address: int
    size: int


class Registrar:
    """Ready windows and their GPU addresses; a thread makes more of them until :meth:`close`.

    Several engines may use it (``shared.py``): it keeps the mapping of the ``pool`` that it
    was made for, and calls ``driver`` when that is closed too.
    """

    def __init__(self, driver: Driver, pool: Pool, windows: Windows, claims: Claims) -> None:
        self._driver, self._devices, self._claims = driver, pool.devices, claims
        self.windows = windows
        self._mapped = (
            ExitStack()
        )  # the driver has the addresses: they stay when the pool is closed
        handle = self._mapped.enter_context(pool.using())
        self._bases = [_base(handle, windows, device) for device in range(len(pool.devices))]
        self.ready: dict[Place, int] = {}
        self.fault: str | None = None  # why the last window that failed did
        self.unregistered_count = 0  # that made room for others
        self.refused_count = 0  # that were wanted and found no room
        self._changed = threading.Condition()
        self._holds = Holds(self._changed)
        self._kept: dict[object, set[Place]] = {}  # by whom, until he is forgotten
        self._uses = itertools.count()
        self._used: dict[Place, int] = {}  # when last, of those that are ready
        self._missed: dict[Place, int] = {}  # bytes that were bounced
        self._wanted: list[Place] = []
        self._refused: set[Place] = set()  # for want of room; they may take another's place
        self._left = self._all()
        self._working = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="beluga-register", daemon=True)
        self._thread.start()

    def hold(self, places: Collection[Place], driver: Driver) -> Hold:
        """Those of the windows that are ready, which stay so while the hold is in use: until the
        events of ``driver`` that are put in it have ended."""
        with self._changed:
            now = next(self._uses)
            found = {place: self.ready[place] for place in places if place in self.ready}
            self._used.update(dict.fromkeys(found, now))
            return self._holds.make(driver, found)

    def keep(self, places: Collection[Place], user: object) -> Mapping[Place, int]:
        """The windows, ready until :meth:`forget`.

        Raises :class:`~beluga.errors.TransferError` unless all are ready now.
        """
        with self._changed:
            if not self.ready.keys() >= set(places):
                raise TransferError(
                    "that part of the pool is not registered yet; call settle() before"
                )
            self._kept.setdefault(user, set()).update(places)
            return {place: self.ready[place] for place in places}

    def forget(self, user: object) -> None:
        """He keeps no windows any more."""
        with self._changed:
            self._kept.pop(user, None)

    def want(self, places: Collection[Place], size: int) -> None:
        """Copies of ``size`` bytes wait for none of these, but would like them."""
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
        """Wait until nothing is left to register (or can be); whether that was in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._left or self._wanted or self._working), timeout_s
            )

    @property
    def size(self) -> int:
        """Bytes that are registered."""
        return sum(self._range(place).size for place in list(self.ready))

    def close(self) -> None:
        """Register no more, and unregister all: no copy is running."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        for place in list(self.ready):
            self._unregister(place)
        self.ready.clear()
        self._claims.close()
        self._mapped.close()

    def _all(self) -> dict[Place, None]:
        """Every window, low offsets first."""
        stripes = self._devices[0].stripe_count
        count = -(-stripes // (1 << self.windows.shift))
        devices = range(self.windows.device_count)
        if self.windows.interleaved:
            return dict.fromkeys((d, w) for w in range(count) for d in devices)
        return dict.fromkeys((d, w) for d in devices for w in range(count))

    def _run(self) -> None:
        try:
            self._driver.use()
            while (found := self._next()) is not None:
                self._register(*found)
        except Exception as error:  # a copy must not wait for a thread that is no more
            self.fault = f"registering: {error}"
        with self._changed:
            self._left.clear()
            self._wanted.clear()
            self._working = False
            self._changed.notify_all()

    def _next(self) -> tuple[Place, bool] | None:
        """The next window to register, and whether copies want it; None at the end."""
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

    def _register(self, place: Place, wanted: bool) -> None:
        if place in self.ready:  # it was wanted while it was being registered
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

    def _registered(self, place: Place, span: _Range) -> bool:
        """False where the cap leaves no room for it."""
        with self._claims.claimed(span.size) as fits:
            if fits:
                self._populate(place, span)
                address = self._driver.register(span.address, span.size)
                with self._changed:
                    self.ready[place] = address
                    self._used[place] = next(self._uses)
                    self._missed.pop(place, None)
        return fits

    def _unregister_one(self) -> bool:
        """The window that was not used for longest, of those that nothing uses; False: none."""
        with self._changed:
            idle = self.ready.keys() - set().union(*self._kept.values()) - self._holds.used()
            if not idle:
                return False
            place = min(idle, key=self._used.__getitem__)
            del self.ready[place]
        if self._unregister(place):
            self._claims.give_back(self._range(place).size)
            with self._changed:
                self._refused.add(place)
            self.unregistered_count += 1
        return True

    def _unregister(self, place: Place) -> bool:
        """False if the driver fails: then the memory counts as registered, and is used no more."""
        try:
            self._driver.unregister(self._range(place).address)
        except DriverError as error:
            self.fault = f"unregistering: {error}"
            return False
        return True

    def _stop_filling(self) -> None:
        self.fault = (
            "this host's processes have as much memory registered as they may; "
            "give the engine a higher cap"
        )
        with self._changed:
            self._refused.update(self._left)
            self._left.clear()

    def _populate(self, place: Place, span: _Range) -> None:
        """Fault files in first: the driver would do it page by page, with its locks held."""
        device = self._devices[place[0]]
        if device.kind == "file" and not device.sparse:
            code = lib.bl_device_populate(ffi.cast("void *", span.address), span.size)
            if code < 0:
                raise DriverError(f"filling {span.size} bytes of memory: {os.strerror(-code)}")

    def _range(self, place: Place) -> _Range:
        device, window = place
        start = window * self.windows.size
        size = min(self.windows.size, self._devices[device].size - start)
        return _Range(self._bases[device] + start, size)

    def _advice(self, place: Place) -> str:
        device = self._devices[place[0]]
        if device.kind == "devdax":
            return "is the locked-memory limit (ulimit -l) below the pool's size?"
        kind = filesystem(device.path)
        return f"{device.path} is on {kind}: only devdax and memory in /dev/shm can be registered"


def _base(pool: core.bl_pool, windows: Windows, device: int) -> int:
    """Where a device is mapped: its superblock's stripe, then its share of the range."""
    stripes = device if windows.interleaved else device * windows.device_stripes
    address = lib.bl_pool_address(pool, stripes * STRIPE_SIZE)
    return int(ffi.cast("uintptr_t", address)) - STRIPE_SIZE
