# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The worker's side, one per rank: executes the scheduler's orders and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from beluga.connectors.connection import Connection
from beluga.connectors.identity import with_weights
from beluga.connectors.vllm.loads import AsyncLoads, Loads, SplitLoads
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

LoadsKind = TypeVar("LoadsKind", bound=Loads)


class RankWorker:
    """The loads and saves of one rank, each kind over its own session, so that no load waits for a
    save, and no short load for a long one. ``part`` is this rank's part of a block.
    ``more`` has the layouts of further groups of layers, ``shards`` the parts of other engines'
    blocks that it reads; with ``whole`` a request's load fails as a whole.
    """

    def __init__(  # noqa: PLR0913  the last three are keyword-only
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
        numbered = dict(enumerate(shards, 1 + len(more)))
        self._connections: list[Connection] = []
        self._sources: list[BlockSource] = []

        def made(kind: type[LoadsKind], name: str) -> LoadsKind:
            connection = Connection(
                settings, name=name, engine="vllm", logger=logger, prefault=True
            )
            concurrent = issubclass(kind, AsyncLoads)
            source = source_of(*layouts, urgent=True, own_stream=concurrent, logger=logger)
            self._connections.append(connection)
            self._sources.append(source)
            return kind(
                source,
                namespace,
                connection,
                counters,
                part=own.number,
                shards=numbered,
                whole=whole,
            )

        self.loads: Loads | SplitLoads
        if settings.load == "auto":
            self.loads = SplitLoads(made(Loads, "loads"), made(AsyncLoads, "loads-beside"))
        else:
            self.loads = made(AsyncLoads if settings.load == "async" else Loads, "loads")
        self.load_connection = self._connections[0]
        readable = all(source.scattered for source in self._sources)
        self.splits = tuple(dict.fromkeys(shard.split for shard in shards)) if readable else ()
        self.save_connection = Connection(
            settings, name="saves", engine="vllm", logger=logger, prefault=settings.saves
        )
        save_source = source_of(*layouts, urgent=False, own_stream=True, logger=logger)
        self.saves = Saves(
            save_source,
            namespace,
            self.save_connection,
            counters,
            room=settings.save_queue,
            part=own,
        )
        self._connections.append(self.save_connection)
        self._sources.append(save_source)

    def settle(self) -> None:
        """Wait until all sessions are attached, or cannot be; see :meth:`Connection.settle`."""
        for connection in self._connections:
            connection.settle()

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
        """Finish running work, and end the sessions."""
        self.loads.close()
        self.saves.close()
        for connection in self._connections:
            connection.close()
        for source in self._sources:
            source.close()
