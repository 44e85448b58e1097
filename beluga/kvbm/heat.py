# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The heat of keys: how often and how recently they were requested, from 0 to 1."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from beluga.kvbm.state import Key


class Heat:
    """Touch counts that halve every ``half_life_s`` seconds, for at most ``limit`` keys.

    The heat of a key is count / (count + 1): 0.5 after one touch, 0.75 after three in a short time.
    The least recently touched key is dropped first.
    """

    def __init__(
        self,
        limit: int,
        *,
        half_life_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._half_life_s, self._clock = limit, half_life_s, clock
        self._touches: OrderedDict[Key, tuple[float, float]] = OrderedDict()

    def touch(self, keys: Iterable[Key]) -> None:
        """Count one touch of each key."""
        now, touches = self._clock(), self._touches
        for key in keys:
            touches[key] = (self._decayed(key, now) + 1, now)
            touches.move_to_end(key)
        while len(touches) > self._limit:
            touches.popitem(last=False)

    def of(self, key: Key) -> float:
        """Return the heat of a key, from 0 to below 1."""
        count = self._decayed(key, self._clock())
        return count / (count + 1)

    def _decayed(self, key: Key, now: float) -> float:
        count, since = self._touches.get(key, (0.0, now))
        return count * 0.5 ** ((now - since) / self._half_life_s) if count else 0.0
