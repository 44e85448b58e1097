# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The link by which this host reaches a pool: which one it is, and how fast, if nobody says.

One for each adapter and NUMA node, where the devices name theirs; else one for each pool. Devices
that are files lie in this host's own memory: what several threads can copy there is measured, in a
few hundredths of a second, by whoever is first at the link.
"""

from __future__ import annotations

import math
import os
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from beluga._ffi import ffi, lib
from beluga.errors import TransferError
from beluga.transfer.cost import Speed
from beluga.transfer.link import Link, LinkSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from beluga.pool import Pool

AUTO = "auto"
_COPY_SIZE = 8 << 20
_THREADS_MOST = 8
_ROUNDS = 3
_MARGIN = 2
"""How much faster than measured memory is said to be. Too slow a link would hold engines back when
nobody else wants it, for as long as it is used; how many pieces are under way bounds it anyway."""


def host_link(
    pool: Pool, settings: LinkSettings | None = None, *, directory: Path | None = None
) -> Link:
    """This host's link to a pool, which all its processes share. The first one's settings hold;
    None: those of :func:`settings_for`. Raises TransferError if the shared file is not usable."""
    adapters = {device.link for device in pool.devices}
    nodes = {device.node for device in pool.devices}
    adapter = adapters.pop() if len(adapters) == 1 else None
    return Link(
        adapter or f"pool-{pool.id}",
        settings or (lambda: settings_for(pool)),
        node=nodes.pop() if len(nodes) == 1 else None,
        pool=pool,
        directory=directory,
    )


def settings_for(pool: Pool) -> LinkSettings:
    """The paper's speeds for CXL memory; for files, what this host's memory was measured to carry.

    That memory carries reads and writes on the same wires, so it is not duplex; and as many pieces
    may be under way as it takes threads to fill it, and one more.
    """
    if all(device.kind == "devdax" for device in pool.devices):
        return LinkSettings()
    threads = min(len(os.sched_getaffinity(0)), _THREADS_MOST)
    one, all_ = _copied_per_s(1), _copied_per_s(threads)
    speed = Speed(int(_MARGIN * max(one, all_)))
    pieces = max(2, math.ceil(all_ / one) + 1)
    return LinkSettings(read=speed, write=speed, device=None, duplex=False, pieces=pieces)


def settings_said(text: str) -> LinkSettings | None:
    """What a user says of a link in a setting: ``auto`` is None; ``20`` are 20 GB/s for reads and
    writes together, ``46.2/33`` so many for reads and for writes apart. Raises TransferError."""
    if text == AUTO:
        return None
    try:
        speeds = [Speed(int(float(part) * 1e9)) for part in text.split("/")]
    except (ValueError, OverflowError) as error:
        raise TransferError(f"{text!r} is no speed of a link; say {_FORMS}") from error
    if len(speeds) > 2:
        raise TransferError(f"{text!r} is no speed of a link; say {_FORMS}")
    return LinkSettings(
        read=speeds[0],
        write=speeds[-1],
        device=None,
        duplex=len(speeds) == 2,
    )


_FORMS = f"{AUTO}, or GB/s, as 20 or 46.2/33 (reads/writes)"


def _copied_per_s(threads: int) -> float:
    """Bytes per second that so many threads stream from memory to memory; the best of several."""
    pairs = [
        (np.ones(_COPY_SIZE, np.uint8), np.zeros(_COPY_SIZE, np.uint8)) for _ in range(threads)
    ]
    copies = [_copy(target, source) for source, target in pairs]
    best = 0.0
    for _ in range(_ROUNDS):
        others = [threading.Thread(target=copy) for copy in copies[1:]]
        start = time.perf_counter()
        for thread in others:
            thread.start()
        copies[0]()
        for thread in others:
            thread.join()
        best = max(best, threads * _COPY_SIZE / (time.perf_counter() - start))
    return best


def _copy(target: np.ndarray, source: np.ndarray) -> Callable[[], None]:
    into, out_of = ffi.from_buffer("char[]", target), ffi.from_buffer("char[]", source)
    return lambda: lib.bl_ntstore_copy(into, out_of, _COPY_SIZE)
