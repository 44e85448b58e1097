# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The block manager: offloads and onboards, their order, and the state after failures; and any
order of calls, failures and cancellations (Hypothesis).
"""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray
from support.forks import in_child
from support.state_machines import each_budget

from beluga import IndexServer, KVCache, Pool
from beluga.errors import TierError, TransferError, UnsettledError
from beluga.index import BlockState
from beluga.kvbm import (
    OFFLOAD_POLICIES,
    BlockManager,
    BlockPool,
    CacheTier,
    Key,
    MutableBlock,
    RegisteredBlock,
)
from beluga.metrics import Registry
from beluga.transfer import BlockLayout, View

SIZE, LENGTH = 4, 64  # tokens and bytes of a block


def content(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, LENGTH, np.uint8)


class Device:
    """Blocks of an engine, whose keys are numbers that determine their bytes."""

    def __init__(self, count: int, registry: Registry | None = None, **options: Any) -> None:
        self.pool = BlockPool(
            "device", count, block_size=SIZE, registry=registry or Registry(), **options
        )
        self.memory = np.zeros((count, LENGTH), np.uint8)

    def write(
        self, blocks: Sequence[MutableBlock], numbers: Sequence[int]
    ) -> list[RegisteredBlock]:
        """Write the content of ``numbers`` to reserved blocks, and register them as one chain."""
        for index, (block, number) in enumerate(zip(blocks, numbers, strict=True)):
            self.memory[block.index] = content(number)
            block.fill(SIZE)
            block.commit(number, parent=numbers[index - 1] if index else None)
        return self.pool.register(blocks)

    def store(self, numbers: Sequence[int], request: str = "r") -> list[RegisteredBlock]:
        return self.write(self.pool.reserve(request, len(numbers)).result(30), numbers)


class SharedMemory:
    """A shared tier of one device. ``before`` is called with "save" or "load" before a copy."""

    name = "memory"

    def __init__(self, device: Device) -> None:
        self.device = device
        self.blocks: dict[Key, bytes] = {}
        self.is_full = False
        self.copies: list[tuple[str, list[Key]]] = []
        self.before: Callable[[str], None] = lambda what: None

    def save(self, keys: Sequence[Key], blocks: Sequence[int]) -> list[int]:
        self.copies.append(("save", list(keys)))
        self.before("save")
        states: list[int] = []
        for key, block in zip(keys, blocks, strict=True):
            if key in self.blocks:
                states.append(BlockState.HIT)
            elif self.is_full:
                states.append(BlockState.REFUSED)
            else:
                self.blocks[key] = self.device.memory[block].tobytes()
                states.append(BlockState.GRANTED)
        return states

    def load(self, keys: Sequence[Key], blocks: Sequence[int]) -> int:
        self.copies.append(("load", list(keys)))
        self.before("load")
        for index, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if key not in self.blocks:
                return index
            self.device.memory[block] = np.frombuffer(self.blocks[key], np.uint8)
        return len(keys)


WAIT_S = 30


class Scene:
    """A device over a tier whose copies are recorded and may fail."""

    def __init__(self, device: int = 8, **options: Any) -> None:
        self.registry = Registry()
        self.device = Device(device, self.registry)
        self.pool = self.device.pool
        self.below = SharedMemory(self.device)
        self.manager = BlockManager(self.pool, self.below, **{"threads": False, **options})

    def moved(self, kind: str) -> float:
        counter = self.registry.counter("beluga_kvbm_moved_blocks_total", "")
        return counter.value(tier="device", kind=kind)

    def dropped(self, reason: str, kind: str = "offload") -> float:
        counter = self.registry.counter("beluga_kvbm_dropped_blocks_total", "")
        return counter.value(tier="device", kind=kind, reason=reason)

    def fail(self, error: Exception | None) -> None:
        def before(_: str) -> None:
            if error is not None:
                raise error

        self.below.before = before

    def sink(self, *numbers: int, request: str = "r") -> None:
        """Store blocks in the device, release them, and wait until they are offloaded."""
        self.device.store(numbers, request)
        self.manager.release(request)
        self.manager.flush()

    def sunk(self) -> None:
        """Replace blocks 1 to 8 in the device, which then has 11 to 18."""
        self.sink(*range(1, 9))
        self.sink(*range(11, 19))
        self.below.copies.clear()


def test_blocks_are_offloaded_and_onboarded_with_their_bytes() -> None:
    scene = Scene()
    scene.sink(1, 2, 3)
    assert scene.pool.contains([1, 2, 3]) == [True] * 3
    scene.sink(*range(11, 19))
    assert scene.pool.contains([1, 2, 3]) == [False] * 3
    future = scene.manager.onboard([1, 2, 3, 4], "next")
    assert not future.done()
    assert scene.manager.step()
    blocks = future.result(0)
    assert [block.key for block in blocks] == [1, 2, 3], "4 is nowhere"
    for block, number in zip(blocks, (1, 2, 3), strict=True):
        assert (scene.device.memory[block.index] == content(number)).all()
    assert [scene.pool._registered[key].parent for key in (1, 2, 3)] == [None, 1, 2]
    assert scene.pool.inflight_blocks == 3
    scene.manager.release("next")
    assert scene.pool.inflight_blocks == 0
    assert (scene.moved("offload"), scene.moved("onboard")) == (11, 3)


def test_an_onboard_loads_only_what_the_device_does_not_have() -> None:
    scene = Scene(device=4)
    scene.sink(1, 2, 3)
    scene.sink(11, 12)  # evicts 3, and keeps the start of the chain
    assert scene.pool.contains([1, 2, 3]) == [True, True, False]
    scene.below.copies.clear()
    future = scene.manager.onboard([1, 2, 3], "next")
    scene.manager.flush()
    assert [block.key for block in future.result(0)] == [1, 2, 3]
    assert scene.below.copies == [("load", [3])]
    scene.manager.release("next")
    scene.manager.flush()
    assert scene.below.copies == [("load", [3])], "what came from below is not offloaded again"


def test_an_onboard_of_present_blocks_copies_nothing_and_does_not_wait() -> None:
    scene = Scene()
    scene.device.store([1])
    busy = scene.pool.reserve("busy", 7).result(0)
    cold = scene.manager.onboard([2, 3], "cold")
    future = scene.manager.onboard([1], "next")
    assert [block.key for block in future.result(0)] == [1]
    assert scene.manager.onboard([], "next").result(0) == []
    assert not cold.done()
    scene.pool.drop_all(busy)
    scene.manager.flush()
    assert cold.result(0) == []


def test_concurrent_onboards_of_chains_all_complete() -> None:
    scene = Scene(device=6, threads=True)
    with scene.manager:
        scene.sink(1, 2, 3, 4, 5)
        scene.sink(11, 12, 13, 14, 15)
        scene.sink(21, 22, 23, 24, 25)

        def work(number: int) -> None:
            order, first = random.Random(number), 1 + number % 3 * 10
            for turn in range(100):
                chain = list(range(first, first + order.randint(1, 5)))
                name = f"{number} {turn}"
                blocks = scene.manager.onboard(chain, name).result(WAIT_S)
                assert [block.key for block in blocks] == chain
                scene.manager.release(name)

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(work, range(6)))
    assert scene.pool.inflight_blocks == 0


def heat_up(scene: Scene, *keys: int, times: int = 3) -> None:
    for _ in range(times):
        scene.pool.match(keys, "heat")
    scene.pool.release("heat")


def test_onboards_precede_prefetches_and_both_precede_offloads() -> None:
    scene = Scene()
    scene.sunk()
    heat_up(scene, 1)
    scene.device.store([50])  # an offload
    scene.manager.prefetch([1])
    futures = [scene.manager.onboard([number], "x") for number in (2, 3)]
    while scene.manager.step():
        pass
    assert scene.below.copies == [
        ("load", [2]),
        ("load", [3]),
        ("load", [1]),
        ("save", [50]),
    ]
    assert all(future.result(0) for future in futures)
    assert (scene.moved("onboard"), scene.moved("prefetch")) == (2, 1)


def test_offloads_are_ordered_by_age_in_batches_of_16() -> None:
    scene = Scene(device=64)
    scene.device.store(range(1, 21))
    scene.manager.step()
    assert scene.below.copies == [("save", list(range(1, 17)))]
    scene.manager.step()
    assert scene.below.copies[1] == ("save", [17, 18, 19, 20])


def test_offloads_of_evicted_blocks_or_without_room_are_dropped_and_counted() -> None:
    scene = Scene(device=4, offload="drop")
    scene.device.store([1, 2, 3, 4])
    scene.manager.release("r")
    scene.pool.reserve("x", 2).result(0)[0].fill(1)  # 3 and 4 are evicted
    scene.below.is_full = True
    scene.manager.step()
    assert (scene.dropped("gone"), scene.dropped("refused")) == (2, 2)
    assert scene.below.blocks == {}


def test_a_block_that_is_below_already_is_not_counted_as_a_copy() -> None:
    scene = Scene()
    scene.below.blocks[1] = content(1).tobytes()
    scene.sink(1)
    assert (scene.dropped("present"), scene.moved("offload")) == (1, 0)


@pytest.mark.parametrize(
    ("error", "message", "held"),
    [
        (TransferError("the link is down"), r"an onboard failed: .*the link is down", 0),
        # A copy may still write: an onboard's and a prefetch's target, and an offload's source.
        (UnsettledError("no answer"), "the end of an onboard is unknown: no answer", 3),
    ],
)
def test_a_failed_copy_raises_a_typed_error_and_holds_only_what_it_may_still_write(
    error: Exception, message: str, held: int
) -> None:
    scene = Scene(offload="drop")
    scene.sunk()
    scene.fail(error)
    future = scene.manager.onboard([1], "x")
    scene.manager.step()
    with pytest.raises(TierError, match=message):
        future.result(0)
    scene.device.store([50])
    scene.manager.step()
    heat_up(scene, 2)
    scene.manager.prefetch([2])
    scene.manager.step()
    if held == 0:
        assert (scene.dropped("failed"), scene.dropped("failed", "prefetch")) == (1, 1)
    scene.manager.release("x")
    scene.manager.release("r")
    assert scene.pool.inflight_blocks == held


def test_failures_of_one_kind_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(offload="drop")
    scene.fail(TransferError("the link is down"))
    for number in range(5):
        scene.device.store([number])
        scene.manager.step()
    assert scene.dropped("failed") == 5
    assert caplog.messages == ["beluga: an offload of tier device failed: the link is down"]


@pytest.mark.parametrize("moment", ["waits for room", "is ready", "is copied"])
@pytest.mark.parametrize("how", ["cancel", "release", "close"])
def test_an_onboard_that_ends_early_releases_everything(moment: str, how: str) -> None:
    scene = Scene()
    scene.sunk()
    held = scene.pool.reserve("busy", 8 if moment == "waits for room" else 1).result(0)
    future = scene.manager.onboard([1, 2], "x")

    def end() -> None:
        if how == "cancel":
            assert future.cancel() == (moment != "is copied")
        elif how == "release":
            scene.manager.release("x")
        else:
            scene.manager.close()

    if moment == "is copied":
        scene.below.before = lambda what: end()
        scene.manager.step()
    else:
        end()
        scene.manager.step()
    if how == "release" and moment == "is copied":
        with pytest.raises(TierError, match="request 'x' was released"):
            future.result(0)
    elif moment == "is copied":
        assert len(future.result(0)) == 2
    else:
        with pytest.raises((CancelledError, TierError)):
            future.result(0)
    scene.manager.release("x")
    scene.pool.drop_all(held)
    assert scene.pool.inflight_blocks == 0
    assert len(scene.pool._waiting) == 0


def test_an_onboard_that_finds_no_room_in_time_fails() -> None:
    scene = Scene(threads=True)
    with scene.manager:
        scene.sunk()
        held = scene.pool.reserve("busy", 8).result(0)
        future = scene.manager.onboard([1], "x", timeout_s=0.01)
        with pytest.raises(TierError, match="tier device could not free 1 blocks within"):
            future.result(WAIT_S)
        with pytest.raises(TierError, match="tier device has 8 blocks, but 9 were requested"):
            scene.manager.onboard(list(range(200, 209)), "x").result(WAIT_S)
        assert held[0].index == 0


def test_an_onboard_without_space_holds_nothing_until_its_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, held = Scene(), []
    scene.sink(1, 2)
    pool, inner = scene.pool, scene.pool.reserve
    busy = pool.reserve("busy", 6).result(0)
    before = pool.reserve("before", 6)  # leaves two blocks for 1 and 2, one of which 3 takes

    def reserve(request: Any, count: int, **options: Any) -> Any:
        held.append((count, pool.inflight_blocks))
        return inner(request, count, **options)

    monkeypatch.setattr(pool, "reserve", reserve)
    future = scene.manager.onboard([1, 2, 3], "x")
    pool.drop_all(busy)
    assert scene.manager.step()
    assert held == [(1, 6), (3, 6)]  # the second time for all three, whichever others are evicted
    pool.drop_all(before.result(0))
    assert scene.manager.step()
    assert len(future.result(0)) == 2


def test_a_stalled_offload_does_not_delay_an_onboard() -> None:
    scene, stands, go_on = Scene(threads=True), threading.Event(), threading.Event()
    scene.below.blocks = {number: content(number).tobytes() for number in (1, 2)}

    def before(what: str) -> None:
        if what == "save":
            stands.set()
            assert go_on.wait(WAIT_S)

    with scene.manager:
        scene.below.before = before
        scene.device.store([50])
        assert stands.wait(WAIT_S)
        assert len(scene.manager.onboard([1, 2], "x").result(WAIT_S)) == 2
        go_on.set()
        assert scene.manager.flush(WAIT_S)
        assert 50 in scene.below.blocks


def test_a_manager_may_be_closed_by_a_callback_and_is_closed_in_a_forked_child() -> None:
    scene, closed = Scene(threads=True), threading.Event()

    def onboard() -> None:
        with pytest.raises(TierError, match="is closed"):
            scene.manager.onboard([1]).result(0)
        assert scene.manager.flush(1)

    assert in_child(onboard) == "None"

    def close(_: object) -> None:
        scene.manager.close()
        closed.set()

    scene.manager.onboard([1], "x").add_done_callback(close)
    assert closed.wait(WAIT_S)
    with pytest.raises(TierError, match="the block manager is closed"):
        scene.manager.onboard([1], "x").result(0)


def test_with_wait_no_block_is_lost_on_a_device_of_any_size() -> None:
    scene = Scene(device=4, threads=True)
    with scene.manager:
        for first in range(0, 60, 3):
            scene.device.store([first, first + 1, first + 2], "r")
            scene.manager.release("r")
        assert scene.manager.flush(WAIT_S)
        assert set(scene.below.blocks) == set(range(60))
        for number in range(60):
            (block,) = scene.manager.onboard([number], "r").result(WAIT_S)
            assert (scene.device.memory[block.index] == content(number)).all()
            scene.manager.release("r")


def test_with_wait_a_full_lower_tier_blocks_only_for_a_time() -> None:
    scene = Scene(device=2, threads=True)
    scene.below.is_full = True
    with scene.manager:
        for number in range(12):
            scene.device.store([number], "r")
            scene.manager.release("r")
    assert scene.dropped("given_up") > 0
    assert scene.below.blocks == {}


def test_with_drop_eviction_waits_for_no_offload() -> None:
    scene = Scene(device=2, offload="drop")
    for number in range(5):
        scene.device.store([number], "r")
        scene.manager.release("r")
    scene.manager.flush()
    assert set(scene.below.blocks) == {3, 4}
    assert scene.dropped("gone") == 3


def test_with_the_watermark_the_coldest_blocks_are_offloaded_when_the_device_is_full() -> None:
    scene = Scene(device=20, offload="watermark")
    scene.device.store(range(1, 18))
    scene.manager.release("r")
    assert not scene.manager.step(), "17 of 20 are 85 %"
    scene.device.store([18])
    scene.manager.flush()
    assert set(scene.below.blocks) == set(range(2, 18)), "16 of the end of the chain; 18 is in use"


def test_hot_blocks_are_prefetched() -> None:
    scene = Scene()
    scene.sunk()
    heat_up(scene, 1, 2, times=2)
    scene.manager.prefetch([1, 2])
    scene.manager.flush()
    assert scene.pool.contains([1, 2]) == [False, False]
    heat_up(scene, 1, 2, times=1)  # the third touch within a short time
    scene.manager.prefetch([1, 2])
    scene.manager.flush()
    assert scene.pool.contains([1, 2]) == [True, True]
    assert [block.key for block in scene.pool.match([1, 2], "next")] == [1, 2]
    assert scene.moved("prefetch") == 2


def test_a_prefetch_uses_only_room_that_no_reservation_waits_for() -> None:
    scene = Scene()
    scene.sunk()
    heat_up(scene, 1, 2)
    held = scene.pool.reserve("busy", 8).result(0)
    scene.manager.prefetch([1, 2])
    scene.manager.flush()
    assert scene.dropped("full", kind="prefetch") == 2
    assert held[0].index == 0
    assert len(scene.pool._waiting) == 0


def test_the_end_of_a_chain_is_not_prefetched_in_place_of_its_beginning() -> None:
    scene = Scene(device=4)
    scene.sink(1, 2, 3, 4)
    scene.sink(11, 12)  # evicts 3 and 4; 2 is the oldest end of a chain now
    heat_up(scene, 3, 4)
    scene.manager.prefetch([1, 2, 3, 4])
    scene.manager.flush()
    assert scene.pool.contains([1, 2, 3, 4]) == [True] * 4


def test_a_prefetch_beyond_the_device_drops_the_oldest_keys() -> None:
    scene = Scene()
    scene.sunk()
    heat_up(scene, *range(1, 9))
    scene.manager.prefetch(list(range(1, 6)))
    scene.manager.prefetch(list(range(5, 9)))
    assert scene.dropped("overflow", kind="prefetch") == 5
    scene.manager.flush()
    assert scene.pool.contains(range(1, 9)) == [False] * 4 + [True] * 4


def test_a_chain_ends_at_the_first_block_that_the_tier_below_lost() -> None:
    scene = Scene()
    scene.sunk()
    del scene.below.blocks[2]
    future = scene.manager.onboard([1, 2, 3], "x")
    scene.manager.flush()
    assert [block.key for block in future.result(0)] == [1]
    assert scene.pool.inflight_blocks == 1
    heat_up(scene, 2)
    scene.manager.prefetch([2])
    scene.manager.flush()
    assert scene.dropped("gone", kind="prefetch") == 1


def test_an_offload_policy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TierError, match="policy 'never'; give one of wait, drop, watermark"):
        Scene(offload="never")


def test_blocks_are_offloaded_to_a_pool_and_onboarded_through_a_cache(shm: Path) -> None:
    with (
        Pool.create([shm / "a"], device_size=32 << 20) as pool,
        IndexServer(pool),
        KVCache(pool, namespace="x") as up,
        KVCache(pool, namespace="x") as down,
    ):
        device = Device(4)
        view = View.of(device.memory)
        below = CacheTier(up, down, BlockLayout([view], ("block", "dim")))
        keys = [bytes([number]) * 16 for number in range(8)]
        with BlockManager(device.pool, below) as manager:
            for first in (0, 4):
                blocks = device.pool.reserve("r", 4).result(WAIT_S)
                for number, block in enumerate(blocks, first):
                    device.memory[block.index] = number
                    block.fill(4)
                    block.commit(keys[number])
                device.pool.register(blocks)
                manager.release("r")
            assert manager.flush(WAIT_S)
            loaded = manager.onboard(keys[:4], "next").result(WAIT_S)
            assert [device.memory[block.index].tolist() for block in loaded] == [
                [number] * LENGTH for number in range(4)
            ]
        with pytest.raises(TierError, match="the key 'a' is not a digest; give bytes"):
            below.load(["a"], [0])
        assert up.lookup(keys[4:]) == 4


REQUESTS = st.sampled_from(["a", "b", "c"])
LEAVES = st.integers(1, 31)
CHOICES = st.integers(0, 63)
CONTENT: dict[object, bytes] = {number: content(number).tobytes() for number in range(1, 32)}


def chain(leaf: int) -> list[int]:
    """Numbers are the nodes of a binary tree; a chain starts at the root."""
    return [*chain(leaf // 2), leaf] if leaf else []


class ManagerMachine(RuleBasedStateMachine):
    """A manager without threads. Rules have no preconditions, so what is drawn never depends on
    what the manager did before.
    """

    @initialize(size=st.integers(2, 7), offload=st.sampled_from(OFFLOAD_POLICIES))
    def begin(self, size: int, offload: str) -> None:
        # time is frozen; otherwise heat would depend on the machine
        self.device = Device(size, watermark=0.5, clock=lambda: 0.0)
        self.pool = self.device.pool
        self.below = SharedMemory(self.device)
        self.below.before = self.copy
        self.waits = offload == "wait"
        self.copy_fails = self.has_failed = False
        self.manager = BlockManager(self.pool, self.below, offload=offload, threads=False)
        self.known: set[int] = set()
        self.reserved: list[tuple[int, str, Future[list[MutableBlock]]]] = []
        self.onboards: list[tuple[list[int], str, Future[list[RegisteredBlock]], int]] = []
        self.held: list[RegisteredBlock] = []

    def copy(self, _: str) -> None:
        if self.copy_fails:
            raise TransferError("planned")

    @rule(leaf=LEAVES, request=REQUESTS, sinks=st.sampled_from([True, True, False]))
    def store(self, leaf: int, request: str, sinks: bool) -> None:
        """Store a chain and release it, perhaps until it is offloaded."""
        blocks = self.pool.try_reserve(request, len(chain(leaf)))
        if blocks is not None:
            self.pool.drop_all(self.device.write(blocks, chain(leaf)))
            self.known |= set(chain(leaf))
        if sinks:
            self.step(8)

    @rule(leaf=LEAVES, request=REQUESTS)
    def reserve(self, leaf: int, request: str) -> None:
        if len(chain(leaf)) <= self.pool.total_blocks:
            future = self.pool.reserve(request, len(chain(leaf)))
            self.reserved.append((leaf, request, future))

    @rule(choice=CHOICES, keeps=st.booleans(), is_cancelled=st.booleans())
    def register(self, choice: int, keeps: bool, is_cancelled: bool) -> None:
        """Use a reservation that was granted; one that waits may be cancelled."""
        if not self.reserved:
            return
        leaf, _, future = self.reserved[choice % len(self.reserved)]
        if not future.done() and not is_cancelled:
            return
        del self.reserved[choice % len(self.reserved)]
        if future.cancel():
            return
        if future.exception(0) is not None:
            return
        handles = self.device.write(future.result(0), chain(leaf))
        self.known |= set(chain(leaf))
        if keeps:
            self.held += handles
        else:
            self.pool.drop_all(handles)

    @rule(
        leaf=LEAVES,
        request=REQUESTS,
        skips=st.integers(0, 2),
        is_awaited=st.booleans(),
        is_known=st.booleans(),
    )
    def onboard(
        self, leaf: int, request: str, skips: int, is_awaited: bool, is_known: bool
    ) -> None:
        if is_known and self.known:
            leaf = sorted(self.known)[leaf % len(self.known)]
        numbers = chain(leaf)[skips:]
        self.onboard_blocks(numbers, request)
        if is_awaited:
            self.step(8)

    @rule(choice=CHOICES)
    def cancel(self, choice: int) -> None:
        if not self.onboards:
            return
        future = self.onboards[choice % len(self.onboards)][2]
        assert future.cancel(), "no copy is under way between steps"

    def onboard_blocks(self, numbers: list[int], request: str) -> None:
        """Onboard blocks; with wait, those that are known now must be returned."""
        minimum = next(
            (at for at, number in enumerate(numbers) if number not in self.known), len(numbers)
        )
        future = self.manager.onboard(numbers, request)
        self.onboards.append((numbers, request, future, minimum))

    @rule(choice=CHOICES)
    def recall(self, choice: int) -> None:
        """Drop all handles, and onboard one known block."""
        for request in ("a", "b", "c"):
            self.release(request)
        if self.known:
            number = sorted(self.known)[choice % len(self.known)]
            self.onboard_blocks([number], "a")
            self.step(4)

    @rule(leaf=LEAVES)
    def prefetch(self, leaf: int) -> None:
        self.manager.prefetch(chain(leaf))

    @rule(leaf=LEAVES, request=REQUESTS, keeps=st.booleans())
    def match(self, leaf: int, request: str, keeps: bool) -> None:
        matched = self.pool.match(chain(leaf), request)
        assert [block.key for block in matched] == chain(leaf)[: len(matched)]
        if keeps:
            self.held += matched
        else:
            self.pool.drop_all(matched)

    @rule(choice=CHOICES)
    def drop(self, choice: int) -> None:
        if not self.held:
            return
        self.held.pop(choice % len(self.held)).release()

    @rule(request=REQUESTS)
    def release(self, request: str) -> None:
        self.manager.release(request)
        self.reserved = [  # the granted blocks were released
            reserved for reserved in self.reserved if reserved[1] != request
        ]
        for numbers, whose, future, _ in self.onboards:
            assert whose != request or future.done(), f"onboard of {numbers} goes on"

    @rule()
    def let_go(self) -> None:
        """A request that holds nothing waits only for requests that hold blocks: every onboard
        ends.
        """
        if self.waits and self.has_failed:
            return  # blocks in no lower tier are not evicted
        self.trouble("heal")
        for request in ("a", "b", "c"):
            self.pool.release(request)
        self.reserved = []
        for _ in range(2 * len(self.onboards) + 2):
            while self.manager.step():
                pass
            self.results_are_right()
            for block in self.held:
                block.release()
        assert not self.onboards, "onboards wait for each other"

    @rule(what=st.sampled_from(["copy", "full", "lose", *["heal"] * 12]))
    def trouble(self, what: str) -> None:
        if what == "lose":
            self.below.blocks.clear()
        self.copy_fails = what == "copy"
        self.below.is_full = what == "full"
        self.has_failed |= what != "heal"

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.below.copies.clear()
            can_start = bool(self.manager._onboards)
            self.manager.step()
            if can_start:
                assert {what for what, _ in self.below.copies} <= {"load"}, "it was overtaken"

    @invariant()
    def all_is_well(self) -> None:
        self.results_are_right()
        self.bytes_are_those_of_their_keys()
        self.every_block_has_one_place_and_one_owner()
        self.nothing_is_lost()

    def results_are_right(self) -> None:
        pending = []
        for numbers, request, future, minimum in self.onboards:
            if not future.done():
                pending.append((numbers, request, future, minimum))
                continue
            try:
                blocks = future.result(0)
            except CancelledError:
                continue
            except TierError:
                in_time = len(numbers) > self.pool.total_blocks
                assert self.has_failed or in_time
                continue
            assert [block.key for block in blocks] == numbers[: len(blocks)]
            if self.waits and not self.has_failed:
                assert len(blocks) >= minimum
            self.held += blocks
        self.onboards = pending

    def bytes_are_those_of_their_keys(self) -> None:
        for key, block in self.pool._registered.items():
            assert self.device.memory[block.index].tobytes() == CONTENT[key]
        for key, payload in self.below.blocks.items():
            assert payload == CONTENT[key]

    def every_block_has_one_place_and_one_owner(self) -> None:
        mutable = [
            block.index
            for _, _, future in self.reserved
            if future.done() and not future.cancelled() and future.exception(0) is None
            for block in future.result(0)
        ]
        mutable += [
            block.index
            for call, room in self.manager._onboards
            for block in room
            if not call.future.cancelled()
        ]
        assert len(set(mutable)) == len(mutable), "two reservations have one block"
        free = [block.index for block in self.pool._free]
        registered = [block.index for block in self.pool._registered.values()]
        assert sorted(free + registered + mutable) == list(range(self.pool.total_blocks))
        self.held = [block for block in self.held if block.block is not None]
        held = {block.index for block in self.held}
        active = len(held) + len(mutable)
        assert self.pool.inflight_blocks == active, "a block is held for good"

    def nothing_is_lost(self) -> None:
        if self.waits and not self.has_failed:
            assert self.known <= {*self.pool._registered, *self.below.blocks}

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for request in ("a", "b", "c"):
            self.release(request)
        for block in self.held:
            block.release()
        self.trouble("heal")
        while self.manager.step():
            pass
        self.manager.close()
        assert all(future.done() for _, _, future, _ in self.onboards)
        assert (self.pool.inflight_blocks, len(self.pool._waiting)) == (0, 0)
        every = self.pool.reserve("last", self.pool.total_blocks).result(0)
        assert len(every) == self.pool.total_blocks


@each_budget
def test_any_order_of_moves_loses_and_leaks_nothing(budget: settings) -> None:
    run_state_machine_as_test(ManagerMachine, settings=budget)
