# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A copy that is part of a CUDA graph, which its owner replays."""

from __future__ import annotations

from beluga.errors import ChecksumError
from beluga.transfer.engines.cuda.launch import Launched
from beluga.transfer.engines.policy import CacheMaintenance
from beluga.transfer.plan.plan import Plan


class CapturedTransfer:
    """A captured copy of a plan.

    The owner of the graph calls :meth:`prepare` before each replay, and :meth:`wait` when the
    replay has ended (after the owner has waited for the stream or an event).

    The tables of the copy exist until the engine is closed, so the graph must not be replayed after
    that. Each replay copies the tables to the GPU again, and moves the same plan.
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
        """Drop this host's cached lines of the pool's bytes, before a replay of a read."""
        if not self._write:
            self._maintenance.before_read(self._plan)

    def done(self) -> bool:
        """Return True: only the owner knows whether a replay has ended."""
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Flush the bytes of a replayed write, or check the checksums of a replayed read.

        Raises :class:`~beluga.errors.ChecksumError`.
        """
        del timeout_s  # the owner has waited already
        if self._write:
            self._maintenance.after_write(self._plan)
            if self._plan.checksums is not None:
                self._plan.checksums[:] = self.launched.sums()
        elif bad_count := self.launched.bad_chunks()[0]:
            raise ChecksumError(f"{bad_count} chunks are not those that were written")
