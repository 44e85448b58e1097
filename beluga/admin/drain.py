# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Draining: a server refuses new blocks, and completes the work in progress.

A thread waits for the earlier grants, then has the lower tiers save every block that none of them
has. The operator's command polls :meth:`Drain.state` until it is ``done``.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from beluga.errors import BelugaError
from beluga.threads import Thread

if TYPE_CHECKING:
    from beluga.index import IndexServer
    from beluga.tiers import TierService

_LOOK_S = 0.02

log = logging.getLogger(__name__)


class Drain:
    """Drains one server. The service is that of its lower tiers, if it has any."""

    def __init__(self, server: IndexServer, tiers: TierService | None = None) -> None:
        self._server, self._tiers = server, tiers
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._looked = self._missing = 0
        self._done = False
        self._failure = ""

    def begin(self) -> None:
        """Begin to drain; a second call meanwhile has no effect."""
        with self._lock:
            if self._thread is not None:
                return
            self._server.drain()
            self._ending = threading.Event()
            self._looked = self._missing = 0
            self._done, self._failure = False, ""
            self._thread = Thread(
                target=self._run, args=(self._ending,), name="beluga-drain", daemon=True
            )
            self._thread.start()

    def undo(self) -> None:
        """Store new blocks again."""
        with self._lock:
            self._ending.set()
            if self._thread is not None:
                self._thread.join()
            self._thread, self._done = None, False
            self._server.drain(False)

    def state(self) -> dict[str, Any]:
        """Return the progress as JSON. ``writing`` counts the blocks that sessions still write,
        ``dirty`` those not yet offered to the lower tiers, ``looked`` those of ``blocks`` that were
        compared with the tiers, and ``missing`` those of them that no tier has; both are None
        without lower tiers.
        """
        stat = self._server.index_stat()
        below = self._tiers is not None
        return {
            "draining": bool(self._server.stat().draining),
            "done": self._done,
            "writing": stat.grant_count,
            "quarantined_bytes": stat.held_bytes,
            "blocks": stat.block_count,
            "dirty": self._server.lower_stat().dirty_count if below else None,
            "looked": self._looked if below else None,
            "missing": self._missing if below else None,
            "failure": self._failure,
        }

    def _run(self, ending: threading.Event) -> None:
        try:
            while not self._settled():
                if ending.wait(_LOOK_S):
                    return
            if self._tiers is not None:
                for looked, missing in self._tiers.save_missing(ending):
                    self._looked += looked
                    self._missing += missing
            self._done = not ending.is_set()
        except (BelugaError, OSError) as error:  # the server has stopped, or a tier failed
            log.warning("draining: %s", error)
            self._failure = str(error)

    def _settled(self) -> bool:
        """Return whether no block is being written or waits to be offered to a tier."""
        applied = self._server.stat().draining
        writing = self._server.index_stat().grant_count
        dirty = self._server.lower_stat().dirty_count if self._tiers is not None else 0
        return bool(applied) and writing == 0 and dirty == 0
