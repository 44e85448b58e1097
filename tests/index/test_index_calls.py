# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Calls of the index: the arguments that they reject, their waits, their errors, calls that take
several messages or polls, and any bytes that a client sends (D13).
"""

import errno
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.blocks import hasty_client, held, keys, put
from support.emulation import fewer
from support.watched_core import WatchedCore

from beluga._ffi import ffi, lib
from beluga.errors import (
    BadReplyError,
    BadRequestError,
    BelugaError,
    HandlerError,
    RpcError,
    ServerAliveError,
)
from beluga.index import (
    BlockState,
    Grant,
    IndexClient,
    IndexServer,
    TaskClient,
    TaskRecord,
    check_devices,
    check_pool,
)
from beluga.index import check as check_module
from beluga.index.repair import repair_pool
from beluga.pool import Pool
from beluga.rpc import Client, Server

SIZE = 32 << 20
RECORD = TaskRecord(keys([1]), generation=1, block=0, length=64, deliveries=1)

KEYS_MAX = lib.BL_CALL_KEYS_MAX  # keys of a message
HEAD = ffi.sizeof("bl_block_request")
LOOKS = 300  # polls in the second that a removal waits for a disk, with sleeps of up to 4 ms

METHODS = {
    name: getattr(lib, f"BL_METHOD_{name}")
    for name in (
        *("LOOKUP", "RESERVE", "COMMIT", "ABORT", "RELEASE", "REMOVE"),
        *("STAT", "PING", "RETIRE"),
    )
}
ITEM_SIZE = {"LOOKUP": 16, "RESERVE": 16, "REMOVE": 16, "COMMIT": 32, "ABORT": 32, "RELEASE": 32}


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> WatchedCore:
    core = WatchedCore()
    for module in ("check", "client", "repair", "server", "work"):
        monkeypatch.setattr(f"beluga.index.{module}.lib", core)
    return core


@pytest.mark.parametrize(
    "wrong",
    [
        [[1, 2]],
        np.zeros((1, 2)),
        np.zeros((1, 2), np.int64),
        np.zeros(2, np.uint64),
        np.zeros((1, 1), np.uint64),
        np.zeros((1, 3), np.uint64),
        np.zeros((1, 2, 2), np.uint64),
    ],
    ids=["list", "float", "signed", "flat", "narrow", "wide", "deep"],
)
@pytest.mark.parametrize("name", ["lookup", "pin", "remove", "reserve"])
def test_keys_of_another_kind_or_shape_are_refused(
    index: IndexClient, name: str, wrong: Any
) -> None:
    options = {"length": 64} if name == "reserve" else {}
    with pytest.raises(ValueError, match=r"uint64 array of shape \(count, 2\)"):
        getattr(index, name)(wrong, **options)


def test_strided_keys_equal_contiguous_keys(index: IndexClient) -> None:
    put(index, range(4))
    assert len(index.lookup(keys(range(8))[0:4:2]).hits) == 2
    assert len(index.lookup(np.asfortranarray(keys(range(4)))).hits) == 4


CALLS: dict[str, Callable[..., object]] = {
    "lookup": lambda index, hits, pins: index.lookup(keys([1])),
    "pin": lambda index, hits, pins: index.pin(keys([1])),
    "unpin": lambda index, hits, pins: index.unpin(pins),
    "reserve": lambda index, hits, pins: index.reserve(keys([1]), length=64),
    "commit": lambda index, hits, pins: index.commit(hits),
    "abort": lambda index, hits, pins: index.abort(hits),
    "release": lambda index, hits, pins: index.release(hits),
    "remove": lambda index, hits, pins: index.remove(keys([1])),
    "stat": lambda index, hits, pins: index.stat(),
    "claim": lambda index, hits, pins: TaskClient(index._client).claim(1, visible_s=1),
    "extend": lambda index, hits, pins: TaskClient(index._client).extend(RECORD, visible_s=1),
    "count": lambda index, hits, pins: TaskClient(index._client).count(1),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_reports_a_missing_server(pool: Pool, name: str) -> None:
    with IndexServer(pool), Client(pool) as client:
        put(IndexClient(client), [1])
        index = IndexClient(client)
        hits, pins = index.lookup(keys([1])).hits, index.pin(keys([1]))
    with IndexServer(pool) as server, hasty_client(pool, 0.05) as client:
        index = IndexClient(client)
        server.stop()
        with pytest.raises(RpcError):  # no server, or none in time
            CALLS[name](index, hits, pins)


def test_calls_use_the_timeout_of_their_client(
    pool: Pool, server: IndexServer, core: WatchedCore
) -> None:
    with Client(pool, timeout_s=1.5) as client:
        IndexClient(client).lookup(keys([1]))
        TaskClient(client).count(1)
    assert core.last("bl_lookup")[-1] == core.last("bl_task_count")[-1] == 1_500_000_000


def test_a_grant_has_by_default_no_fingerprint_and_no_chunks(
    index: IndexClient, core: WatchedCore
) -> None:
    (grant,) = index.reserve(keys([1]), length=4096)
    requested = core.last("bl_reserve")[3]
    assert (requested.length, requested.fingerprint, requested.chunk_size) == (4096, 0, 0)
    index.reserve(keys([2]), length=4096, fingerprint=7, chunk_size=64)
    requested = core.last("bl_reserve")[3]
    assert (requested.fingerprint, requested.chunk_size) == (7, 64)
    index.commit([grant])
    assert core.last("bl_commit_blocks")[1][0].checksums_crc == 0


def test_pins_are_dropped_once_each(index: IndexClient) -> None:
    put(index, range(3))
    single, triple = index.pin(keys([0])), index.pin(keys(range(5)))
    assert (single.count, triple.count) == (1, 3)
    assert index.stat().pinned_count == 3
    assert [index.unpin(triple), index.unpin(triple), index.unpin(single)] == [3, 0, 1]
    assert index.stat().pinned_count == 0
    assert index.unpin(index.pin(keys([9]))) == 0


@pytest.mark.parametrize(
    ("visible_s", "ms"), [(0.25, 250), (2, 2000), (0, 0), (-1.0, 0), (1e6, 600_000)]
)
def test_claims_have_lifetimes_in_milliseconds(
    index: IndexClient, core: WatchedCore, visible_s: float, ms: int
) -> None:
    assert TaskClient(index._client).claim(1, visible_s=visible_s) is None
    assert core.last("bl_task_claim")[2] == ms


# ---- Servers.


def test_by_default_no_process_is_declared_gone_and_heartbeats_time_out_after_5_s(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = WatchedCore()
    monkeypatch.setattr("beluga.rpc.server.lib", core)
    IndexServer(pool).stop()
    assert core.last("bl_server_heartbeat_lost")[1] == 5_000_000_000
    assert "bl_server_declare_gone" not in core.names()


def test_the_index_is_freed_with_its_server(pool: Pool, core: WatchedCore) -> None:
    server = IndexServer(pool)
    server.stop()
    server.stop()
    assert core.names().count("bl_index_destroy") == 1


def test_a_failed_creation_of_an_index_is_an_error(pool: Pool, core: WatchedCore) -> None:
    core.fails["bl_index_create"] = -errno.ENOMEM
    with pytest.raises((OSError, BelugaError, MemoryError)):
        IndexServer(pool)
    pool.close()


# ---- Checks and repairs.


def test_the_report_of_damaged_superblocks_omits_later_tables(
    shm: Path,
) -> None:
    path = shm / "a"
    Pool.create([path], device_size=16 << 20, sparse=True).close()
    with Pool.open([path]) as pool:
        epoch, half = check_pool(pool).epoch, check_pool(pool).half
    assert check_devices([path]) == check_module.CheckReport(epoch, half, False, 0, 0, 0, 0, 0, ())
    with path.open("r+b") as file:
        file.write(bytes(4096))
    report = check_devices([path])
    assert (report.finding_count, len(report.findings)) == (1, 1)
    assert report == check_module.CheckReport(0, 0, False, 0, 0, 0, 0, 1, report.findings)


def test_devices_are_checked_with_payload_on_request_only(
    pool: Pool, paths: list[Path], core: WatchedCore
) -> None:
    check_devices(paths)
    assert not core.last("bl_check_pool")[1]
    check_devices(paths, payload=True)
    assert core.last("bl_check_pool")[1]
    repair_pool(pool)
    assert not any(arguments[1] for name, arguments in core.calls[2:] if name == "bl_check_pool")


def test_a_check_or_repair_that_fails_is_an_error(pool: Pool, core: WatchedCore) -> None:
    core.fails["bl_check_pool"] = -errno.EAGAIN
    for look in (check_pool, repair_pool):
        with pytest.raises((OSError, BelugaError)):
            look(pool)


def test_a_server_of_another_host_stops_a_repair(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pool, "refuse_in_use", lambda _: None)  # this host does not have its locks
    paths = [shm / "a"]
    with (
        Pool.create(paths, device_size=SIZE, sparse=True, coherence="software") as pool,
        IndexServer(pool),
        pytest.raises(ServerAliveError, match="--declare-gone"),
    ):
        repair_pool(pool)


def reply(count: int, state: int = 0, after: bytes = b"") -> bytes:
    return bytes(ffi.buffer(ffi.new("bl_block_reply *", {"count": count, "state": state}))) + after


class Script:
    """A server that records the items of each call, and answers by functions of their count."""

    def __init__(self, scripted_pool: Pool) -> None:
        self.server = Server(scripted_pool)
        self.items: dict[int, list[bytes]] = {}
        self.answers: dict[int, Callable[[int], bytes]] = {}
        for method in (lib.BL_METHOD_RELEASE, lib.BL_METHOD_REMOVE, lib.BL_METHOD_REMOVING):
            self.items[method] = []
            self.server.handle(method, lambda request, method=method: self._run(method, request))
        self.answers[lib.BL_METHOD_REMOVE] = lambda count: reply(count, state=1)  # a disk has them
        self.server.start()

    def _run(self, method: int, request: bytes) -> bytes:
        head = ffi.from_buffer("bl_block_request *", request[:HEAD])
        self.items[method].append(request[HEAD:])
        return self.answers[method](head.count)

    def calls(self, method: int) -> int:
        return len(self.items[method])


@pytest.fixture
def scripted_pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool.create([tmp_path / "a"], device_size=64 << 20, sparse=True) as scripted_pool:
        yield scripted_pool


@pytest.fixture
def script(scripted_pool: Pool) -> Iterator[Script]:
    script = Script(scripted_pool)
    yield script
    script.server.stop()


@pytest.fixture
def scripted(scripted_pool: Pool, script: Script) -> Iterator[IndexClient]:
    with Client(scripted_pool) as client:
        yield IndexClient(client)


def hits(count: int) -> list[Grant]:
    return [Grant(BlockState.HIT, 0, 0, 7 + i, i, 0, (i, i)) for i in range(count)]


def test_pins_of_several_messages_are_each_released_once(
    script: Script, scripted: IndexClient
) -> None:
    script.answers[lib.BL_METHOD_RELEASE] = reply
    assert scripted.release(hits(2 * KEYS_MAX + 40)) == 2 * KEYS_MAX + 40
    sent = b"".join(script.items[lib.BL_METHOD_RELEASE])
    commits = ffi.from_buffer("bl_commit[]", sent)
    assert [(commit.block, commit.generation) for commit in commits] == [
        (i, 7 + i) for i in range(2 * KEYS_MAX + 40)
    ]
    assert script.calls(lib.BL_METHOD_RELEASE) == 3


def test_a_message_that_a_server_cannot_answer_is_an_error(
    script: Script, scripted: IndexClient
) -> None:
    def second_fails(count: int) -> bytes:
        if script.calls(lib.BL_METHOD_RELEASE) > 1:
            raise ValueError("no more")
        return reply(count)

    def no_report(count: int) -> bytes:
        raise ValueError("no report")

    script.answers[lib.BL_METHOD_RELEASE] = second_fails
    script.answers[lib.BL_METHOD_REMOVING] = no_report
    with pytest.raises(HandlerError):
        scripted.release(hits(KEYS_MAX + 1))
    with pytest.raises(HandlerError):
        scripted.remove(keys(range(3)))


def test_keys_of_several_messages_are_each_removed_and_polled_once(
    script: Script, scripted: IndexClient
) -> None:
    names = keys(range(KEYS_MAX + 40))
    script.answers[lib.BL_METHOD_REMOVING] = lambda count: reply(count, after=bytes(count))
    assert scripted.remove(names) == len(names)
    for method in (lib.BL_METHOD_REMOVE, lib.BL_METHOD_REMOVING):
        assert b"".join(script.items[method]) == names.tobytes()
        assert script.calls(method) == 2


def test_a_removal_polls_until_the_disk_has_attempted_it(
    script: Script, scripted: IndexClient
) -> None:
    names = keys(range(KEYS_MAX + 40))

    script.answers[lib.BL_METHOD_REMOVING] = lambda count: reply(
        count, state=script.calls(lib.BL_METHOD_REMOVING) < 4, after=bytes(count)
    )
    assert scripted.remove(names) == len(names)
    first, others = names[:KEYS_MAX].tobytes(), names[KEYS_MAX:].tobytes()
    assert script.items[lib.BL_METHOD_REMOVING] == [first, first, first, first, others]


def test_the_wait_of_a_removal_for_an_idle_disk_is_bounded(
    script: Script, scripted: IndexClient
) -> None:
    script.answers[lib.BL_METHOD_REMOVING] = lambda count: reply(
        count, state=script.calls(lib.BL_METHOD_REMOVING) <= 2 * LOOKS, after=bytes(count)
    )
    assert scripted.remove(keys(range(3))) == 3
    assert 1 < script.calls(lib.BL_METHOD_REMOVING) < LOOKS


def test_a_removal_without_a_disk_takes_one_call(script: Script, scripted: IndexClient) -> None:
    script.answers[lib.BL_METHOD_REMOVE] = reply
    assert scripted.remove(keys(range(3))) == 3
    assert script.calls(lib.BL_METHOD_REMOVE) == 1
    assert script.calls(lib.BL_METHOD_REMOVING) == 0


@pytest.mark.parametrize("fewer", [1, KEYS_MAX])
def test_a_reply_for_fewer_keys_than_requested_is_an_error(
    script: Script, scripted: IndexClient, fewer: int
) -> None:
    script.answers[lib.BL_METHOD_REMOVING] = lambda count: reply(
        count - fewer, after=bytes(count - fewer)
    )
    with pytest.raises(BadReplyError):
        scripted.remove(keys(range(KEYS_MAX)))


class Target:
    """A server, a client that may send anything, and the state that must not change."""

    def __init__(self, directory: Path) -> None:
        self.pool = Pool.create([directory / "a"], device_size=32 << 20, sparse=True, max_blocks=64)
        self.server = IndexServer(self.pool)
        self.server.start()
        self.rude, self.polite = Client(self.pool), Client(self.pool)
        self.index = IndexClient(self.polite)
        put(self.index, range(4), length=4096)
        self.hits = self.index.lookup(keys(range(4)), pin=True).hits

    def send(self, method: str, request: bytes) -> None:
        with suppress(BelugaError):
            self.rude.call(METHODS[method], request)

    def check(self) -> None:
        """Check that the other session's pinned blocks are present, and that the effects of the
        hostile one can be undone.
        """
        assert held(self.index, range(4)) == {0, 1, 2, 3}
        assert self.index.stat().pinned_count >= 4
        assert self.server.failure is None


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as directory:
        target = Target(Path(directory))
        yield target
        target.rude.close()
        end = target.index.stat()
        assert (end.grant_count, end.pinned_count) == (0, 4)
        target.pool.close()


def head(count: int, *, length: int = 4096, chunk_size: int = 0, flags: int = 0) -> bytes:
    fields = {"count": count, "length": length, "chunk_size": chunk_size, "flags": flags}
    return bytes(ffi.buffer(ffi.new("bl_block_request *", fields)))


@pytest.mark.parametrize("method", ITEM_SIZE)
@pytest.mark.parametrize("count", [0, 2, 3, 0xFFFFFFFF, 1 << 28, 1 << 27])
def test_a_count_that_does_not_match_the_bytes_is_refused(
    target: Target, method: str, count: int
) -> None:
    errors = target.server.stat().error_count
    for request in (head(count) + bytes(ITEM_SIZE[method]), head(count)[:-1], b""):
        with pytest.raises(BadRequestError):
            target.rude.call(METHODS[method], request)
    assert target.server.stat().error_count == errors + 3
    target.check()


@pytest.mark.parametrize("block", [0, 63, 64, 1 << 31, 0xFFFFFFFF])
@pytest.mark.parametrize("method", ["COMMIT", "ABORT", "RELEASE"])
def test_a_block_number_of_another_session_has_no_effect(
    target: Target, method: str, block: int
) -> None:
    before = target.index.stat()
    commit = ffi.new("bl_commit *", {"block": block, "key": target.hits[0].key})
    target.send(method, head(1) + bytes(ffi.buffer(commit)))
    after = target.index.stat()
    for name in ("block_count", "grant_count", "pinned_count", "commit_count", "abort_count"):
        assert getattr(after, name) == getattr(before, name), name


@settings(max_examples=fewer(300), deadline=None)
@given(method=st.sampled_from(sorted(METHODS)), request=st.binary(max_size=400))
def test_random_bytes_do_no_harm(target: Target, method: str, request: bytes) -> None:
    target.send(method, request)
    target.check()


numbers = st.sampled_from([0, 1, 2, 63, 64, 4096, 65536, 1 << 20, 1 << 31, (1 << 32) - 1])


@settings(max_examples=fewer(300), deadline=None)
@given(
    method=st.sampled_from(sorted(ITEM_SIZE)),
    items=st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=20),
    length=numbers,
    chunk_size=numbers,
    flags=numbers,
)
def test_random_valid_requests_do_no_harm(
    target: Target, *, method: str, items: list[bytes], length: int, chunk_size: int, flags: int
) -> None:
    body = b"".join(item[: ITEM_SIZE[method]] for item in items)
    request = head(len(items), length=length, chunk_size=chunk_size, flags=flags) + body
    target.send(method, request)
    target.check()


@settings(max_examples=fewer(100), deadline=None)
@given(
    method=st.sampled_from(["COMMIT", "ABORT", "RELEASE"]),
    blocks=st.lists(st.integers(0, 70), min_size=1, max_size=20),
    generation=st.integers(0, 1 << 41),
)
def test_guessed_blocks_do_no_harm(
    target: Target, method: str, blocks: list[int], generation: int
) -> None:
    commits = [
        {"block": block, "generation": generation, "key": target.hits[block % 4].key}
        for block in blocks
    ]
    body = bytes(ffi.buffer(ffi.new("bl_commit[]", commits)))
    target.send(method, head(len(blocks)) + body)
    target.check()
