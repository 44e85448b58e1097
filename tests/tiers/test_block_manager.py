# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The block manager: what sinks, what comes back, in which order, and what failures leave."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

import pytest
from memory_tier import MemoryTier

from beluga.errors import TierError, TransferError, UnsettledError
from beluga.metrics import Registry
from beluga.tiers import (
    BlockManager,
    BlockPool,
    MemoryType,
    OwnedTier,
    Storage,
    TierBlocks,
    copy_blocks,
)
from beluga.transfer import TransferClass
from tests.tiers.tier_parts import LENGTH, bytes_of, content, key_of, owned, store

WAIT_S = 30


def keys(*numbers: int) -> list[tuple[int, int]]:
    return [key_of(number) for number in numbers]


class Scene:
    """Two owned tiers over one lower tier, whose copies are recorded and may fail."""

    def __init__(self, device: int = 8, host: int = 16, **options: Any) -> None:
        self.registry = Registry()
        self.device, self.host = owned("device", device), owned("host", host)
        self.disk = MemoryTier("disk")
        self.admitted: list[TransferClass] = []
        self.refused: set[TransferClass] = set()
        self.fails: Exception | None = None
        self.manager = BlockManager(
            [self.device, self.host],
            [self.disk],
            copy=self.copy,
            admission=self.admission,
            registry=self.registry,
            **{"threads": False, **options},
        )

    @contextlib.contextmanager
    def admission(self, kind: TransferClass, size: int) -> Iterator[bool]:
        assert size % LENGTH == 0
        self.admitted.append(kind)
        yield kind not in self.refused

    def copy(
        self, source: TierBlocks, of: Sequence[int], target: TierBlocks, to: Sequence[int]
    ) -> None:
        if self.fails is not None:
            raise self.fails
        assert self.admitted, "a copy starts after it was admitted"
        copy_blocks(source, of, target, to)

    def dropped(self, reason: str, tier: str = "device", kind: str = "offload") -> float:
        counter = self.registry.counter("beluga_tier_dropped_blocks_total", "")
        return counter.value(tier=tier, kind=kind, reason=reason)

    def sink(self, *numbers: int, request: str = "r") -> None:
        """Store blocks in the device, release them, and let them sink as far as they do."""
        store(self.device, numbers, request)
        self.manager.release(request)
        self.manager.flush()


def test_blocks_sink_to_all_tiers_and_come_back_with_their_bytes() -> None:
    scene = Scene()
    scene.sink(1, 2, 3)
    assert scene.manager.where(keys(1, 2, 3, 4)) == ["device"] * 3 + [None]
    for round_ in range(6):  # they leave the device, then the host
        scene.sink(*range(100 + 8 * round_, 108 + 8 * round_))
    assert scene.manager.where(keys(1, 2, 3)) == ["disk"] * 3
    found = scene.manager.onboard(keys(1, 2, 3, 4), "next")
    assert not found.done()
    assert scene.manager.step()
    blocks = found.result(0)
    assert [block.key for block in blocks] == keys(1, 2, 3), "4 is nowhere"
    for block, number in zip(blocks, (1, 2, 3), strict=True):
        assert (bytes_of(scene.device, block.index) == content(number)).all()
    assert [block.parent for block in blocks] == [None, *keys(1, 2)]
    assert scene.device.pool.inflight_blocks == 3
    scene.manager.release("next")
    assert scene.device.pool.inflight_blocks == 0


def test_an_onboard_takes_each_block_from_the_next_tier_that_has_it() -> None:
    scene = Scene(device=4)
    scene.sink(1, 2)
    scene.sink(3, 4)
    scene.sink(5, 6)  # evicts 1 and 2 from the device
    loads = len(scene.disk.loads)
    found = scene.manager.onboard(keys(1, 2, 5), "next")
    scene.manager.flush()
    assert [block.key for block in found.result(0)] == keys(1, 2, 5)
    assert len(scene.disk.loads) == loads, "the host has them"
    moved = scene.registry.counter("beluga_tier_moved_blocks_total", "")
    assert moved.value(source="host", target="device") == 2


