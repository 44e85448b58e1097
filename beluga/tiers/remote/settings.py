# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The limits of a remote tier."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from beluga.errors import TierError


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """How long and how often a remote tier tries, and how much it does at once."""

    operation_s: float = 1.0
    """How long one operation on one object may take, with its retries."""
    load_s: float = 2.0
    """How long one call of load, contains or remove may take, whatever it asks for."""
    save_s: float = 10.0
    """How long one call of save may take."""
    threads: int | None = None
    """How many operations run at once; None leaves it to the store: 8, or for Valkey and Redis at
    most the number of CPUs. Saves have at most half of them.
    """
    abandoned: int = 16
    """How many threads may hang in a client library, beside those that work."""
    retries: int = 2
    """How often a failed operation is tried again, within operation_s."""
    backoff_s: float = 0.02
    """The mean pause before the first retry; each pause is twice as long as the one before."""
    failures: int = 3
    """How many failures in a row open the breaker."""
    open_s: float = 0.5
    """How long the breaker stays open before the first trial; twice as long after each failure."""
    open_limit_s: float = 15.0
    """The longest time between two trials."""
    block_bytes: int = 256 << 20
    """The largest payload that is saved or loaded."""

    def __post_init__(self) -> None:
        """Raise TierError for a limit that makes no sense."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and each.name == "threads":
                continue
            is_count = each.type != "float"
            least = _LEAST.get(each.name, 1 if is_count else 0)
            kinds = int if is_count else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
                raise TierError(
                    f"the remote tier's {each.name} is {value!r}; give it {least} or more"
                )
            if each.type == "float" and not 0 < value < math.inf:
                raise TierError(
                    f"the remote tier's {each.name} is {value}; give it a positive time"
                )

    @property
    def attempt_s(self) -> float:
        """The timeout that a client library gets. The margin lets it report before its thread is
        abandoned, and leaves time to try again after a connection that broke at once.
        """
        return 0.8 * self.operation_s

    @property
    def object_bytes(self) -> int:
        """The largest object that is read: a block with its header."""
        return self.block_bytes + 64


_LEAST = {"threads": 2, "retries": 0, "abandoned": 0}
