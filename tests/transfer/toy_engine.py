# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A copy engine that a contributor might add: a module with the engine, and its registry entry."""

from __future__ import annotations

from beluga.errors import TransferError
from beluga.pool import Pool
from beluga.transfer import CpuEngine, EngineEntry, Plan, Transfer


class ToyEngine:
    """Copies with the CPU, and counts its calls: the tests check how it is found, not how it
    copies.
    """

    name = "toy"

    def __init__(self, pool: Pool) -> None:
        self._copies = CpuEngine(pool, 1)
        self.written = self.read = 0
        self.is_open = True

    def gather_write(self, plan: Plan) -> Transfer:
        self._refuse_closed()
        self.written += plan.size
        return self._copies.gather_write(plan)

    def scatter_read(self, plan: Plan) -> Transfer:
        self._refuse_closed()
        self.read += plan.size
        return self._copies.scatter_read(plan)

    def close(self) -> None:
        self.is_open = False

    def _refuse_closed(self) -> None:
        if not self.is_open:
            raise TransferError("the toy is closed")


ENTRY = EngineEntry(name="toy", open=lambda pool, threads: ToyEngine(pool))
