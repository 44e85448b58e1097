# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Looking after a pool in use: its bytes are read when engines leave the link to it free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from beluga._ffi import core
from beluga.errors import PoolError, TransferError
from beluga.pool import Pool
from beluga.transfer import Place, TransferClass, host_link


@contextmanager
def scrub_leave(pool: Pool) -> Iterator[tuple[core.bl_port | core.Null, int] | None]:
    """The least of classes at this host's link to the pool; None where that cannot be used."""
    try:
        link = host_link(pool)
    except (TransferError, PoolError, OSError):
        yield None
        return
    place = Place(link)
    try:
        with place.using() as port:
            yield port, TransferClass.SCRUB
    finally:
        place.close()
        link.close()
