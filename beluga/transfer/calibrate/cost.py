# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What a copy costs an engine: a line, with a part for each copy, each fragment and each byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from beluga.transfer.engine import Direction


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Nanoseconds to start, for each fragment, and for each byte."""

    start_ns: float
    fragment_ns: float
    byte_ns: float

    def of(self, size: int, fragments: int) -> float:
        """Nanoseconds for ``size`` bytes in ``fragments`` pieces."""
        return self.start_ns + self.fragment_ns * fragments + self.byte_ns * size


Table = Mapping[tuple[str, Direction], Cost]
"""By an engine's name and the direction."""
