# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Plain lists and dicts as models of C's structures; each call examines everything."""

import dataclasses
from collections.abc import Sequence
from errno import EAGAIN, EBUSY, EEXIST, EINVAL, ENOENT, ENOSPC

# ---- The policies of csrc/index/evict.h over plain lists, coldest first.


class Lru:
    def __init__(self) -> None:
        self.order: list[int] = []

    def assign(self, number: int, key: int) -> None: ...

    def remove(self, number: int) -> None:
        if number in self.order:
            self.order.remove(number)

    forget = remove

    def touch(self, number: int) -> None:
        self.remove(number)
        self.order.append(number)

    def cool(self, number: int) -> None:
        self.remove(number)
        self.order.insert(0, number)

    def has(self, number: int) -> bool:
        return number in self.order

    def coldest(self) -> int:
        return self.order[0] if self.order else -1


class S3Fifo:
    """``main`` and ``small`` include the pinned blocks."""

    def __init__(self) -> None:
        self.main: list[int] = []
        self.small: list[int] = []
        self.home: dict[int, list[int]] = {}  # the queue of each assigned block
        self.uses: dict[int, int] = {}
        self.keys: dict[int, int] = {}
        self.ghosts: list[int] = []  # keys, the newest last
        self.may_go: set[int] = set()

    def _leave(self, number: int) -> None:
        for queue in (self.main, self.small):
            if number in queue:
                queue.remove(number)
        self.may_go.discard(number)

    def assign(self, number: int, key: int) -> None:
        valid = self.ghosts[-len(self.main + self.small) :] if self.main + self.small else []
        self._leave(number)
        self.home[number] = self.main if key in valid else self.small
        self.uses[number], self.keys[number] = 0, key

    def touch(self, number: int) -> None:
        home = self.home.setdefault(number, self.small)
        if number in home:
            self.uses[number] = min(3, self.uses[number] + 1)
        else:
            home.append(number)
            self.uses.setdefault(number, 0)
        self.may_go.add(number)

    def cool(self, number: int) -> None:
        self._leave(number)
        self.main.insert(0, number)
        self.home[number], self.uses[number] = self.main, 0
        self.may_go.add(number)

    def remove(self, number: int) -> None:
        self.may_go.discard(number)

    def forget(self, number: int) -> None:
        if number in self.small and not self.uses[number]:
            self.ghosts.append(self.keys.get(number, 0))
        self._leave(number)
        for known in (self.home, self.uses, self.keys):
            known.pop(number, None)

    def has(self, number: int) -> bool:
        return number in self.may_go

    def coldest(self) -> int:
        while self.may_go:
            queues = [q for q in (self.main, self.small) if self.may_go & set(q)]
            crowded = len(self.small) * 10 > len(self.main) + len(self.small)
            queue = queues[-1] if crowded else queues[0]
            number = queue[0]
            if number in self.may_go and not self.uses[number]:
                return number
            queue.pop(0)
            if queue is self.small:
                self.uses[number] = 0
            elif number in self.may_go:
                self.uses[number] -= 1
            self.main.append(number)
            self.home[number] = self.main
        return -1


# ---- The choice of csrc/index/order.c over plain lists, for blocks of one size: whose block is
# evicted next.


class Shares:
    """``parts`` has the number of blocks of each share, first that of tenants without a share;
    ``room`` is that of the pool.
    """

    def __init__(self, parts: Sequence[int], room: int) -> None:
        self.parts, self.room = parts, room
        self.orders = [Lru() for _ in parts]
        self.used = [0 for _ in parts]
        self.share: dict[int, int] = {}  # of each block in the pool
        self.evicted = [0 for _ in parts]

    def take(self, number: int, share: int) -> int | None:
        """Add a new block. Returns the block that was evicted for it, if any."""
        victim = None
        if sum(self.used) == self.room:
            victim = self.victim(share)
            self.evicted[self.share[victim]] += 1
            self.leave(victim)
        self.share[number] = share
        self.used[share] += 1
        return victim

    def leave(self, number: int) -> None:
        share = self.share.pop(number)
        self.used[share] -= 1
        self.orders[share].remove(number)

    def touch(self, number: int) -> None:
        self.orders[self.share[number]].touch(number)

    def victim(self, requester: int) -> int:
        excess = [
            self.used[share] + (share == requester) - part for share, part in enumerate(self.parts)
        ]
        over = [share for share in range(len(excess)) if excess[share] > 0]
        for some in over, [requester], range(len(excess)):
            for share in sorted(some, key=lambda one: -excess[one]):
                if self.orders[share].order:
                    return self.orders[share].coldest()
        raise AssertionError("no block may go")


# ---- A list of stripes, each with its extent's first one, as the model of csrc/space/extent.h.


STRIPES_MAX = 64