def test_an_onboard_of_what_is_there_moves_nothing_and_waits_for_nobody() -> None:
    scene = Scene()
    store(scene.device, [1])
    busy = scene.device.pool.reserve("busy", 7).result(0)
    cold = scene.manager.onboard(keys(2, 3), "cold")
    found = scene.manager.onboard(keys(1), "next")
    assert [block.key for block in found.result(0)] == keys(1)
    assert scene.manager.onboard([], "next").result(0) == []
    assert not cold.done()
    scene.device.pool.drop_all(busy)
    scene.manager.flush()
    assert cold.result(0) == []


def test_two_chains_that_come_at_once_do_not_wait_for_each_other() -> None:
    scene = Scene(device=6)
    scene.sink(1, 2, 3, 7, 8)
    scene.sink(4, 5, 6)
    assert scene.manager.onboard(keys(1, 2), "warm").cancel() or scene.manager.flush()
    scene.manager.release("warm")  # 1, 2, 4 and 5 are in the device, whatever else is
    busy = scene.device.pool.reserve("busy", 2).result(0)
    chains = {"a": keys(1, 2, 3, 7, 8), "b": keys(4, 5, 6)}
    found = {name: scene.manager.onboard(chain, name) for name, chain in chains.items()}
    assert scene.device.pool.inflight_blocks == 2, "who waits holds nothing"
    assert scene.host.pool.inflight_blocks == 0
    scene.device.pool.drop_all(busy)
    for name, chain in chains.items():
        scene.manager.flush()
        assert [block.key for block in found[name].result(0)] == chain
        scene.manager.release(name)


def test_a_chain_whose_own_blocks_make_room_comes_nevertheless() -> None:
    scene = Scene(device=4)
    scene.sink(3, 4)
    scene.sink(1, 2)
    scene.sink(3, 4)
    assert scene.manager.where(keys(1, 2)) == ["device"] * 2
    busy = scene.device.pool.reserve("busy", 1).result(0)
    found = scene.manager.onboard(keys(1, 2, 3, 4), "next")
    scene.manager.flush()
    assert not found.done(), "it needs all four"
    scene.device.pool.drop_all(busy)
    scene.manager.flush()
    assert [block.key for block in found.result(0)] == keys(1, 2, 3, 4)
    scene.manager.release("next")
    with pytest.raises(TierError, match="has 4 blocks, not 5"):
        scene.manager.onboard(keys(1, 2, 3, 4, 5), "more").result(0)


def test_threads_that_onboard_chains_at_once_all_end() -> None:
    scene, failures = Scene(device=6, host=32, threads=True), []
    with scene.manager:
        scene.sink(1, 2, 3, 4, 5)
        scene.sink(11, 12, 13, 14, 15)
        scene.sink(21, 22, 23, 24, 25)

        def work(number: int) -> None:
            order, first = random.Random(number), 1 + number % 3 * 10
            for turn in range(100):
                chain = list(range(first, first + order.randint(1, 5)))
                name = f"{number} {turn}"
                try:
                    blocks = scene.manager.onboard(keys(*chain), name).result(WAIT_S)
                    assert [block.key for block in blocks] == keys(*chain)
                except BaseException as error:
                    failures.append(error)
                    return
                del blocks
                scene.manager.release(name)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert scene.device.pool.inflight_blocks == 0


def test_onboards_go_before_prefetches_and_both_before_offloads() -> None:
    scene = Scene()
    scene.sink(*range(1, 9))
    scene.sink(*range(11, 19))
    scene.admitted.clear()
    store(scene.device, [50])  # an offload
    scene.manager.prefetch(keys(1))
    found = [scene.manager.onboard(keys(number), "x") for number in (2, 3)]
    while scene.manager.step():
        pass
    up = [TransferClass.ONBOARD] * 2 + [TransferClass.PREFETCH]
    assert scene.admitted[:3] == up
    assert set(scene.admitted[3:]) == {TransferClass.OFFLOAD}
    assert all(future.result(0) for future in found)


def test_offloads_go_by_priority_and_then_by_age_in_batches_of_16() -> None:
    scene = Scene(device=64, host=64)
    store(scene.device, range(1, 21), "low")
    store(scene.device, range(101, 106), "high", priority=2)
    scene.manager.step()
    first = keys(*range(101, 106), *range(1, 12))
    assert scene.host.pool.contains(first) == [True] * 16
    assert not any(scene.host.pool.contains(keys(*range(12, 21))))


