# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Whose blocks a disk has. A disk outlives pools: one in memory that is emulated or volatile is
made anew after each reboot. So a disk belongs to an owner, by default the place of its pool, and a
new pool at this place takes it over. Another owner's disk is refused, since its server may only be
down: what is removed meanwhile would come back with it.

The keys of blocks have the namespace in them, so blocks of a former pool are right for a new one.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from beluga.pool import Pool

NAME_SIZE = 128
"""The bytes that a name has in a disk's header."""
_SHOWN = 64  # characters of a longer name, before its digest


@dataclass(frozen=True, slots=True)
class Owner:
    """An owner's name, and the id of its pool, which may be another one next time. Both are empty
    if nobody owns the disk.
    """

    name: str = ""
    pool: str = ""

    def may_use(self, disk: Owner) -> bool:
        """Return whether this is the owner of a disk, by its name or by its pool."""
        mine, its = ({one.name, one.pool} - {""} for one in (self, disk))
        return not mine or not its or bool(mine & its)


def owner_of(pool: Pool, name: str = "") -> Owner:
    """Return the owner of a pool's disks. Without a name it is named by the pool's place: that of
    its first device, where the next pool will be made.
    """
    first = pool.devices[0]
    place = os.path.realpath(first.path) + (f"@{first.offset}" if first.offset else "")
    return Owner(_short(name or place), pool.id)


def _short(name: str) -> str:
    """Return a name that fits into a disk's header."""
    if len(name.encode(errors="replace")) <= NAME_SIZE:
        return name
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:32]
    return f"{name[:_SHOWN].encode(errors='replace')[:_SHOWN].decode(errors='ignore')}...{digest}"
