# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What an offloading manager says of blocks it is asked about one by one.

The first question about a request is put to the pool for all its blocks from there on, in one call,
and the hits are pinned; the further questions are answered from that. A request's pins go when its
load has ended, when it starts without one, or when it ends. A request that has loaded is not
answered "hit" again until it was preempted: its load may have failed, and would fail again.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from beluga.connectors.vllm.lookups import Lookups
    from beluga.meta import Pins


@dataclasses.dataclass(slots=True)
class Asker:
    """One request."""

    answers: dict[bytes, bool] = dataclasses.field(default_factory=dict)
    pins: list[Pins] = dataclasses.field(default_factory=list)
    loading: bool = False
    loaded: bool = False


class Answers:
    """Of all requests of one scheduler, in its thread. Keys are vLLM's block hashes."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups
        self._askers: dict[str, Asker] = {}

    def digest(self, key: bytes) -> bytes:
        """Under what a block stands in the pool."""
        return self._lookups.named([key])[0]

    def begin(self, request: str) -> Asker:
        """A request that is new to the scheduler."""
        return self._askers.setdefault(request, Asker())

    def ask(self, asker: Asker, key: bytes, following: Iterable[bytes]) -> bool:
        """Whether the pool has a block; ``following`` are those after it, likely to be asked."""
        if asker.loaded:
            return False
        if key not in asker.answers:
            keys = [key, *following]
            hits, pins = self._lookups.pin([self.digest(one) for one in keys])
            if pins is not None:
                asker.pins.append(pins)
            asker.answers |= {one: place < hits for place, one in enumerate(keys)}
        return asker.answers[key]

    def loading(self, asker: Asker) -> None:
        """Its hits are being loaded."""
        asker.loading = asker.loaded = True

    def loaded(self, asker: Asker) -> None:
        """They are, or the load has failed."""
        asker.loading = False
        self._forget(asker)

    def started(self, requests: Iterable[str]) -> None:
        """Requests that the engine computes now: what they did not load they will not."""
        for name in requests:
            if (asker := self._askers.get(name)) is not None:
                self._forget(asker)

    def preempted(self, requests: Iterable[str]) -> None:
        """Requests that will start again, from nothing."""
        for name in requests:
            if (asker := self._askers.get(name)) is not None:
                self._forget(asker)
                asker.loaded = False

    def end(self, request: str) -> None:
        """A request has ended; if it is loading, :meth:`loaded` will be told."""
        asker = self._askers.pop(request, None)
        if asker is not None:
            self._forget(asker)

    def reset(self) -> None:
        """The engine's blocks are worth nothing any more: its weights may have changed."""
        self._lookups.reset()
        for asker in self._askers.values():
            asker.loading = False  # vLLM waits for the loads, and tells nobody
            self._forget(asker)

    def _forget(self, asker: Asker) -> None:
        if asker.loading:
            return
        asker.answers.clear()
        while asker.pins:
            self._lookups.release(asker.pins.pop())
