# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A cache on its host's link moves the same bytes, counts them, and stops between pieces; two
processes share the link, and one continues when the other is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from beluga_bench.system.throttlers import Queue
from support import role
from support.emulation import needs_a_cpu

from beluga import IndexServer, KVCache, Pool
from beluga.errors import TransferCancelledError, TransferError
from beluga.index import check_pool
from beluga.transfer import (
    CopySettings,
    CpuEngine,
    Direction,
    IoHandle,
    Link,
    LinkSettings,
    Speed,
    TransferClass,
    host_link,
    parse_settings,
    plan_blocks,
    settings_for,
)
from beluga.transfer.link import LinkDirection
from tests.kvcache.conftest import digests, payload

LENGTH = 5 << 18
PIECE = 256 << 10
FAST = LinkSettings(read=Speed(10**12), write=Speed(10**12), device=None, duplex=False)
SLOW = LinkSettings(read=Speed(4 << 20), write=Speed(4 << 20), device=None, duplex=False)
WAIT_S = 60


@pytest.fixture
def link(pool: Pool, shm: Path) -> Iterator[Link]:
    made = Link("cache", FAST, pool=pool, directory=shm)
    yield made
    made.close()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("check_checksums", [True, False])
@pytest.mark.parametrize(("fragments", "chunk_size"), [(1, 16 << 10), (1, LENGTH), (7, LENGTH)])
def test_bytes_on_a_link_are_correct_and_counted_by_class(
    pool: Pool,
    server: IndexServer,
    link: Link,
    *,
    threads: int,
    check_checksums: bool,
    fragments: int,
    chunk_size: int,
) -> None:
    """Fragments have odd lengths, so a piece ends in the middle of a fragment and of a chunk."""
    blocks = payload(4, LENGTH)
    targets = np.zeros_like(blocks)
    cuts = np.linspace(0, LENGTH, fragments + 1).astype(int)[1:-1]
    settings = {"threads": threads, "check_checksums": check_checksums, "chunk_size": chunk_size}
    with KVCache(pool, namespace="test", link=link, **settings) as cache:  # type: ignore[arg-type]
        assert cache.put(digests(4), [np.split(block, cuts) for block in blocks]).stored == 4
        result = cache.get(digests(4), [np.split(target, cuts) for target in targets])
        carried = cache.transfer_stats()
    assert (result.hits, result.mismatches) == (4, 0)
    assert np.array_equal(blocks, targets)
    assert carried[TransferClass.OFFLOAD].bytes == 4 * LENGTH
    assert carried[TransferClass.ONBOARD].bytes == 4 * LENGTH
    assert carried[TransferClass.ONBOARD].pieces >= 4 * LENGTH // PIECE
    assert carried[TransferClass.ONBOARD].unthrottled == 0
    assert link.bytes_of(TransferClass.ONBOARD)[0] == 4 * LENGTH
    assert all(member.owner == 0 for member in link.directions[Direction.READ].handle.members)
    bucket = link.directions[Direction.READ].handle.bucket
    assert (int(bucket.ceil) - int(bucket.tail) - int(bucket.limit)) % 2**64 == 0


def test_blocks_stored_with_a_link_are_found_without(
    pool: Pool, server: IndexServer, link: Link
) -> None:
    blocks = payload(2, LENGTH)
    targets = np.zeros_like(blocks)
    kind = TransferClass.PREFETCH
    with (
        KVCache(pool, namespace="test", link=link, write_class=TransferClass.SCRUB) as linked,
        KVCache(linked.client, namespace="test") as bare,
        KVCache(linked.client, namespace="test", link=link, read_class=kind) as ahead,
    ):
        linked.put(digests(2), blocks)
        assert bare.get(digests(2), targets).hits == 2
        assert np.array_equal(blocks, targets)
        assert ahead.get(digests(2), targets).hits == 2
        assert not any(stats.pieces for stats in bare.transfer_stats().values())
    assert link.bytes_of(kind)[0] == link.bytes_of(TransferClass.SCRUB)[0] == 2 * LENGTH


