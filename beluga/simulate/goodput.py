# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The load that a cluster sustains within an objective."""

from __future__ import annotations

from collections.abc import Sequence


def goodput(points: Sequence[tuple[float, float]], objective_s: float) -> float | None:
    """Return the highest load at which the time to first token meets the objective. The points are
    loads with the times at them; between these it is interpolated. None: not even the lowest load
    meets it.
    """
    held: tuple[float, float] | None = None
    for load, time_s in sorted(points):
        if time_s > objective_s:
            if held is None:
                return None
            part = (objective_s - held[1]) / (time_s - held[1])
            return held[0] + part * (load - held[0])
        held = (load, time_s)
    return held[0] if held else None
