# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The map of the devices. The interval between updates bounds the CPU time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from beluga.live.snapshot import CellState, DeviceFacts
from beluga.pool import STRIPE_SIZE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from beluga.index import IndexServer
    from beluga.pool import DeviceView, Pool

CELLS_MAX = 4096  # per device
_CELLS_ALL = 8192  # all devices together
_COST_SHARE = 0.002  # fraction of a core
_FILL_MAX = 255


class SpaceMap:
    """Draws the devices of a server's pool."""

    def __init__(self, server: IndexServer, pool: Pool) -> None:
        self._server, self._pool = server, pool
        devices = len(pool.devices)
        rows = max(device.stripe_count - 1 for device in pool.devices)
        self.cell_count = min(rows, CELLS_MAX, max(_CELLS_ALL // devices, 64))
        self._drawn: tuple[DeviceFacts, ...] = ()
        self._due_s = 0.0

    def devices(self) -> tuple[DeviceFacts, ...]:
        """Return the devices; their maps may be some seconds old where pools are large."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return self._drawn
        started_s = time.thread_time()
        cells = self._server.space_map(self.cell_count)
        self._drawn = tuple(
            _draw(device, cells[device.index][: device.stripe_count - 1])
            for device in self._pool.devices
        )
        self._due_s = now_s + (time.thread_time() - started_s) / _COST_SHARE
        return self._drawn


def _draw(device: DeviceView, cells: NDArray[np.void]) -> DeviceFacts:
    """Return a device and its map."""
    space = np.maximum(cells["stripe_count"].astype(np.int64) * STRIPE_SIZE, 1)
    fill = np.minimum(cells["used_bytes"] * _FILL_MAX // space, _FILL_MAX).astype(np.uint8)
    states = np.full(len(cells), CellState.FREE, np.uint8)
    states[cells["used_bytes"] > 0] = CellState.USED
    states[cells["kept_count"] > 0] = CellState.KEPT
    states[cells["table_count"] * 2 > cells["stripe_count"]] = CellState.TABLES
    states[cells["held_bytes"] > 0] = CellState.QUARANTINED
    states[cells["retired_count"] > 0] = CellState.RETIRED
    return DeviceFacts(
        path=str(device.path),
        bytes=device.size,
        used_bytes=int(cells["used_bytes"].sum()),
        free_bytes=int(cells["free_count"].sum()) * STRIPE_SIZE,
        table_bytes=int(cells["table_count"].sum()) * STRIPE_SIZE,
        quarantined_bytes=int(cells["held_bytes"].sum()),
        retired_bytes=int(cells["retired_count"].sum()) * STRIPE_SIZE,
        cell_bytes=-(-(device.stripe_count - 1) // len(cells)) * STRIPE_SIZE,
        states=(states + ord("0")).tobytes().decode("ascii"),
        fill=fill.tobytes().hex(),
    )
