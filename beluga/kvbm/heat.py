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

    def touch(self, keys: Iterable[Key]) -> list[float]:
        """Count one touch of each key. Returns their heat after it."""
        now, touches, half_life_s = self._clock(), self._touches, self._half_life_s
        heat = []
        for key in keys:
            last = touches.pop(key, None)
            count = 1.0 if last is None else last[0] * 0.5 ** ((now - last[1]) / half_life_s) + 1
            touches[key] = (count, now)
            heat.append(count / (count + 1))
        while len(touches) > self._limit:
            touches.popitem(last=False)
        return heat

    def of(self, key: Key) -> float:
        """Return the heat of a key, from 0 to below 1."""
        last = self._touches.get(key)
        if last is None:
            return 0.0
        count: float = last[0] * 0.5 ** ((self._clock() - last[1]) / self._half_life_s)
        return count / (count + 1)
