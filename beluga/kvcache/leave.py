# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A cache's part of the link that its host shares: who copies for it, and with whose leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from beluga._ffi import ffi
from beluga.transfer import (
    Carried,
    CpuEngine,
    Link,
    LinkSettings,
    Place,
    Scheduler,
    TransferClass,
    host_link,
)

if TYPE_CHECKING:
    from beluga.pool import Pool
    from beluga.transfer import Engine


class Leave:
    """``link`` is a link, a place at one that several caches share, or the settings of this host's
    link to the pool; None: nothing is asked. ``engine`` copies, or None: C does, in the put or get.

    ``engine`` and ``token_engine`` (for rows of tokens, by ``threads`` if it is the CPU) are to be
    used instead of the one given.
    """

    def __init__(  # noqa: PLR0913  all but the first five named
        self,
        pool: Pool,
        link: Link | LinkSettings | Place | None,
        engine: Engine | None,
        read: TransferClass,
        write: TransferClass,
        *,
        threads: int,
    ) -> None:
        self._own_link = host_link(pool, link) if isinstance(link, LinkSettings) else None
        self._own_place: Place | None = None
        self._scheduler: Scheduler | None = None
        found = self._own_link if isinstance(link, LinkSettings) else link
        self._place: Place | None = None
        if engine is not None and found is not None:
            self._scheduler = Scheduler(found.link if isinstance(found, Place) else found)
            engine = self._scheduler.engine(engine, read=read, write=write)
        elif isinstance(found, Link):
            self._place = self._own_place = Place(found)
        else:
            self._place = found
        self.engine = engine
        self.token_engine = engine or CpuEngine(
            pool, threads, place=self._place, read=read, write=write
        )

    @property
    def port(self) -> Any:
        """For C to ask for leave; NULL: it need not."""
        return ffi.NULL if self._place is None else self._place.port

    def watch(self) -> None:
        """Warn of copies that took too long."""
        if self._place is not None:
            self._place.watch()

    def carried(self) -> dict[TransferClass, Carried]:
        """What was let onto the link so far, by class."""
        if self._scheduler is not None:
            return self._scheduler.carried()
        if self._place is None:
            return {kind: Carried() for kind in TransferClass}
        return {kind: self._place.carried(kind) for kind in TransferClass}

    def close(self) -> None:
        """Give back what this has made. The engine stays open; nobody copies."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._own_place is not None:
            self._own_place.close()
        if self._own_link is not None:
            self._own_link.close()
