# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A copy that became part of a CUDA graph: it runs whenever its owner replays the graph."""

from __future__ import annotations

from beluga.errors import ChecksumError
from beluga.transfer.engines.cuda.launch import Launched
from beluga.transfer.engines.policy import CacheMaintenance
from beluga.transfer.plan.plan import Plan


class CapturedTransfer:
    """Replayed by its owner, who calls :meth:`prepare` before each replay, and :meth:`wait` when
    the replay has ended (the stream or an event was waited for).

    Its tables stay until the engine is closed: the graph must not be replayed after that. Each
    replay copies them to the GPU anew, and moves the same plan.
    """

    def __init__(
        self, plan: Plan, maintenance: CacheMaintenance, launched: Launched, *, write: bool
    ) -> None:
        self._plan, self._maintenance, self.launched, self._write = (
            plan,
            maintenance,
            launched,
            write,
        )

    def prepare(self) -> None:
        """Before a replay of a read: what this host holds of the pool's bytes is dropped."""
        if not self._write:
            self._maintenance.before_read(self._plan)

    def done(self) -> bool:
        """True: whether a replay has ended is its owner's to know."""
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """After a replay has ended: flush what was written, or look at what a read found.

        Raises :class:`~beluga.errors.ChecksumError`.
        """
        del timeout_s  # there is nothing to wait for
        if self._write:
            self._maintenance.after_write(self._plan)
            if self._plan.checksums is not None:
                self._plan.checksums[:] = self.launched.sums()
        elif bad_count := self.launched.bad_chunks()[0]:
            raise ChecksumError(f"{bad_count} chunks are not those that were written")
