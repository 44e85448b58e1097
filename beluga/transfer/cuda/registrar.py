# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool's windows, registered with the driver one by one, in the background.

Windows that a copy wanted come first, then low offsets, which the allocator fills first. What can
not be registered is left alone: copies of it go through a bounce buffer, for ever.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable

from beluga._ffi import ffi, lib
from beluga.pool import STRIPE_SIZE, Pool, filesystem
from beluga.transfer.cuda.claims import Claims
from beluga.transfer.cuda.driver import Driver, DriverError
from beluga.transfer.cuda.windows import Windows

Place = tuple[int, int]  # device, window on that device


@dataclasses.dataclass(frozen=True, slots=True)
class _Range:
    address: int
    size: int


class Registrar:
    """Ready windows and their GPU addresses; a thread makes more of them until :meth:`close`."""

    def __init__(self, driver: Driver, pool: Pool, windows: Windows, claims: Claims) -> None:
        self._driver, self._pool, self._windows, self._claims = driver, pool, windows, claims
        self.ready: dict[Place, int] = {}  # only added to, until the end
        self.fault: str | None = None  # why the last window that failed did
        self._changed = threading.Condition()
        self._wanted: list[Place] = []
        self._left = self._all()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="beluga-register", daemon=True)
        self._thread.start()

    def want(self, places: Iterable[Place]) -> None:
        """Copies wait for none of these, but would like them."""
        with self._changed:
            self._wanted = [place for place in sorted(places) if place in self._left]

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to register (or can be); whether that was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._left, timeout_s)

    @property
    def size(self) -> int:
        """Bytes that are registered."""
        return sum(self._range(place).size for place in list(self.ready))

    def close(self) -> None:
        """Register no more, and unregister all: no copy is running."""
        with self._changed:
            self._closing = True
        self._thread.join()
        for place in list(self.ready):
            self._driver.unregister(self._range(place).address)
        self.ready.clear()
        self._claims.close()

    def _all(self) -> dict[Place, None]:
        """Every window, low offsets first."""
        stripes = self._pool.devices[0].stripe_count
        count = -(-stripes // (1 << self._windows.shift))
        devices = range(self._windows.device_count)
        if self._windows.interleaved:
            return dict.fromkeys((d, w) for w in range(count) for d in devices)
        return dict.fromkeys((d, w) for d in devices for w in range(count))

    def _run(self) -> None:
        try:
            self._driver.use()
            self._register_all()
        except Exception as error:  # a copy must not wait for a thread that is no more
            self.fault = f"registering: {error}"
        with self._changed:
            self._left.clear()
            self._changed.notify_all()

    def _register_all(self) -> None:
        while True:
            with self._changed:
                if self._closing or not self._left:
                    return
                place = self._wanted.pop(0) if self._wanted else next(iter(self._left))
            more = self._register(place)
            with self._changed:
                if not more:
                    return
                self._left.pop(place, None)

    def _register(self, place: Place) -> bool:
        """Whether others are worth trying."""
        span = self._range(place)
        try:
            with self._claims.claimed(span.size) as fits:
                if not fits:
                    self.fault = (
                        "this host's processes have as much memory registered as they may; "
                        "give the engine a higher cap"
                    )
                    return False
                self._populate(place, span)
                self.ready[place] = self._driver.register(span.address, span.size)
        except DriverError as error:
            self.fault = f"{error}; {self._advice(place)}"
        return True

    def _populate(self, place: Place, span: _Range) -> None:
        """Fault files in first: the driver would do it page by page, with its locks held."""
        device = self._pool.devices[place[0]]
        if device.kind == "file" and not device.sparse:
            code = lib.bl_device_populate(ffi.cast("void *", span.address), span.size)
            if code < 0:
                raise DriverError(f"filling {span.size} bytes of memory: {os.strerror(-code)}")

    def _range(self, place: Place) -> _Range:
        device, window = place
        start = window * self._windows.size
        size = min(self._windows.size, self._pool.devices[device].size - start)
        return _Range(self._base(device) + start, size)

    def _base(self, device: int) -> int:
        """Where the device is mapped: its superblock's stripe, then its share of the range."""
        stripes = device if self._windows.interleaved else device * self._windows.device_stripes
        address = lib.bl_pool_address(self._pool.handle, stripes * STRIPE_SIZE)
        return int(ffi.cast("uintptr_t", address)) - STRIPE_SIZE

    def _advice(self, place: Place) -> str:
        device = self._pool.devices[place[0]]
        if device.kind == "devdax":
            return "is the locked-memory limit (ulimit -l) below the pool's size?"
        kind = filesystem(device.path)
        return f"{device.path} is on {kind}: only devdax and memory in /dev/shm can be registered"