def test_offloaded_blocks_that_went_or_find_no_room_are_dropped_and_counted() -> None:
    scene = Scene(device=4, host=2)
    store(scene.device, [1, 2, 3, 4])
    scene.manager.release("r")
    scene.device.pool.reserve("x", 2).result(0)[0].fill(1)  # 3 and 4 are evicted
    held = scene.host.pool.reserve("y", 1).result(0)
    scene.manager.step()
    assert (scene.dropped("gone"), scene.dropped("full")) == (2, 1)
    assert scene.host.pool.contains(keys(1, 2)) == [True, False]
    assert held[0].index == 0


def test_a_block_that_is_below_already_is_not_copied_again() -> None:
    scene = Scene()
    store(scene.host, [1])
    store(scene.device, [1])
    scene.manager.step()
    assert scene.dropped("present") == 1
    scene.manager.flush()
    assert list(scene.disk.blocks) == keys(1)


def test_a_copy_is_admitted_before_it_starts_and_one_that_is_not_never_does() -> None:
    scene = Scene()
    scene.sink(*range(1, 9))
    scene.sink(*range(11, 19))
    scene.refused = set(TransferClass)
    store(scene.device, [50])
    scene.manager.prefetch(keys(1))
    found = scene.manager.onboard(keys(2), "x")
    scene.fails = AssertionError("a copy began")
    scene.manager.flush()
    with pytest.raises(TierError, match="a copy of 1 blocks was not admitted"):
        found.result(0)
    assert scene.dropped("refused") == 1
    assert scene.dropped("refused", kind="prefetch") == 1
    assert scene.device.pool.inflight_blocks == 0


def test_a_copy_that_fails_is_a_typed_error_and_leaves_no_block_taken() -> None:
    scene = Scene()
    scene.sink(*range(1, 9))
    scene.sink(*range(11, 19))
    scene.fails = TransferError("the link is down")
    found = scene.manager.onboard(keys(1), "x")
    scene.manager.step()
    with pytest.raises(TierError, match=r"an onboard failed: .*the link is down"):
        found.result(0)
    store(scene.device, [50])
    scene.manager.step()
    assert scene.dropped("failed") == 1
    scene.manager.release("r")
    assert scene.device.pool.inflight_blocks == 0
    assert scene.host.pool.inflight_blocks == 0


def test_failures_are_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.fails = TransferError("the link is down")
    for number in range(5):
        store(scene.device, [number])
        scene.manager.step()
    assert scene.dropped("failed") == 5
    assert caplog.messages == ["beluga: an offload of tier device failed: the link is down"]


def test_blocks_that_a_copy_may_still_write_are_never_given_to_anybody() -> None:
    scene = Scene()
    scene.sink(*range(1, 9))
    scene.sink(*range(11, 19))
    scene.fails = UnsettledError("nobody knows")
    found = scene.manager.onboard(keys(1), "x")
    scene.manager.step()
    with pytest.raises(TierError, match="an onboard has not ended: nobody knows"):
        found.result(0)
    store(scene.device, [50])
    scene.manager.step()
    scene.manager.release("x")
    scene.manager.release("r")
    assert scene.device.pool.inflight_blocks == 2, "the target of one, the source of the other"
    assert scene.host.pool.inflight_blocks == 2


@pytest.mark.parametrize("moment", ["waits for room", "is ready", "is copied"])
@pytest.mark.parametrize("how", ["cancel", "release", "close"])
def test_an_onboard_that_ends_early_lets_go_of_everything(moment: str, how: str) -> None:
    scene = Scene()
    scene.sink(*range(1, 9))
    scene.sink(*range(11, 19))
    held = scene.device.pool.reserve("busy", 8 if moment == "waits for room" else 1).result(0)
    found = scene.manager.onboard(keys(1, 2), "x")

    def end() -> None:
        if how == "cancel":
            assert found.cancel() == (moment != "is copied")
        elif how == "release":
            scene.manager.release("x")
        else:
            scene.manager.close()

    if moment == "is copied":
        inner = scene.copy

        def copy(*arguments: Any) -> None:
            end()
            inner(*arguments)

        scene.manager._mover._copy = copy
        scene.manager.step()
    else:
        end()
        scene.manager.step()
    if how == "release" and moment == "is copied":
        with pytest.raises(TierError, match="request 'x' was released"):
            found.result(0)
    elif moment == "is copied":
        assert len(found.result(0)) == 2
    else:
        with pytest.raises((CancelledError, TierError)):
            found.result(0)
    scene.manager.release("x")
    scene.device.pool.drop_all(held)
    assert (scene.device.pool.inflight_blocks, scene.host.pool.inflight_blocks) == (0, 0)
    assert len(scene.device.pool._waiting) == 0


