# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The cost of a copy is linear: a part for the copy, for each fragment and for each byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from beluga.transfer.engine import Direction


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Nanoseconds for the start of a copy, for each fragment, and for each byte."""

    start_ns: float
    fragment_ns: float
    byte_ns: float

    def of(self, size: int, fragments: int) -> float:
        """Return the nanoseconds for ``size`` bytes in ``fragments`` pieces."""
        return self.start_ns + self.fragment_ns * fragments + self.byte_ns * size


Table = Mapping[tuple[str, Direction], Cost]
"""Costs by the name of an engine and the direction."""
