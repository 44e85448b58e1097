# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A list of pages as the model of csrc/space/pages.h; each call examines all of them."""

from __future__ import annotations

from errno import EAGAIN, EEXIST, EINVAL

PAGE = 4096
STRIPE = 2 << 20
STRIPE_PAGES = STRIPE // PAGE


def rounded(size: int) -> int:
    return -(-size // PAGE) * PAGE


class Pages:
    """Sizes are in pages; places count pages from the first stripe."""

    def __init__(self, stripe_count: int) -> None:
        self.state = ["free"] * (stripe_count * STRIPE_PAGES)
        self.lost: set[int] = set()

    def free(self, page: int) -> bool:
        return self.state[page] == "free" and page // STRIPE_PAGES not in self.lost

    def runs(self) -> list[tuple[int, int]]:
        """Return the start and end of each free run."""
        found, start = [], None
        for page in range(len(self.state) + 1):
            free = page < len(self.state) and self.free(page)
            if free and start is None:
                start = page
            elif not free and start is not None:
                found.append((start, page))
                start = None
        return found

    def find(self, count: int) -> int:
        return next((first for first, end in self.runs() if end - first >= count), -EAGAIN)

    def inside(self, first: int, count: int) -> bool:
        return count > 0 and 0 <= first < len(self.state) and first + count <= len(self.state)

    def take(self, first: int, count: int) -> int:
        if not self.inside(first, count):
            return -EINVAL
        if not all(map(self.free, range(first, first + count))):
            return -EEXIST
        self.state[first : first + count] = ["used"] * count
        return 0

    def turn(self, first: int, count: int, old: str, new: str) -> int:
        if not self.inside(first, count) or set(self.state[first : first + count]) != {old}:
            return -EINVAL
        self.state[first : first + count] = [new] * count
        return 0

    def lose(self, stripe: int) -> None:
        self.lost.add(stripe)

    def hold_free(self, stripe: int) -> None:
        pages = range(stripe * STRIPE_PAGES, (stripe + 1) * STRIPE_PAGES)
        for page in pages if stripe not in self.lost else ():
            self.state[page] = "held" if self.state[page] == "free" else self.state[page]

    def unhold_all(self) -> None:
        self.state = ["free" if state == "held" else state for state in self.state]