def test_an_engine_of_a_cache_is_scheduled_on_the_link(
    pool: Pool, server: IndexServer, link: Link
) -> None:
    blocks = payload(2, LENGTH)
    targets = np.zeros_like(blocks)
    with KVCache(pool, namespace="test", link=link, engine=CpuEngine(pool, 1)) as cache:
        assert cache.put(digests(2), blocks).stored == 2
        assert cache.get(digests(2), targets).hits == 2
        assert cache.transfer_stats()[TransferClass.OFFLOAD].bytes == 2 * LENGTH
    assert np.array_equal(blocks, targets)


def test_a_put_that_is_stopped_ends_at_the_next_piece(
    pool: Pool, server: IndexServer, shm: Path
) -> None:
    """At 4 MiB/s the put would take seconds; the link admits a piece every 60 ms."""
    blocks = payload(4, LENGTH)
    link = Link("slow", SLOW, pool=pool, directory=shm)
    handle = IoHandle(link)
    with KVCache(pool, namespace="test", link=handle) as cache:
        direction = link.directions[Direction.WRITE]
        stop = threading.Thread(target=lambda: (_moved(direction), handle.stop()))
        stop.start()
        with pytest.raises(TransferCancelledError, match="interrupted"):
            cache.put(digests(4), blocks)
        stop.join()
        assert direction.bytes_of(TransferClass.OFFLOAD) < 4 * LENGTH
        with pytest.raises(TransferCancelledError):
            cache.put(digests(4), blocks)
        handle.resume()
        assert cache.lookup(digests(4)) == 0  # no block of it was published
        assert cache.put(digests(1), blocks[:1]).stored == 1
        targets = np.zeros_like(blocks[:1])
        handle.stop()
        with pytest.raises(TransferCancelledError):
            cache.get(digests(1), targets)
        handle.resume()
        assert cache.get(digests(1), targets).hits == 1
        assert np.array_equal(blocks[:1], targets)
    handle.close()
    link.close()


def _moved(direction: LinkDirection) -> None:
    end = time.monotonic() + WAIT_S
    while direction.bytes_of(TransferClass.OFFLOAD) < 2 * PIECE and time.monotonic() < end:
        time.sleep(0.002)