def test_an_onboard_that_finds_no_room_in_time_fails() -> None:
    scene = Scene(threads=True)
    with scene.manager:
        scene.sink(*range(1, 9))
        scene.sink(*range(11, 19))
        held = scene.device.pool.reserve("busy", 8).result(0)
        found = scene.manager.onboard(keys(1), "x", timeout_s=0.01)
        with pytest.raises(TierError, match="tier device had no 1 blocks within"):
            found.result(WAIT_S)
        with pytest.raises(TierError, match="tier device has 8 blocks, not 9"):
            scene.manager.onboard(keys(*range(200, 209)), "x").result(WAIT_S)
        assert held[0].index == 0


def test_an_onboard_that_needs_more_room_holds_nothing_while_it_asks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, held = Scene(), []
    scene.sink(1, 2)
    store(scene.host, [3])
    scene.manager.release("r")
    pool, inner = scene.device.pool, scene.device.pool.reserve
    busy = pool.reserve("busy", 6).result(0)
    before = pool.reserve("before", 6)  # leaves the two blocks of 1 and 2, of which 3 takes one

    def reserve(request: Any, count: int, **options: Any) -> Any:
        held.append((count, pool.inflight_blocks, scene.host.pool.inflight_blocks))
        return inner(request, count, **options)

    monkeypatch.setattr(pool, "reserve", reserve)
    found = scene.manager.onboard(keys(1, 2, 3), "x")
    pool.drop_all(busy)
    assert held == [(1, 6, 0), (3, 6, 0)]  # the second time for all three, whatever else goes
    pool.drop_all(before.result(0))
    assert scene.manager.step()
    assert len(found.result(0)) == 3


def test_an_onboard_is_not_held_up_by_an_offload_that_stands_still() -> None:
    scene, stands, go_on = Scene(threads=True), threading.Event(), threading.Event()
    inner = scene.copy

    def copy(source: TierBlocks, of: Any, target: TierBlocks, to: Any) -> None:
        if source is scene.device.blocks:
            stands.set()
            assert go_on.wait(WAIT_S)
        inner(source, of, target, to)

    with scene.manager:
        store(scene.host, [1, 2])
        scene.manager._mover._copy = copy
        store(scene.device, [50])
        assert stands.wait(WAIT_S)
        assert len(scene.manager.onboard(keys(1, 2), "x").result(WAIT_S)) == 2
        go_on.set()
        assert scene.manager.flush(WAIT_S)
        assert scene.host.pool.contains(keys(50)) == [True]


