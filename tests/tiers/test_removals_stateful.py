# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The service of the tiers against a model: puts, removals, gets and restarts in any order, while a
disk and a store fail in any of their operations. Some servers lack one of them. A block has a new
version after each removal. A get returns the last version put since then, or nothing: never one
from before a removal.
"""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from removal_scene import Scene

NAMES = 6
STEPS = 40


class Model:
    """The scene and its invariants."""

    def __init__(self, scene: Scene, dice: random.Random) -> None:
        self.scene, self.dice = scene, dice
        self.version = dict.fromkeys(range(NAMES), 0)
        self.was_put = dict.fromkeys(range(NAMES), False)
        self.actions: list[str] = []

    def step(self) -> None:
        action = self.dice.choices(
            [self.put, self.remove, self.get, self.fault, self.heal, self.evict, self.restart],
            [8, 6, 10, 4, 3, 1, 2],
        )[0]
        self.actions.append(action.__name__)
        action()

    def put(self) -> None:
        name = self.dice.randrange(NAMES)
        if self.scene.put(name, self.version[name]):
            self.was_put[name] = True

    def remove(self) -> None:
        names = self.dice.sample(range(NAMES), self.dice.randint(1, 3))
        self.scene.remove(*names)
        for name in names:
            self.version[name] += 1
            self.was_put[name] = False

    def get(self) -> None:
        name = self.dice.randrange(NAMES)
        found = self.scene.has(name, self.version[name])  # another version fails the test
        assert self.was_put[name] or not found

    def fault(self) -> None:
        store, engine = self.scene.store, self.scene.engine
        assert store is not None
        operation = self.dice.choice(["get", "put", "exists", "delete"])
        match self.dice.randrange(6):
            case 0:
                store.refused.add(operation)
            case 1:
                store.lost.add(operation)
            case 2:
                store.hung.add(operation)
            case 3:
                engine.write_error = self.dice.choice([errno.ENOSPC, errno.EIO])
            case 4:
                engine.sync_error = errno.EIO
            case _:
                engine.hung.add(self.dice.choice(["write", "sync"]))

    def heal(self) -> None:
        assert self.scene.store is not None
        self.scene.store.heal()
        engine = self.scene.engine
        engine.write_error = engine.sync_error = 0
        engine.hung.clear()
        engine.gate.set()

    def evict(self) -> None:
        self.heal()
        self.scene.evict()

    def restart(self) -> None:
        """Replace the server by one that may lack one of the tiers."""
        self.scene.engine.gate.set()
        self.scene.engine.hung.clear()
        self.scene.disk, self.scene.away = self.dice.choice(
            [(True, False), (True, False), (False, False), (True, True)]
        )
        self.scene.restart()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_removed_is_ever_read_again(shm: Path, seed: int) -> None:
    scene = Scene(shm, timeout_s=1.0)
    model = Model(scene, random.Random(seed))
    try:
        for _ in range(STEPS):
            model.step()
        model.heal()
        scene.disk, scene.away = True, False
        scene.restart()
        scene.settle()  # every tier has executed its removals
        for name in range(NAMES):
            assert model.was_put[name] or not scene.has(name, model.version[name])
    finally:
        model.heal()
        scene.close()
