# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The link by which this host reaches a pool, and its speed if no settings are given.

There is a link for each adapter and NUMA node if the devices specify them, and otherwise one for
each pool.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from beluga.errors import TransferError
from beluga.transfer.iosched.cost import Speed
from beluga.transfer.iosched.link import Link, LinkSettings, link_path

if TYPE_CHECKING:
    from pathlib import Path

    from beluga.pool import Pool

AUTO = "auto"
_CORE_BYTES_PER_S = 32_000_000_000
"""More than one core can stream (measured: 15 GB/s on an EPYC). A link that is declared too slow
would delay engines when nothing else uses it. The number of pieces in flight bounds them instead.
"""
_CORES_MOST = 16
"""The number of cores that saturate a host's memory."""
_TAU_NS = 1_000_000
"""A fifth of Seastar's 5 ms, because the declared speed of the link is some five times the real
one.
"""


def host_link(
    pool: Pool, settings: LinkSettings | None = None, *, directory: Path | None = None
) -> Link:
    """Return this host's link to a pool, which all its processes share.

    The settings of the first process apply; None takes those of :func:`settings_for`. A pool's own
    link lies with its lock files, and is removed with them. Raises TransferError if the shared file
    is unusable, and a PoolError if its directory is.
    """
    name, node, place = _location(pool)
    return Link(
        name, settings or settings_for(pool), node=node, pool=pool, directory=directory or place
    )


def host_link_now(pool: Pool) -> Link | None:
    """Return this host's link to a pool as engines share it now, or None if there is none.

    Unlike :func:`host_link` it creates none, so its caller does not determine the settings of later
    engines.
    """
    name, node, directory = _location(pool)
    return host_link(pool) if link_path(name, node, directory).exists() else None


def _location(pool: Pool) -> tuple[str, int | None, Path | None]:
    """Return the name, the NUMA node and the directory of the link; see :class:`Link`."""
    adapters = {device.link for device in pool.data_devices}
    nodes = {device.node for device in pool.data_devices}
    adapter = adapters.pop() if len(adapters) == 1 else None
    return (
        adapter or f"pool-{pool.id}",
        nodes.pop() if len(nodes) == 1 else None,
        None if adapter else pool.runtime_dir,
    )


def settings_for(pool: Pool) -> LinkSettings:
    """Return the paper's speeds for CXL memory.

    Files lie in this host's own memory, which shares its bandwidth between reads and writes. Their
    link is not duplex, is at most as fast as the host's cores, and has one piece in flight more
    than the host has cores.
    """
    if all(device.kind == "devdax" for device in pool.data_devices):
        return LinkSettings()
    cores = min(len(os.sched_getaffinity(0)), _CORES_MOST)
    speed = Speed(cores * _CORE_BYTES_PER_S)
    return LinkSettings(
        read=speed, write=speed, device=None, duplex=False, pieces=cores + 1, tau_ns=_TAU_NS
    )


def parse_settings(text: str) -> LinkSettings | None:
    """Parse a user's link setting.

    ``auto`` is None; ``20`` means 20 GB/s for reads and writes together, and ``46.2/33`` separate
    speeds of reads and writes. Raises TransferError.
    """
    if text == AUTO:
        return None
    try:
        speeds = [Speed(int(float(part) * 1e9)) for part in text.split("/")]
    except (ValueError, OverflowError) as error:
        raise TransferError(f"{text!r} is not a link speed; use {_FORMS}") from error
    if len(speeds) > 2:
        raise TransferError(f"{text!r} is not a link speed; use {_FORMS}")
    return LinkSettings(
        read=speeds[0],
        write=speeds[-1],
        device=None,
        duplex=len(speeds) == 2,
    )


_FORMS = f"{AUTO}, or GB/s, as 20 or 46.2/33 (reads/writes)"
