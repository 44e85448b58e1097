# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A clock that a test winds by hand."""

from __future__ import annotations


class Clock:
    """Stands for the module ``time``: passes only when somebody sleeps or a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds
