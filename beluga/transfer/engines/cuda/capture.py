# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A copy that is part of a CUDA graph, which its owner replays."""

from __future__ import annotations

from beluga.transfer.engines.cuda.launch import Launch
from beluga.transfer.engines.cuda.transfer import refuse_bad
from beluga.transfer.engines.policy import CacheMaintenance


class CapturedTransfer:
    """A captured copy of a plan.

    The owner of the graph calls :meth:`prepare` before each replay, and :meth:`wait` when the
    replay has ended (after the owner has waited for the stream or an event).

    The plan's description exists until the engine is closed, so the graph must not be replayed
    after that. Each replay moves the same plan.
    """

    def __init__(self, maintenance: CacheMaintenance, launch: Launch) -> None:
        self._maintenance, self.launch = maintenance, launch

    def prepare(self) -> None:
        """Drop this host's cached lines of the pool's bytes, before a replay of a read."""
        if not self.launch.write:
            self._maintenance.before_read(self.launch.plan)

    def done(self) -> bool:
        """Return True: only the owner can determine whether a replay has ended."""
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Flush the bytes of a replayed write, or check the checksums of a replayed read.

        Raises :class:`~beluga.errors.ChecksumError`.
        """
        del timeout_s  # the owner has waited already
        if self.launch.write:
            self._maintenance.after_write(self.launch.plan)
        refuse_bad(self.launch.finish(self.launch.plan, 0, len(self.launch.spans)))
