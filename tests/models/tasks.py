# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Queues of tasks as a dictionary that is sorted for every call: a model of index/tasks.c."""

from __future__ import annotations

import dataclasses


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
