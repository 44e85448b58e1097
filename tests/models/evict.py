# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A list, coldest first, as the model of csrc/index/evict.h."""

from __future__ import annotations


class Evict:
    def __init__(self) -> None:
        self.order: list[int] = []

    def remove(self, number: int) -> None:
        if number in self.order:
            self.order.remove(number)

    def touch(self, number: int) -> None:
        self.remove(number)
        self.order.append(number)

    def cool(self, number: int) -> None:
        self.remove(number)
        self.order.insert(0, number)
