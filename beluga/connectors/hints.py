# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Hints that a request carries: for how long its blocks are worth keeping.

Clients write hints, so no field is trusted. A malformed hint is ignored as a whole and logged: the
engine has already accepted the request, so a response of 400 is no longer possible, and to fail the
request would cost more than the hint is worth. The server bounds by tenant what hints favor. Two
rules bound the rest:

* A hint lowers the priority only of blocks that the request itself stored. Blocks that it found may
  belong to others: a batch job must not evict the system prompt that it shares with them.
* A hint that favors blocks ends an hour after their last use, unless it names another time, so that
  no client holds a budget forever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from beluga.arguments import short
from beluga.errors import BadTypeError, BadValueError
from beluga.kvcache import hint_level
from beluga.limit import LogLimit, and_more

if TYPE_CHECKING:
    import logging

    from beluga.kvcache import HintResult, KVCache

NAME = "beluga"
"""The name of a hint among a request's other parameters."""

FAVOR_S = 3600.0
"""How long a hint favors blocks after their last use if it names no time."""

TTL_MIN_S, TTL_MAX_S = 1.0, 86400.0


@dataclasses.dataclass(frozen=True, slots=True)
class RequestHint:
    """What a request's hint holds for its blocks, with the names of
    :meth:`beluga.KVCache.hint`. Raises BadTypeError and BadValueError.
    """

    priority: str = "normal"
    ttl: float | None = None
    pin: bool = False
    prefetch: bool = False

    def __post_init__(self) -> None:
        hint_level(self.priority, self.ttl, pin=self.pin)
        if self.ttl is not None and not TTL_MIN_S <= self.ttl <= TTL_MAX_S:
            raise BadValueError(
                f"the ttl of a request's hint is {short(self.ttl)}; give seconds, from "
                f"{TTL_MIN_S:g} to {TTL_MAX_S:g}"
            )
        if not isinstance(self.prefetch, bool):
            raise BadTypeError(f"prefetch is {short(self.prefetch)}; give true or false")

    @property
    def favors(self) -> bool:
        """Whether it keeps blocks for longer."""
        return self.pin or self.priority == "high"

    def for_own(self) -> RequestHint | None:
        """Return the hint for blocks that the request stores; None if it has nothing for them."""
        if self.favors and self.ttl is None:
            return dataclasses.replace(self, ttl=FAVOR_S)
        return self if self.priority != "normal" or self.ttl is not None else None

    def for_hits(self) -> RequestHint | None:
        """Return the hint for blocks that others may have stored: it never lowers a priority."""
        if not self.favors:
            return None
        return dataclasses.replace(self, ttl=max(self.ttl or 0.0, FAVOR_S))

    def give(self, cache: KVCache, digests: Any) -> HintResult:
        """Give this hint to blocks. Raises what :meth:`beluga.KVCache.hint` raises."""
        return cache.hint(digests, priority=self.priority, ttl=self.ttl, pin=self.pin)


NO_HINT = RequestHint()


def read_hint(given: object) -> RequestHint:
    """Return the hint in a client's value. Raises BadTypeError and BadValueError."""
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise BadTypeError(f"a hint is a {kind}; give an object with {', '.join(_FIELDS)}")
    for name, value in given.items():
        if name not in _FIELDS:
            raise BadValueError(f"a hint has the field {name!s:.40}; it has {', '.join(_FIELDS)}")
        # No error shows a value that is large: its text would take the scheduler's time.
        if not isinstance(value, _PLAIN) or (isinstance(value, str) and len(value) > _LENGTH_MAX):
            kind = type(value).__name__
            raise BadTypeError(f"{name} of a hint is a {kind}; give a short text, number or bool")
    return RequestHint(**given)


_PLAIN = (str, int, float, type(None))
_LENGTH_MAX = 40  # characters of a text
_FIELDS = tuple(field.name for field in dataclasses.fields(RequestHint))


class HintReader:
    """Reads hints, and logs those that are malformed. Any thread may use it."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._limit = logger, LogLimit()

    def read(self, given: object) -> RequestHint | None:
        """Return the hint in a client's value, or None if it is malformed."""
        try:
            return read_hint(given)
        except (TypeError, ValueError) as error:  # also of a number too long to be shown
            if (suppressed := self._limit.passes("hint")) is not None:
                self._logger.warning(
                    "beluga: a request's hint is ignored: %s%s", error, and_more(suppressed)
                )
            return None
