# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The owner of a disk's blocks. A disk outlives pools: a pool in emulated or volatile memory is
created again after each reboot. So a disk belongs to an owner, by default the location of its pool,
and a new pool at this location takes it over. A disk of another owner is refused, because its
server may only be down: blocks that are removed meanwhile would come back with the disk.

Keys include their namespace, so blocks of an earlier pool are correct for a new one.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from beluga.pool import Pool

NAME_SIZE = 128
"""The size of a name in a disk's header, in bytes."""
_SHOWN = 64  # characters of a longer name before its digest


@dataclass(frozen=True, slots=True)
class Owner:
    """An owner's name, and the id of its pool, which may change. Both are empty if the disk has no
    owner.
    """

    name: str = ""
    pool: str = ""

    def may_use(self, disk: Owner) -> bool:
        """Return whether a disk belongs to this owner, by its name or by its pool."""
        mine, its = ({one.name, one.pool} - {""} for one in (self, disk))
        return not mine or not its or bool(mine & its)


def owner_of(pool: Pool, name: str = "") -> Owner:
    """Return the owner of a pool's disks. The default name is the pool's location, that of its
    first device, where the next pool will be created.
    """
    first = pool.devices[0]
    place = os.path.realpath(first.path) + (f"@{first.offset}" if first.offset else "")
    return Owner(_short(name or place), pool.id)


def _short(name: str) -> str:
    """Shorten a name to fit into a disk's header."""
    if len(name.encode(errors="replace")) <= NAME_SIZE:
        return name
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:32]
    return f"{name[:_SHOWN].encode(errors='replace')[:_SHOWN].decode(errors='ignore')}...{digest}"
