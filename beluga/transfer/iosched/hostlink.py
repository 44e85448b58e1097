# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The link by which this host reaches a pool: which one it is, and how fast, if nobody says.

One for each adapter and NUMA node, where the devices name theirs; else one for each pool.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from beluga.errors import TransferError
from beluga.transfer.iosched.cost import Speed
from beluga.transfer.iosched.link import Link, LinkSettings

if TYPE_CHECKING:
    from pathlib import Path

    from beluga.pool import Pool

AUTO = "auto"
_CORE_BYTES_PER_S = 32_000_000_000
"""More than a core streams (15 GB/s measured on an EPYC): what is said to be too slow would hold
engines back when nobody else wants the link. How many pieces are under way bounds them instead."""
_CORES_MOST = 16
"""That it takes to fill a host's memory."""
_TAU_NS = 1_000_000
"""Seastar's 5 ms, of a link that is said to be some five times as fast as it turns out to be."""


def host_link(
    pool: Pool, settings: LinkSettings | None = None, *, directory: Path | None = None
) -> Link:
    """This host's link to a pool, which all its processes share. The first one's settings hold;
    None: those of :func:`settings_for`. A pool's own link lies with its lock files, and goes with
    them. Raises TransferError if the shared file is not usable, and a PoolError if that place is
    not."""
    adapters = {device.link for device in pool.devices}
    nodes = {device.node for device in pool.devices}
    adapter = adapters.pop() if len(adapters) == 1 else None
    return Link(
        adapter or f"pool-{pool.id}",
        settings or settings_for(pool),
        node=nodes.pop() if len(nodes) == 1 else None,
        pool=pool,
        directory=directory or (None if adapter else pool.runtime_dir),
    )


def settings_for(pool: Pool) -> LinkSettings:
    """The paper's speeds for CXL memory. Files lie in this host's own memory, which carries reads
    and writes on the same wires: not duplex, as fast as its cores can be at most, and with a piece
    under way for each of them and one more."""
    if all(device.kind == "devdax" for device in pool.devices):
        return LinkSettings()
    cores = min(len(os.sched_getaffinity(0)), _CORES_MOST)
    speed = Speed(cores * _CORE_BYTES_PER_S)
    return LinkSettings(
        read=speed, write=speed, device=None, duplex=False, pieces=cores + 1, tau_ns=_TAU_NS
    )


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
