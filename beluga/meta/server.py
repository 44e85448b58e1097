# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The server with the block index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from beluga._ffi import core, ffi, lib
from beluga.errors import raise_for_status
from beluga.meta.stat import MetaStat
from beluga.rpc import Quota, Server

if TYPE_CHECKING:
    from beluga.pool import Pool


class MetaServer(Server):
    """Serves the calls of the block index (lookup, reserve, commit, abort, release, remove, stat)
    and the program's own handlers.

    :meth:`start` takes over the blocks that earlier servers of the pool committed.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        host: int | None = None,
        declared_gone: bool = False,
        heartbeat_lost_s: float = 5.0,
        quota: Quota | None = None,
    ) -> None:
        self._meta: core.bl_meta | core.Null = ffi.NULL
        super().__init__(
            pool,
            host=host,
            declared_gone=declared_gone,
            heartbeat_lost_s=heartbeat_lost_s,
            quota=quota,
        )
        out = ffi.new("bl_meta **")
        with self._running() as server:
            raise_for_status(lib.bl_meta_create(server, out), "making the block index")
            self._meta = out[0]

    def _take(self, server: core.bl_server) -> None:
        self._pool.raise_for_status(lib.bl_meta_serve(self._meta), "taking the pool over")

    def _destroy(self, server: core.bl_server) -> None:
        super()._destroy(server)
        meta, self._meta = self._meta, ffi.NULL
        lib.bl_meta_destroy(meta)

    def meta_stat(self) -> MetaStat:
        """Return the index's counters. The loop runs meanwhile, so they are not all of one
        instant.
        """
        out = ffi.new("bl_meta_stat *")
        with self._running():
            lib.bl_meta_describe(self._meta, out)
        return MetaStat.of(out)
