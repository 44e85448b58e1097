# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Select the copy engine of one KVCache and register it with the host's link scheduler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from beluga._ffi import core, ffi
from beluga.transfer.engines.cpu import CpuEngine
from beluga.transfer.iosched.hostlink import host_link
from beluga.transfer.iosched.io_handle import IoHandle, TransferStats
from beluga.transfer.iosched.link import Link, LinkSettings, TransferClass
from beluga.transfer.iosched.scheduled import ScheduledEngine
from beluga.transfer.select.planned import PlannedEngine
from beluga.transfer.select.planner import CPU

if TYPE_CHECKING:
    from beluga.pool import Pool
    from beluga.transfer.engine import CopyEngine, Direction
    from beluga.transfer.select.choice import Chosen

_NO_PLACE = nullcontext(ffi.NULL)


class Selection:
    """The engines of one cache.

    ``link`` is a link, an I/O handle that several caches share, or the settings of this host's link
    to the pool; with None, copies need no admission. ``chosen`` has the engines. ``engine`` and
    ``token_engine`` (for rows of tokens, by ``threads`` if it is the CPU) are used in place of the
    chosen ones. If ``engine`` is None, C copies in the put or get.
    """

    def __init__(  # noqa: PLR0913  all but the first five named
        self,
        pool: Pool,
        link: Link | LinkSettings | IoHandle | None,
        chosen: Chosen,
        read: TransferClass,
        write: TransferClass,
        *,
        threads: int,
    ) -> None:
        self._own_link = host_link(pool, link) if isinstance(link, LinkSettings) else None
        found = self._own_link if isinstance(link, LinkSettings) else link
        self._own_handle = IoHandle(found) if isinstance(found, Link) else None
        self._handle = found if isinstance(found, IoHandle) else self._own_handle
        engine, beside = chosen.engine, dict(chosen.beside)
        if self._handle is not None:
            if engine is not None:
                engine = ScheduledEngine(engine, self._handle, read=read, write=write)
            for name, other in beside.items():
                beside[name] = ScheduledEngine(other, self._handle, read=read, write=write)
        cpu = CpuEngine(pool, threads, handle=self._handle, read=read, write=write)
        self._planned: PlannedEngine | None = None
        if chosen.planner is not None:
            self._planned = PlannedEngine(chosen.planner, {CPU: cpu, **beside})
        self.engine = self._planned or engine
        self.token_engine = cpu if engine is None else engine

    def engine_for(self, direction: Direction, size: int, fragments: int) -> CopyEngine | None:
        """Return the engine that copies ``size`` bytes or less in ``fragments`` pieces; None means
        C.
        """
        planned = self._planned
        if planned and planned.choose(direction, size, fragments) == CPU:
            return None
        return self.engine

    def using(self) -> AbstractContextManager[core.bl_io_queue | core.Null]:
        """Return the I/O queue in which C asks for tokens; NULL if the cache has no link."""
        return _NO_PLACE if self._handle is None else self._handle.using()

    def watch(self) -> None:
        """Warn of copies that took too long."""
        if self._handle is not None:
            self._handle.watch()

    def carried(self, *, own: bool = False) -> dict[TransferClass, TransferStats]:
        """Return what the link admitted so far, by class.

        With ``own``, a handle that was given to the cache does not count.
        """
        handle = self._own_handle if own else self._handle
        return {
            kind: TransferStats() if handle is None else handle.carried(kind)
            for kind in TransferClass
        }

    def close(self) -> None:
        """Close what this has made. No copy is under way, and the engine stays open."""
        if self._own_handle is not None:
            self._own_handle.close()
        if self._own_link is not None:
            self._own_link.close()
