# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The worker's side, one per rank: executes the scheduler's orders and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from beluga.connectors.connection import Connection
from beluga.connectors.identity import with_weights
from beluga.connectors.vllm.counters import LinkFigures
from beluga.connectors.vllm.loads import Loads
from beluga.connectors.vllm.parts import BlockPart
from beluga.connectors.vllm.saves import Saves
from beluga.connectors.vllm.staging import source_of
from beluga.connectors.vllm.steps import StepReport

if TYPE_CHECKING:
    import logging
    from collections.abc import Sequence

    from beluga.connectors.vllm.counters import ConnectorCounters
    from beluga.connectors.vllm.layout import GroupLayout
    from beluga.connectors.vllm.settings import VllmSettings
    from beluga.connectors.vllm.shards import Shard
    from beluga.connectors.vllm.staging import BlockSource
    from beluga.connectors.vllm.steps import Orders
    from beluga.kvcache import Namespace


class RankWorker:
    """The loads and saves of one rank over one connection. No load waits for a save, and no short
    load for a long one. ``part`` is this rank's part of a block. ``more`` has the layouts of
    further groups of layers, ``shards`` the parts of other engines' blocks that it reads; with
    ``whole`` a request's load fails as a whole.
    """

    def __init__(  # noqa: PLR0913  the last four are keyword-only
        self,
        settings: VllmSettings,
        layout: GroupLayout,
        namespace: Namespace,
        counters: ConnectorCounters,
        logger: logging.Logger,
        *,
        part: BlockPart | None = None,
        more: Sequence[GroupLayout] = (),
        shards: Sequence[Shard] = (),
        whole: bool = False,
    ) -> None:
        self._namespace, self._weights = namespace, ""
        own = part or BlockPart(0, "")
        layouts = (layout, *more, *(shard.pieces for shard in shards))
        self._sources: list[BlockSource] = []

        def source(*, urgent: bool, own_stream: bool) -> BlockSource:
            made = source_of(*layouts, urgent=urgent, own_stream=own_stream, logger=logger)
            self._sources.append(made)
            return made

        self.connection = Connection(
            settings, name="worker", engine="vllm", logger=logger, prefault=True
        )
        figures = LinkFigures(self.connection, counters)
        before = None if settings.load == "async" else source(urgent=True, own_stream=False)
        concurrent = None if settings.load == "sync" else source(urgent=True, own_stream=True)
        readable = all(made.scattered for made in self._sources)
        self.splits = tuple(dict.fromkeys(shard.split for shard in shards)) if readable else ()
        self.loads = Loads(
            self.connection,
            namespace,
            counters,
            figures,
            before=before,
            concurrent=concurrent,
            part=own.number,
            shards=dict(enumerate(shards, 1 + len(more))),
            whole=whole,
        )
        self.saves = Saves(
            source(urgent=False, own_stream=True),
            namespace,
            self.connection,
            counters,
            figures,
            room=settings.save_queue,
            part=own,
        )

    def settle(self) -> None:
        """Wait until the session is attached, or cannot be; see :meth:`Connection.settle`."""
        self.connection.settle()

    def load(self, orders: Orders) -> None:
        """Load before the forward, or concurrently with it."""
        self.identify(orders.weights)
        self.loads.load(orders.loads)

    def save(self, orders: Orders) -> None:
        """Queue hints, and saves after the forward."""
        self.identify(orders.weights)
        self.saves.hint(orders.hints)
        self.saves.order(orders.saves)

    def identify(self, weights: str) -> None:
        """Keep blocks under the identity of the weights. No step has blocks before the scheduler's
        side has this identity.
        """
        if weights and weights != self._weights:
            self._weights = weights
            namespace = with_weights(self._namespace, weights)
            self.loads.identified(namespace)
            self.saves.namespace = namespace

    def preempt(self, orders: Orders) -> None:
        """Cancel saves of preempted requests, before the engine overwrites their blocks."""
        if orders.preempted:
            self.saves.cancel(orders.preempted)

    def report(self) -> StepReport:
        """Return the report since the last call."""
        return StepReport(self.loads.loaded(), self.saves.stored(), ended=self.saves.tickets())

    def close(self) -> None:
        """Finish running work, and end the session."""
        self.loads.close()
        self.saves.close()
        self.connection.close()
        for source in self._sources:
            source.close()