def test_threads_without_contention_acquire_all_parts_at_once(pool: Pool, link: Link) -> None:
    """There are at least eight parts, which would be eight admissions if each one acquired its
    own.
    """
    handle = IoHandle(link)
    settings = dataclasses.replace(CopySettings.default(), part=64 << 10)
    engine = CpuEngine(pool, 2, settings=settings, handle=handle)
    source, target = payload(1, LENGTH), np.zeros_like(payload(1, LENGTH))
    first = -(-pool.geometry.data_offset // LENGTH) * LENGTH
    plans = [
        plan_blocks(
            memory.ctypes.data + np.arange(0, LENGTH, 32 << 10, np.uint64)[None, :],
            np.full(LENGTH >> 15, 32 << 10),
            np.array([first], np.uint64),
            owners=(memory,),
        )
        for memory in (source, target)
    ]
    requests = []
    for _ in range(20):  # sometimes both acquire at the same time
        before = handle.stat(Direction.WRITE).polls
        engine.gather_write(plans[0]).wait()
        requests.append(handle.stat(Direction.WRITE).polls - before)
    engine.scatter_read(plans[1]).wait()
    assert np.array_equal(source, target)
    assert 1 <= min(requests) <= 4
    assert handle.transfer_stats(TransferClass.OFFLOAD).bytes == 20 * LENGTH
    handle.close()


def test_a_copy_that_waited_too_long_continues_without_tokens(
    pool: Pool, server: IndexServer, link: Link
) -> None:
    """A stopped process holds all tokens of the link."""
    held = Queue(link.directions[Direction.READ], now_ns=time.monotonic_ns())
    limit = int(link.directions[Direction.READ].handle.bucket.limit)
    held.push(TransferClass.OFFLOAD, limit, 1)
    assert held.poll(time.monotonic_ns()) is not None
    blocks = payload(1, PIECE)
    with KVCache(pool, namespace="test", link=link) as cache:
        assert cache.put(digests(1), blocks).stored == 1
        carried = cache.transfer_stats()[TransferClass.OFFLOAD]
    assert (carried.unthrottled, carried.pieces) == (1, 0)
    held.close()


def test_a_shared_handle_counts_the_copies_of_all_its_caches(
    pool: Pool, server: IndexServer, link: Link
) -> None:
    handle = IoHandle(link)
    with KVCache(pool, namespace="test", link=handle) as cache:
        assert cache.put(digests(1), payload(1, PIECE)).stored == 1
        assert cache.transfer_stats()[TransferClass.OFFLOAD].bytes == PIECE
        assert cache.transfer_stats(own=True)[TransferClass.OFFLOAD].bytes == 0
    handle.close()


def test_copies_on_a_full_link_are_unthrottled(
    pool: Pool, server: IndexServer, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    direction = link.directions[Direction.READ]
    queues = []
    while True:
        try:
            queues.append(Queue(direction, now_ns=0))
        except OSError:
            break
    blocks = payload(1, PIECE)
    with KVCache(pool, namespace="test", link=link) as cache:
        assert cache.put(digests(1), blocks).stored == 1
        assert cache.get(digests(1), np.zeros_like(blocks)).hits == 1
    assert caplog.text.count("are not throttled") == 1
    for queue in queues:
        queue.close()


def test_a_check_of_payload_is_scrubbing(pool: Pool, server: IndexServer, link: Link) -> None:
    handle = IoHandle(link)
    with KVCache(pool, namespace="test") as cache:
        cache.put(digests(2), payload(2, LENGTH))
        admission = (handle.io_queue, TransferClass.SCRUB)
        report = check_pool(pool, payload=True, admission=admission)
        assert (report.block_count, report.finding_count) == (2, 0)
        carried = handle.transfer_stats(TransferClass.SCRUB)
        assert carried.bytes >= 2 * LENGTH
        assert carried.pieces >= 2 * LENGTH // PIECE
        check_pool(pool, admission=admission)  # only of lines
        assert handle.transfer_stats(TransferClass.SCRUB) == carried
    handle.close()


# ---- The host's link


def test_the_link_of_a_pool_is_shared_and_removed_with_its_last_user(pool: Pool, shm: Path) -> None:
    first = host_link(pool, directory=shm)
    second = host_link(pool, LinkSettings(), directory=shm)
    assert second.path == first.path
    assert pool.id in first.path.name
    assert second.settings == first.settings != LinkSettings()
    assert not first.settings.duplex  # files lie in this host's memory
    assert first.settings == settings_for(pool)
    assert first.settings.pieces >= 2
    first.close()
    assert second.path.exists()
    second.close()
    assert not second.path.exists()
    third = host_link(pool, LinkSettings(), directory=shm)
    assert third.settings == LinkSettings()
    third.close()


def test_a_cache_creates_the_link_of_the_host(pool: Pool, server: IndexServer) -> None:
    blocks = payload(1, LENGTH)
    with KVCache(pool, namespace="test", link=FAST) as cache:
        link = host_link(pool)
        assert link.settings == FAST
        assert link.path.parent == pool.runtime_dir
        assert cache.put(digests(1), blocks).stored == 1
        assert link.bytes_of(TransferClass.OFFLOAD)[0] == LENGTH
    link.close()
    assert not link.path.exists()


def test_the_link_setting_is_parsed() -> None:
    assert parse_settings("auto") is None
    both, apart = parse_settings("20"), parse_settings("46.2/33")
    assert both is not None
    assert apart is not None
    assert (both.read, both.duplex) == (Speed(20_000_000_000), False)
    assert (apart.read, apart.write) == (Speed(46_200_000_000), Speed(33_000_000_000))
    assert apart.duplex
    for wrong in ("", "fast", "1/2/3", "-1", "0", "nan", "inf"):
        with pytest.raises(TransferError):
            parse_settings(wrong)


# ---- Two processes on one link


COUNT, SIZE = 4, 1 << 20
RATE, SHARED_PIECE = 32 << 20, 64 << 10
SHARED = LinkSettings(
    read=Speed(RATE),
    write=Speed(RATE),
    device=None,
    duplex=False,
    piece_size=SHARED_PIECE,
    shares=(8, 4, 1, 1),
)
KINDS = (TransferClass.ONBOARD, TransferClass.OFFLOAD)


def copier(directory: str, paths: list[str], what: str) -> None:
    """Put or get over the link until the input has a byte; then print the unthrottled pieces."""
    blocks = np.ones((COUNT, SIZE), np.uint8)
    with Pool.open(paths) as pool:
        link = Link("host", SHARED, pool=pool, directory=Path(directory))
        with KVCache(pool, namespace="test", link=link, timeout_s=60) as cache:
            os.set_blocking(sys.stdin.fileno(), False)
            role.reply("ready")
            for turn in itertools.count(1):
                if sys.stdin.buffer.raw.read(1) is not None:  # type: ignore[attr-defined]
                    break
                if what == "put":
                    keys = digests(COUNT, start=COUNT * turn)
                    assert cache.put(keys, blocks).stored == COUNT
                    cache.remove(keys)
                else:
                    assert cache.get(digests(COUNT), blocks).hits == COUNT
            role.reply(sum(stats.unthrottled for stats in cache.transfer_stats().values()))


@pytest.fixture
def shared_link(pool: Pool, server: IndexServer, shm: Path) -> Iterator[Link]:
    """Make a link, after the blocks for the gets were put without it."""
    with KVCache(pool, namespace="test") as cache:
        assert cache.put(digests(COUNT), np.ones((COUNT, SIZE), np.uint8)).stored == COUNT
    made = Link("host", SHARED, pool=pool, directory=shm)
    yield made
    made.close()


@pytest.fixture
def process(pool: Pool, shared_link: Link, shm: Path) -> Iterator[Callable[[str], role.Process]]:
    paths = [device.path for device in pool.devices]
    with contextlib.ExitStack() as started:
        yield lambda what: started.enter_context(role.Process(copier, shm, paths, what))


def moved(link: Link, seconds: float) -> tuple[list[int], float]:
    """Return the bytes of each class that move within ``seconds``."""
    before, start = [link.bytes_of(kind)[0] for kind in KINDS], time.monotonic()
    time.sleep(seconds)
    after, end = [link.bytes_of(kind)[0] for kind in KINDS], time.monotonic()
    return [b - a for a, b in zip(before, after, strict=True)], end - start


@pytest.mark.long
@needs_a_cpu("too few pieces pass in a second to compare their shares")
def test_gets_have_their_share_during_endless_puts(
    shared_link: Link, process: Callable[[str], role.Process]
) -> None:
    """The shares are 8 to 1 of a link that each of them could fill alone."""
    for what in ("get", "put"):
        process(what)
    seen, right = [], 0
    for _ in range(WAIT_S):  # a busy machine may starve either process; such seconds do not count
        (onboard, offload), took_s = moved(shared_link, 1)
        assert onboard + offload <= 1.1 * RATE * took_s + 16 * SHARED_PIECE
        seen.append((onboard, offload))
        right += offload > 0 and 3 < onboard / offload < 20
        if right == 5:
            break
    assert right == 5, f"not 8 to 1: {seen}"


def test_a_process_killed_during_a_copy_blocks_no_other(
    shared_link: Link, process: Callable[[str], role.Process]
) -> None:
    getter, putter = process("get"), process("put")
    direction = shared_link.directions[Direction.READ]
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end and not all(direction.bytes_of(kind) for kind in KINDS):
        time.sleep(0.01)
    putter.kill()
    fastest = 0.0
    for _ in range(10):
        (onboard, _), took_s = moved(shared_link, 0.5)
        fastest = max(fastest, onboard / took_s)
        if fastest > 0.7 * RATE:
            break
    assert fastest > 0.7 * RATE  # nearly the whole link
    members = [member for member in direction.handle.members if member.owner != 0]
    assert [int(member.owner) & 0xFFFFFFFF for member in members] == [getter.pid]
    assert getter.request("enough") == "0", "no piece was unthrottled"