class Extents:
    def __init__(self, stripe_count: int) -> None:
        self.first: list[int | None] = [None] * stripe_count
        self.generation: dict[int, int] = {}
        self.retired: set[int] = set()
        self.group = 8
        while self.group > 1 and stripe_count < 16 * self.group:
            self.group //= 2

    def open(self, stripe: int, generation: int) -> tuple[int, int] | int:
        if stripe >= len(self.first):
            return -EINVAL
        if self.first[stripe] is not None:
            return -EEXIST
        group = [s for s in range(len(self.first)) if s // self.group == stripe // self.group]
        below = [s for s in group if s < stripe and self.first[s] is not None]
        above = [s for s in group if s > stripe and self.first[s] is not None]
        first = max(below) + 1 if below else group[0]
        end = min(above) if above else group[-1] + 1
        self.make(first, end - first, generation)
        return first, end - first

    def make(self, first: int, count: int, generation: int) -> None:
        self.first[first : first + count] = [first] * count
        self.generation[first] = generation

    def adopt(self, first: int, count: int, generation: int, retired: bool) -> int:
        if not 1 <= count <= STRIPES_MAX or first + count > len(self.first):
            return -EINVAL
        if any(owner is not None for owner in self.first[first : first + count]):
            return -EEXIST
        self.make(first, count, generation)
        self.retired |= {first} if retired else set()
        return 0

    def begins(self, first: int) -> bool:
        return first < len(self.first) and self.first[first] == first

    def close(self, first: int) -> int:
        if not self.begins(first):
            return -EINVAL
        if first in self.retired:
            return -EBUSY
        self.first = [None if owner == first else owner for owner in self.first]
        return 0

    def retire(self, first: int) -> int:
        if not self.begins(first):
            return -EINVAL
        self.retired.add(first)
        return 0

    def views(self) -> list[tuple[int, int, int, int]]:
        firsts = sorted({first for first in self.first if first is not None})
        return [
            (self.generation[f], f, self.first.count(f), int(f in self.retired)) for f in firsts
        ]


# ---- A list of pages as the model of csrc/space/pages.h; each call examines all of them.


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


# ---- A dict as the model of csrc/index/hash.h.


Key = tuple[int, int]


class Index:
    def __init__(self, count_max: int) -> None:
        self.count_max = count_max
        self.block: dict[Key, int] = {}

    def find(self, key: Key) -> int:
        return self.block.get(key, -1)

    def add(self, key: Key, block: int) -> int:
        if key in self.block:
            return -EEXIST
        if len(self.block) == self.count_max:
            return -ENOSPC
        self.block[key] = block
        return 0

    def remove(self, key: Key) -> int:
        return 0 if self.block.pop(key, None) is not None else -ENOENT


# ---- A dict as the model of csrc/index/pins.h.


class Pins:
    def __init__(self, block_count_max: int) -> None:
        self.block_count_max = block_count_max
        self.pins: dict[int, int] = {}

    def add(self, block: int) -> int:
        if block not in self.pins and len(self.pins) == self.block_count_max:
            return -ENOSPC
        self.pins[block] = self.pins.get(block, 0) + 1
        return self.pins[block]

    def remove(self, block: int) -> int:
        if block not in self.pins:
            return -ENOENT
        self.pins[block] -= 1
        return self.pins[block] or self.pins.pop(block)  # popping a zero returns it


# ---- Queues of tasks as a dictionary that is sorted for every call: a model of index/tasks.c.


@dataclasses.dataclass
class Task:
    queue: int
    generation: int
    lane: int | None = None
    until: int = 0
    deliveries: int = 0
    since: int = 0


class Tasks:
    def __init__(self) -> None:
        self.tasks: dict[int, Task] = {}

    def _expire(self, queue: int, now: int) -> None:
        for task in self.tasks.values():
            if task.queue == queue and task.lane is not None and task.until <= now:
                task.lane = None

    def add(self, place: int, queue: int, generation: int, now: int) -> None:
        self.tasks[place] = Task(queue, generation, since=now)

    def remove(self, place: int) -> None:
        del self.tasks[place]

    def waits(self, place: int, now: int) -> bool:
        task = self.tasks[place]
        return task.lane is None or task.until <= now

    def claim(self, queue: int, lane: int, now: int, until: int) -> int:
        self._expire(queue, now)
        waiting = [
            (task.generation, place)
            for place, task in self.tasks.items()
            if task.queue == queue and task.lane is None
        ]
        if not waiting:
            return -1
        place = min(waiting)[1]
        task = self.tasks[place]
        task.lane, task.until = lane, until
        task.deliveries += 1
        return place

    def extend(self, place: int, lane: int, now: int, until: int) -> bool:
        task = self.tasks.get(place)
        if task is None or task.lane != lane or task.until <= now:
            return False
        task.until = until
        if until <= now:
            task.lane = None
        return True

    def lane_gone(self, lane: int) -> None:
        for task in self.tasks.values():
            if task.lane == lane:
                task.lane = None

    def count(self, queue: int, now: int) -> tuple[int, int]:
        self._expire(queue, now)
        lanes = [task.lane for task in self.tasks.values() if task.queue == queue]
        return lanes.count(None), len(lanes) - lanes.count(None)
