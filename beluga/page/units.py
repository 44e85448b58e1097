# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Numbers for display: three digits and a unit."""

from __future__ import annotations

_TIMES = ((60.0, 60.0, "min"), (1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (1e-6, 1e-6, "us"))
# The least values of each unit: 9,999 is as readable as 10 k.
_LARGE = ((1e12, 1e12, " T"), (1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k"))


def plain(value: float) -> str:
    """Show three digits, or all that a number has before its point: 0.0123, 1.5, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def seconds(value: float) -> str:
    """Show a time in the largest unit of which it has at least one: 2.3 min, 1.4 s, 81 us."""
    if value <= 0:
        return "0 s"
    for least, scale, unit in _TIMES:
        # Two minutes and more are minutes; 90 s is easier to compare with other seconds.
        if value >= least * (2 if unit == "min" else 0.9995):
            return f"{plain(value / scale)} {unit}"
    return f"{plain(value / 1e-9)} ns"


def quantity(value: float, unit: str) -> str:
    """Show a large number by its thousands, millions and so on: 29 M/s, 1.25 G tokens, 12."""
    for least, scale, prefix in _LARGE:
        if abs(value) >= least:
            return f"{plain(value / scale)}{prefix}{' ' if unit[:1].isalpha() else ''}{unit}"
    return f"{plain(value)}{' ' if unit[:1].isalpha() else ''}{unit}"


def percent(value: float) -> str:
    """Show a share: 0.123 is 12.3 %."""
    return f"{100 * value:.3g} %"
