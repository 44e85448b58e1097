# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An offloading manager's answers for blocks that vLLM asks about one by one.

The first question about a request looks up all its blocks from there on in one call, and pins the
hits; later questions are answered from the result. A request's pins are dropped when its load has
ended, when it starts without a load, or when it ends. A request that has loaded gets no hit again
until it was preempted: its load may have failed, and would fail again.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from beluga.connectors.vllm.onboarding import LookupWait

if TYPE_CHECKING:
    from collections.abc import Iterable

    from beluga.connectors.vllm.lookups import Lookups
    from beluga.index import Pins


@dataclasses.dataclass(slots=True)
class Asker:
    """The answers and pins of one request."""

    answers: dict[bytes, bool] = dataclasses.field(default_factory=dict)
    pins: list[Pins] = dataclasses.field(default_factory=list)
    onboarding: LookupWait | None = None  # while blocks may come from below the pool
    loading: bool = False
    loaded: bool = False


class Answers:
    """The answers for all requests of one scheduler, in its thread. Keys are vLLM's block
    hashes.
    """

    def __init__(self, lookups: Lookups, onboard_s: float = 0) -> None:
        self._lookups, self._onboard_s = lookups, onboard_s
        self._askers: dict[str, Asker] = {}

    def digest(self, key: bytes) -> bytes:
        """Return the digest that names a block in the pool."""
        return self._lookups.named([key])[0]

    def begin(self, request: str) -> Asker:
        """Begin a request that is new to the scheduler."""
        return self._askers.setdefault(request, Asker())

    def ask(self, asker: Asker, key: bytes, following: Iterable[bytes]) -> bool | None:
        """Return whether the pool has a block; None if it is on its way there. ``following`` are
        the next blocks, which are likely asked for.
        """
        if asker.loaded:
            return False
        if key not in asker.answers:
            keys = [key, *following]
            digests = [self.digest(one) for one in keys]
            hits, pins = self._lookups.pin(digests)
            if asker.onboarding is None:
                asker.onboarding = LookupWait(self._lookups, self._onboard_s)
            if asker.onboarding.waits(pins, hits, lambda: digests[hits:]):
                self._lookups.release(pins)
                return None
            asker.onboarding = None
            if pins is not None:
                asker.pins.append(pins)
            asker.answers |= {one: place < hits for place, one in enumerate(keys)}
        return asker.answers[key]

    def loading(self, asker: Asker) -> None:
        """Note that the request's hits are being loaded."""
        asker.loading = asker.loaded = True

    def loaded(self, asker: Asker) -> None:
        """Note that the load has ended, whether or not it succeeded."""
        asker.loading = False
        self._forget(asker)

    def started(self, requests: Iterable[str]) -> None:
        """Note requests that the engine computes now. They load nothing more."""
        for name in requests:
            if (asker := self._askers.get(name)) is not None:
                self._forget(asker)

    def preempted(self, requests: Iterable[str]) -> None:
        """Note requests that will start again without any blocks."""
        for name in requests:
            if (asker := self._askers.get(name)) is not None:
                self._forget(asker)
                asker.loaded = False

    def end(self, request: str) -> None:
        """Note that a request has ended. If it is loading, :meth:`loaded` follows."""
        asker = self._askers.pop(request, None)
        if asker is not None:
            self._forget(asker)

    def reset(self) -> None:
        """Forget all answers: the engine's weights may have changed."""
        self._lookups.reset()
        self.forget()

    def forget(self) -> None:
        """Forget all answers, and release their pins."""
        for asker in self._askers.values():
            asker.loading = False  # vLLM waits for the loads without a notification
            self._forget(asker)

    def _forget(self, asker: Asker) -> None:
        if asker.loading:
            return
        asker.answers.clear()
        while asker.pins:
            self._lookups.release(asker.pins.pop())
