# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The fleet: the engines of a gateway, which are added and removed at run time without moving
KV.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from beluga.errors import NoWorkersError, RouterError
from beluga.gateway.engine import Engine
from beluga.gateway.settings import MIB, EngineSpec, engine_spec, read_url
from beluga.router import Worker
from beluga.text import read_regular_text

log = logging.getLogger(__name__)


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
            engine.removed = True
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
        wanted, earlier = set(specs), set(before)
        urls = {spec.url for spec in specs}
        for engine in self:
            if engine.spec in earlier - wanted and engine.url not in urls:
                self.drain(engine)
        others = {old.url for old in self if not old.draining and old.spec not in earlier}
        failed = {}
        for spec in specs:
            if spec not in earlier and spec.url not in others:
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
        cards_by_name: dict[str, dict[str, Any]] = {}
        for engine in self:
            cards = {str(card.get("id")): card for card in engine.cards}
            for name in engine.models if engine.serving else ():
                card = {"id": name, "object": "model", "owned_by": "beluga", **cards.get(name, {})}
                cards_by_name.setdefault(name, card)
        return cards_by_name

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


# ---- The workers file


WORKERS_SIZE_MAX = 4 * MIB  # bytes of a workers file
LOOK_INTERVAL_S = 1.0
SETTLED_LOOKS = 3
"""Further reads with the same text after which the writer is assumed to be done."""


class WorkersFile:
    """Applies a file that is read repeatedly: workers added to it join, and removed ones are
    drained. Only workers that came from the file are. A worker whose new settings do not work keeps
    its old ones.

    The file need not be written atomically. A read may find it truncated, because another program
    is rewriting it. So a new complete line counts at once, but removed or changed lines count only
    when the file has been unchanged for ``SETTLED_LOOKS`` reads. A file that is unreadable, invalid
    or has no line changes nothing: the line ``none`` removes all workers.
    """

    def __init__(self, path: Path, fleet: Fleet) -> None:
        self._path = path
        self._fleet = fleet
        self._specs: tuple[EngineSpec, ...] = ()
        self._text = ""
        self._looks = 0  # consecutive reads of the same text
        self._complained = ""

    def read(self) -> None:
        """Read the file and apply it. Raises RouterError."""
        specs = self._wanted()
        failed = self._fleet.follow(specs, self._specs)
        retained = [old for old in self._specs if any(new.url == old.url for new in failed)]
        self._specs = (*(spec for spec in specs if spec not in failed), *retained)
        if failed:
            texts = [f"{spec.url}: {error}" for spec, error in failed.items()]
            raise RouterError(f"{self._path}: {'; '.join(texts)}")

    def _wanted(self) -> tuple[EngineSpec, ...]:
        """Return the workers to follow now. Raises RouterError."""
        text = workers_text(self._path)
        self._looks = self._looks + 1 if text == self._text else 0
        self._text = text
        if not self._specs:  # there are no workers to lose
            return read_workers(text, self._path) or ()
        settled = self._looks >= SETTLED_LOOKS
        # A last line without a line end may be incomplete.
        specs = read_workers(text if settled else text[: text.rfind("\n") + 1], self._path)
        if settled and specs is None:
            raise RouterError(
                f"{self._path} has no worker, so the present ones stay; write the line 'none' to "
                "remove them all"
            )
        if settled and specs is not None:
            return specs
        present = {spec.url for spec in self._specs}
        return (*self._specs, *(spec for spec in specs or () if spec.url not in present))

    async def watch(self) -> None:
        """Read the file repeatedly, forever."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            try:
                self.read()
                self._complained = ""
            except RouterError as error:
                if str(error) != self._complained:
                    log.warning("%s", error)
                self._complained = str(error)


def workers_text(path: Path) -> str:
    """Return the text of a workers file. It is read while requests wait, so a pipe, or a file that
    has no end, is refused. Raises RouterError.
    """
    try:
        return read_regular_text(path, WORKERS_SIZE_MAX)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        mend = "name a file with a worker's URL in each line"
        raise RouterError(f"the workers file {path} cannot be read: {why}; {mend}") from None


def read_workers(text: str, path: Path) -> tuple[EngineSpec, ...] | None:
    """Read the engines in the text of a file. Each line is ``URL [model=NAME]... [events=ENDPOINT
    [replay=ENDPOINT]]...``; a comment starts with ``#``. The single line ``none`` is an empty list.
    Returns None if there is no line at all. Raises RouterError.
    """
    specs: dict[str, EngineSpec] = {}
    none = 0  # line number of "none"
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if words == ["none"]:
            none = number
            continue
        try:
            spec = _spec_of(words)
        except RouterError as error:
            raise RouterError(f"{path}, line {number}: {error}") from None
        if spec.url in specs:
            raise RouterError(f"{path}, line {number}: {spec.url} occurs twice; remove one line")
        specs[spec.url] = spec
    if none and specs:
        raise RouterError(
            f"{path}, line {none}: 'none' cannot be combined with workers; remove one of them"
        )
    return tuple(specs.values()) if specs or none else None


def _spec_of(words: list[str]) -> EngineSpec:
    models: list[str] = []
    feeds: list[tuple[str, str | None]] = []
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key == "model" and value:
            models.append(value)
        elif key == "events" and value:
            feeds.append((value, None))
        elif key == "replay" and value:
            if not feeds or feeds[-1][1] is not None:
                raise RouterError(f"'{word}' must follow the events= that it replays")
            feeds[-1] = (feeds[-1][0], value)
        else:
            raise RouterError(f"'{word}' is not one of model=, events=, replay=")
    return engine_spec(read_url(words[0]), models, feeds)