def test_a_manager_may_be_closed_by_a_callback_and_is_closed_in_a_forked_child() -> None:
    scene, closed = Scene(threads=True), threading.Event()
    store(scene.host, [1])
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            scene.manager.onboard(keys(1)).result(0)
            os._exit(1)
        os._exit(0 if scene.manager.flush(1) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def close(_: object) -> None:
        scene.manager.close()
        closed.set()

    scene.manager.onboard(keys(1), "x").add_done_callback(close)
    assert closed.wait(WAIT_S)
    with pytest.raises(TierError, match="the block manager is closed"):
        scene.manager.onboard(keys(1), "x").result(0)


def test_with_wait_no_block_is_lost_however_small_the_tiers_are() -> None:
    scene = Scene(device=4, host=4, offload="wait", threads=True)
    with scene.manager:
        for first in range(0, 60, 3):
            store(scene.device, [first, first + 1, first + 2], "r")
            scene.manager.release("r")
        assert scene.manager.flush(WAIT_S)
        assert None not in scene.manager.where(keys(*range(60)))
        for number in range(60):
            (block,) = scene.manager.onboard(keys(number), "r").result(WAIT_S)
            assert (bytes_of(scene.device, block.index) == content(number)).all()
            scene.manager.release("r")


def test_with_wait_a_broken_lower_tier_stops_nobody_for_good() -> None:
    scene = Scene(device=2, host=2, offload="wait", threads=True)
    scene.disk.full = True
    with scene.manager:
        for number in range(12):
            store(scene.device, [number], "r")
            scene.manager.release("r")
    assert scene.dropped("given_up", tier="host") > 0
    assert scene.disk.blocks == {}


def test_without_wait_eviction_waits_for_nobody() -> None:
    scene = Scene(device=2)
    for number in range(5):
        store(scene.device, [number], "r")
        scene.manager.release("r")
    scene.manager.flush()
    assert scene.manager.where(keys(0, 4)) == [None, "device"]


def test_hot_blocks_are_prefetched_after_a_match_that_missed_them() -> None:
    scene = Scene()
    scene.sink(*range(1, 9))
    scene.sink(*range(11, 19))
    for _ in range(2):
        assert scene.manager.match(keys(1, 2)) == []
    scene.manager.flush()
    assert scene.device.pool.contains(keys(1, 2)) == [False, False]
    assert scene.manager.match(keys(1, 2)) == []  # the third touch within a short time
    scene.manager.flush()
    assert scene.device.pool.contains(keys(1, 2)) == [True, True]
    assert [block.key for block in scene.manager.match(keys(1, 2))] == keys(1, 2)


def test_a_prefetch_takes_only_room_that_nobody_waits_for() -> None:
    scene = Scene()
    scene.sink(*range(1, 9))
    scene.sink(*range(11, 19))
    held = scene.device.pool.reserve("busy", 8).result(0)
    scene.manager.prefetch(keys(1, 2))
    scene.manager.flush()
    assert scene.dropped("full", kind="prefetch") == 2
    assert held[0].index == 0
    assert len(scene.device.pool._waiting) == 0


def test_the_watermark_follows_from_the_memory_unless_it_is_given() -> None:
    host = owned("host", 1)
    gpu = TierBlocks.of_layout(host.blocks.placed(), MemoryType.DEVICE)
    pools = [BlockPool("gpu", 1, watermark=share, registry=Registry()) for share in (None, 0.5)]
    tiers = [OwnedTier(pool, gpu) for pool in pools]
    assert [tier.pool.watermark for tier in (*tiers, host)] == [0.85, 0.5, 0.9]


def test_offload_can_wait_for_the_watermark() -> None:
    scene = Scene(device=10, offload_on="watermark")
    scene.device.pool.watermark = 0.85
    store(scene.device, range(1, 9))
    scene.manager.release("r")
    assert not scene.manager.step()
    store(scene.device, [9])
    scene.manager.flush()
    assert sum(scene.host.pool.contains(keys(*range(1, 9)))) == 8
    assert scene.host.pool.contains(keys(9)) == [False], "it is in use"


def test_blocks_of_another_model_or_size_are_misses() -> None:
    scene = Scene(fingerprint=7)
    scene.sink(1)
    other = Scene(fingerprint=8)
    other.disk.blocks = scene.disk.blocks
    found = other.manager.onboard(keys(1))
    other.manager.flush()
    assert found.result(0) == []
    scene.disk.blocks[key_of(1)][0]["length"] = LENGTH // 2
    for number in (10, 20, 30):
        scene.sink(*range(number, number + 8))
    again = scene.manager.onboard(keys(1))
    scene.manager.flush()
    assert again.result(0) == []


def test_a_run_ends_at_the_first_block_that_a_lower_tier_lost() -> None:
    scene = Scene()
    scene.sink(1, 2, 3)
    for number in (10, 20, 30):
        scene.sink(*range(number, number + 8))
    del scene.disk.blocks[key_of(2)]
    found = scene.manager.onboard(keys(1, 2, 3), "x")
    scene.manager.flush()
    assert [block.key for block in found.result(0)] == keys(1)
    assert scene.device.pool.inflight_blocks == 1


def test_wrong_tiers_are_refused() -> None:
    with pytest.raises(TierError, match="needs a tier"):
        BlockManager([], threads=False)
    with pytest.raises(TierError, match="blocks have one size"):
        small = OwnedTier(
            BlockPool("small", 1, block_size=4, registry=Registry()),
            TierBlocks.of_storage(Storage.allocate(32), 32),
        )
        BlockManager([owned("device", 1), small], threads=False)
    with pytest.raises(TierError, match="tier x has 2 blocks, its memory 1"):
        OwnedTier(BlockPool("x", 2, registry=Registry()), owned("y", 1).blocks)
    with pytest.raises(TierError, match="it is drop or wait"):
        BlockManager([owned("device", 1)], offload="never", threads=False)  # type: ignore[arg-type]
    scene = Scene()
    with pytest.raises(TierError, match="pairs of 64-bit integers"):
        scene.manager.where(["a"])
