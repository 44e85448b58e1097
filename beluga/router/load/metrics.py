# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The metrics that a worker publishes, with Dynamo's fields: how they are packed, collected and
expired.

This module does no I/O; the transport calls it and provides ``send``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from beluga.errors import RouterError
from beluga.router.worker import Worker, WorkerMetrics

STALE_S = 10.0  # a worker silent for longer counts as unknown


# Dynamo's publisher sends this first, before its engine has run.
FIRST = WorkerMetrics(0, 1024, 0, 1024, 0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class ActiveLoad:
    """The metrics of current Dynamo workers: the engine's own figures, each of which may be
    missing.
    """

    active_decode_blocks: int | None = None
    active_prefill_tokens: int | None = None
    kv_used_blocks: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Message:
    worker_id: int
    dp_rank: int
    metrics: WorkerMetrics
    active: ActiveLoad | None = None


class MetricsPublisher:
    """A worker's side: it packs what the engine reports and passes it to ``send``. The first
    message is sent at once, so that routers know the worker before it has requests.
    """

    def __init__(self, worker: Worker, send: Callable[[bytes], None]) -> None:
        self._worker = worker
        self._send = send
        self.publish(FIRST)

    def publish(self, metrics: WorkerMetrics, active: ActiveLoad | None = None) -> None:
        import msgspec

        self._send(msgspec.msgpack.encode(_Message(*self._worker, metrics, active)))


class MetricsAggregator:
    """A router's side: the latest metrics of every worker, which expire after ``stale_s``
    seconds.
    """

    def __init__(self, stale_s: float = STALE_S) -> None:
        self._stale_s = stale_s
        self._latest: dict[Worker, tuple[float, WorkerMetrics, ActiveLoad]] = {}

    def receive(self, message: bytes, now: float) -> tuple[Worker, WorkerMetrics]:
        """Take one message. Raises RouterError if it cannot be read."""
        import msgspec

        try:
            found = msgspec.msgpack.decode(message, type=_Message)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise RouterError(f"a worker's metrics cannot be read: {error}") from None
        worker = Worker(found.worker_id, found.dp_rank)
        self._latest[worker] = (now, found.metrics, found.active or ActiveLoad())
        return worker, found.metrics

    def metrics(self, worker: Worker, now: float) -> WorkerMetrics | None:
        """Return a worker's metrics, or None if it has been silent for too long."""
        found = self._fresh(worker, now)
        return found[1] if found else None

    def active(self, worker: Worker, now: float) -> ActiveLoad:
        """Return a worker's active load, which is empty if it has been silent for too long."""
        found = self._fresh(worker, now)
        return found[2] if found else ActiveLoad()

    def stale(self, now: float) -> list[Worker]:
        """Return and forget the workers that have been silent for too long."""
        gone = [worker for worker in self._latest if not self._fresh(worker, now)]
        for worker in gone:
            del self._latest[worker]
        return gone

    def _fresh(self, worker: Worker, now: float) -> tuple[float, WorkerMetrics, ActiveLoad] | None:
        found = self._latest.get(worker)
        return found if found and now - found[0] <= self._stale_s else None
