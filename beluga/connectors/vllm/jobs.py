# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An offloading worker's jobs as loads and saves of the connector's worker. A job counts as a
request.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from beluga.connectors.vllm.steps import BlockRange, Orders

if TYPE_CHECKING:
    from collections.abc import Iterable

    from beluga.connectors.vllm.worker import RankWorker

PAUSE_S = 0.001


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A job that has ended: its bytes, and the seconds since it was submitted."""

    job: int
    size: int
    time_s: float


class Jobs:
    """The jobs of a worker, used by the engine's thread only. ``worker`` loads asynchronously.

    Every job ends soon. A save that is impossible is skipped, and :meth:`failed` names the blocks
    of a load that fails. ``timeout_s`` is how long :meth:`wait` waits for saves to end.
    """

    def __init__(self, worker: RankWorker, *, block_size: int, timeout_s: float) -> None:
        self._worker, self._block_size, self._timeout_s = worker, block_size, timeout_s
        self._saves: dict[int, tuple[int, float]] = {}  # bytes, and the time of submission
        self._loads: dict[int, tuple[int, float]] = {}
        self._ended: list[Ended] = []

    def save(self, job: int, block_ids: list[int], digests: bytes) -> None:
        """Queue a save."""
        if self._begin(self._saves, job, block_ids):
            self._worker.save(Orders(saves=[BlockRange(str(job), digests, block_ids)]))

    def load(self, job: int, block_ids: list[int], digests: bytes) -> None:
        """Queue a load."""
        if self._begin(self._loads, job, block_ids):
            self._worker.load(Orders(loads=[BlockRange(str(job), digests, block_ids)]))

    def ended(self) -> list[Ended]:
        """Return the jobs that have ended since the last call. Call this before :meth:`failed`."""
        self._collect()
        ended, self._ended = self._ended, []
        return ended

    def failed(self) -> set[int]:
        """Return the engine's blocks that were not loaded since the last call."""
        return self._worker.loads.failed()

    def wait(self, jobs: Iterable[int]) -> None:
        """Wait until these jobs have ended, because the engine reuses their blocks.

        Saves that take longer than ``timeout_s`` are dropped. Loads always finish: their session's
        timeout limits each.
        """
        wanted = set(jobs)
        deadline = time.perf_counter() + self._timeout_s
        while True:
            self._collect()
            saves = [str(job) for job in wanted if job in self._saves]
            if not saves and not any(job in self._loads for job in wanted):
                return
            if saves and time.perf_counter() > deadline:
                self._worker.saves.cancel(saves)
            else:
                time.sleep(PAUSE_S)

    def close(self) -> None:
        """End the running jobs."""
        self._worker.close()

    def _begin(self, jobs: dict[int, tuple[int, float]], job: int, block_ids: list[int]) -> bool:
        """Register a job. A job without blocks ends at once."""
        if not block_ids:
            self._ended.append(Ended(job, 0, 0.0))
            return False
        jobs[job] = len(block_ids) * self._block_size, time.perf_counter()
        return True

    def _collect(self) -> None:
        saved = self._worker.saves.ended({str(job) for job in self._saves})
        self._end(self._saves, saved)
        self._end(self._loads, self._worker.loads.arrived())
        self._worker.report()  # reports on single blocks, which vLLM does not use here

    def _end(self, jobs: dict[int, tuple[int, float]], ended: set[str]) -> None:
        for job in map(int, ended):
            size, submitted_s = jobs.pop(job)
            self._ended.append(Ended(job, size, time.perf_counter() - submitted_s))
