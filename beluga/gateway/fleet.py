# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The fleet: the engines of a gateway, which are added and removed at run time without moving
KV.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from beluga.errors import NoWorkersError, RouterError
from beluga.gateway.engine import Engine
from beluga.gateway.settings import EngineSpec
from beluga.router import Worker


class Fleet:
    """Engines by number. Numbers are not reused: an engine that returns is a new worker."""

    def __init__(self) -> None:
        self._engines: dict[int, Engine] = {}
        self._numbers = itertools.count(1)
        self._joined: list[Callable[[Engine], None]] = []
        self._left: list[Callable[[Engine], None]] = []

    def on_change(
        self, *, joined: Callable[[Engine], None], left: Callable[[Engine], None]
    ) -> None:
        """Register callbacks: ``joined`` for each engine added from now on, ``left`` for each
        removed one.
        """
        self._joined.append(joined)
        self._left.append(left)

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    def __len__(self) -> int:
        return len(self._engines)

    def __getitem__(self, number: int) -> Engine:
        """Return an engine. Raises NoWorkersError."""
        try:
            return self._engines[number]
        except KeyError:
            raise NoWorkersError(f"there is no worker {number}") from None

    def add(self, spec: EngineSpec) -> Engine:
        """Add an engine. It gets no requests until a check has passed. Raises RouterError."""
        if any(engine.url == spec.url for engine in self):
            raise RouterError(f"{spec.url} is already a worker; remove it first")
        return self._join(spec)

    def _join(self, spec: EngineSpec) -> Engine:
        engine = Engine(Worker(next(self._numbers)), spec)
        self._engines[engine.worker.worker_id] = engine
        try:
            for joined in self._joined:
                joined(engine)
        except RouterError:
            self.remove(engine)
            raise
        return engine

    def remove(self, engine: Engine) -> None:
        """Remove an engine. Its running requests continue to their end."""
        if self._engines.pop(engine.worker.worker_id, None) is not None:
            engine.gone = True
            for left in self._left:
                left(engine)

    def drain(self, engine: Engine) -> None:
        """Send an engine no more requests, and remove it after its last one."""
        engine.draining = True
        self.settle(engine)

    def settle(self, engine: Engine) -> None:
        """Record that one of its requests has ended."""
        if engine.draining and engine.inflight == 0:
            self.remove(engine)

    def follow(
        self, specs: Sequence[EngineSpec], before: Iterable[EngineSpec]
    ) -> dict[EngineSpec, RouterError]:
        """Apply a changed list of engines: add new ones, and drain removed ones. Returns those that
        cannot be added, with the reason. An engine that existed with other settings then stays.
        """
        wanted, had = set(specs), set(before)
        urls = {spec.url for spec in specs}
        for engine in self:
            if engine.spec in had - wanted and engine.url not in urls:
                self.drain(engine)
        others = {each.url for each in self if not each.draining and each.spec not in had}
        failed = {}
        for spec in specs:
            if spec not in had and spec.url not in others:
                try:
                    self._replace(spec)
                except RouterError as error:
                    failed[spec] = error
        return failed

    def _replace(self, spec: EngineSpec) -> None:
        old = [engine for engine in self if engine.url == spec.url]
        self._join(spec)
        for engine in old:  # the same engine with other settings; its requests continue
            self.remove(engine)

    def models(self) -> dict[str, dict[str, Any]]:
        """Return all models that serving engines list, by name, except those of drained engines."""
        found: dict[str, dict[str, Any]] = {}
        for engine in self:
            cards = {str(card.get("id")): card for card in engine.cards}
            for name in engine.models if engine.serving else ():
                card = {"id": name, "object": "model", "owned_by": "beluga", **cards.get(name, {})}
                found.setdefault(name, card)
        return found

    def is_adapter(self, model: str) -> bool:
        """Return whether a model is an adapter of another one, according to vLLM's list."""
        return any(model in engine.adapters for engine in self)

    def space(self, model: str | None) -> int | None:
        """Return the space of a model's blocks in the pool, or None if no engine has reported
        it.
        """
        spaces = (engine.space for engine in self.serving(model))
        return next((space for space in spaces if space is not None), None)

    def serving(self, model: str | None) -> list[Engine]:
        """Return the engines with this model, in any health. Without a name, return all engines."""
        if model is None:
            return [engine for engine in self if not engine.draining]
        return [engine for engine in self if model in engine.models and not engine.draining]
