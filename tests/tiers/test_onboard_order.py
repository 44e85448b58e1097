# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The order of onboarding: no request waits for all blocks of another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from removal_scene import LENGTH, FaultyStore, Scene, content, digest
from support.blocks import eventually

from beluga import KVCache

COLD = 8192  # keys of a long prompt that no tier has


class CountingStore(FaultyStore):
    """Counts the objects that are requested; ``first`` is set by the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.requested: list[str] = []
        self.first = threading.Event()
        self.passes = threading.Semaphore(0)  # gets that may complete while `slow`
        self.slow = False

    def get(self, name: str) -> bytes | None:
        self.requested.append(name)
        self.first.set()
        if self.slow:
            self.passes.acquire()
        return super().get(name)


@pytest.fixture
def make(shm: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def scene(**options: object) -> Scene:
        made.append(Scene(shm, make_store=CountingStore, **options))
        return made[-1]

    yield scene
    for each in made:
        assert isinstance(each.store, CountingStore)
        each.store.slow = False
        each.store.passes.release(100_000)
        each.close()


def cold(scene: Scene, name: str, count: int = COLD) -> int:
    with KVCache(scene.pool, namespace="test") as other:
        return other.onboard([digest((name, number)) for number in range(count)])


def put_below(scene: Scene, names: list[str]) -> None:
    """Put blocks and evict them, so that only lower tiers have them."""
    for name in names:
        scene.put_surely(name, 0)
    scene.offered()
    scene.evict()


@pytest.mark.parametrize("disk", [True, False])
def test_a_chain_ends_at_its_first_miss(make: Callable[..., Scene], disk: bool) -> None:
    scene = make(disk=disk)
    store = scene.store
    assert isinstance(store, CountingStore)
    with KVCache(scene.pool, namespace="test") as other:
        names = [digest(("cold", number)) for number in range(COLD)]
        assert other.onboard(names, wait_s=20) == 0
    assert eventually(lambda: scene.server.lower_stat().wanted_count == 0)
    assert 0 < len(store.requested) <= 64


def test_hits_of_another_request_do_not_wait_for_a_cold_prompt(make: Callable[..., Scene]) -> None:
    scene = make(disk=False)
    store = scene.store
    assert isinstance(store, CountingStore)
    put_below(scene, [f"mine {number}" for number in range(20)])
    assert eventually(lambda: len(store.objects) >= 110)
    store.slow = True
    store.requested.clear()
    store.first.clear()
    ended = threading.Event()

    def let_pass() -> None:  # a store that serves one get at a time
        while not ended.is_set():
            store.passes.release()
            ended.wait(0.002)

    passing = threading.Thread(target=let_pass)
    passing.start()
    try:
        cold(scene, "cold")
        store.first.wait()
        present = [scene.has(f"mine {number}", 0) for number in range(20)]
    finally:
        ended.set()
        passing.join()
    assert all(present)
    assert len(store.requested) < 400


def test_hits_on_the_disk_do_not_wait_for_a_store_that_hangs(make: Callable[..., Scene]) -> None:
    scene = make()
    store = scene.store
    assert isinstance(store, CountingStore)
    put_below(scene, [f"mine {number}" for number in range(20)])
    store.slow = True  # and no later get completes first
    for name in "abc":
        cold(scene, name)
    store.first.wait()
    names = [digest(f"mine {number}") for number in range(20)]
    target = np.zeros((20, LENGTH), np.uint8)
    assert scene.cache.get(names, target).hits == 20
    assert np.array_equal(target, np.concatenate([content(f"mine {n}", 0) for n in range(20)]))


def test_many_chains_are_served_in_turn(make: Callable[..., Scene]) -> None:
    """No chain has more keys in flight than its share while another chain waits for its first
    key.
    """
    scene = make(disk=False)
    store = scene.store
    assert isinstance(store, CountingStore)
    store.slow = True
    for name in range(6):
        assert cold(scene, f"chain {name}", 100) == 100
    store.passes.release(1000)
    assert eventually(lambda: scene.server.lower_stat().wanted_count == 0)
    assert len(store.requested) <= 6 * 32


def test_a_chain_of_hits_is_complete(make: Callable[..., Scene]) -> None:
    scene = make(disk=False)
    names = [f"mine {number}" for number in range(40)]
    put_below(scene, names)
    target = np.zeros((len(names), LENGTH), np.uint8)
    assert scene.cache.get([digest(name) for name in names], target).hits == len(names)
    assert np.array_equal(target, np.concatenate([content(name, 0) for name in names]))
