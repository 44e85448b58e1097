# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The remote tier over stores that hang, fail, refuse and return wrong data, without a network; its
circuit breaker in virtual time; and the bytes of an object.
"""

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from remote_stores import DictStore, blocks, same
from support.blocks import eventually
from support.virtual_clock import Clock

from beluga.coherence import crc32c
from beluga.metrics import REGISTRY, Distribution
from beluga.tiers.hanging import StoreThreads
from beluga.tiers.remote import RefusedError, RemoteSettings, RemoteTier
from beluga.tiers.remote.health import CLOSED, HALF_OPEN, OPEN, Breaker
from beluga.tiers.remote.tier import HEADER, WrongObjectError, name_of, pack, unpack

THREADS = 4
PATIENT = RemoteSettings(operation_s=60, load_s=120, save_s=120, threads=THREADS, backoff_s=0.001)
HASTY_THREADS = 2
HASTY = RemoteSettings(
    operation_s=0.1,
    load_s=0.3,
    save_s=0.3,
    threads=HASTY_THREADS,
    abandoned=3,
    open_s=0.01,
    open_limit_s=0.02,
)

Open = Callable[..., RemoteTier]

BREAKER_SETTINGS = RemoteSettings(failures=3, open_s=1.0, open_limit_s=8.0)

RECORDS, PAYLOAD = blocks([200])
KEY = RECORDS["key"][0]
OBJECT = bytes(pack(RECORDS[0], PAYLOAD[0]))


@pytest.fixture
def open_tier(request: pytest.FixtureRequest) -> Iterator[Open]:
    opened: list[RemoteTier] = []

    def make(store: DictStore, settings: RemoteSettings = PATIENT) -> RemoteTier:
        name = f"test://{request.node.name}/{len(opened)}"
        opened.append(RemoteTier(store, name=name, settings=settings))
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()


def count(metric: str, tier: RemoteTier, **labels: str) -> float:
    series = REGISTRY.snapshot()[f"beluga_tier_{metric}"].series
    value = series.get(tuple(sorted({"tier": tier.name, **labels}.items())), 0)
    return value.count if isinstance(value, Distribution) else value


class Gate:
    """Blocks operations until it is opened."""

    def __init__(self, *operations: str) -> None:
        self._operations = operations
        self.open = threading.Event()

    def __call__(self, operation: str) -> None:
        if operation in self._operations:
            self.open.wait()


def test_a_call_times_out_if_the_store_never_replies(open_tier: Open) -> None:
    gate = Gate("get", "put", "exists", "delete")
    store = DictStore(gate)
    tier = open_tier(store, HASTY)
    records, payload = blocks([100] * 10)
    for _ in range(3):
        assert same(tier.load(records["key"]), records, payload) == [False] * 10
        assert not tier.save(records, payload).any()
        assert not tier.contains(records["key"]).any()
        assert tier.remove(records["key"]) == 0
    assert count("breaker_openings_total", tier) >= 1
    assert count("errors_total", tier, kind="timeout") >= 3
    assert not gate.open.is_set()
    gate.open.set()
    assert eventually(lambda: bool(tier.save(records, payload).all()), 60)
    assert all(same(tier.load(records["key"]), records, payload))
    assert eventually(lambda: count("abandoned_threads", tier) == 0, 60)


def test_threads_that_hang_are_bounded(open_tier: Open) -> None:
    gate = Gate("get", "exists")
    store = DictStore(gate)
    tier = open_tier(store, HASTY)
    keys = blocks([1] * 4)[0]["key"]

    def all_hang() -> bool:
        tier.load(keys)
        return count("abandoned_threads", tier) == HASTY_THREADS + HASTY.abandoned

    assert eventually(all_hang, 60)
    until = time.monotonic() + 5 * HASTY.operation_s  # in which another operation would hang
    while time.monotonic() < until:
        assert tier.load(keys) == [None] * 4
        time.sleep(HASTY.open_s)
    assert store.most_running == HASTY_THREADS + HASTY.abandoned
    gate.open.set()
    assert eventually(lambda: bool(tier.contains(keys).any()) or not store.running, 60)


def test_a_store_is_not_closed_under_a_thread_that_hangs() -> None:
    gate = Gate("get")
    store = DictStore(gate)
    tier = RemoteTier(store, name="test://hangs", settings=HASTY)
    key = blocks([1])[0]["key"]
    # A load that no thread has started within its limit does not hang.
    assert eventually(lambda: tier.load(key) == [None] and store.running > 0)
    tier.close()
    assert not store.ended
    gate.open.set()


def broken(_: str) -> None:
    raise ConnectionError("no route\na page of details")


def test_an_open_breaker_sends_no_requests_to_the_store(open_tier: Open) -> None:
    settings = RemoteSettings(retries=0, open_s=1000, open_limit_s=1000, failures=3)
    store = DictStore(broken)
    tier = open_tier(store, settings)
    records, payload = blocks([10] * 50)
    assert tier.load(records["key"]) == [None] * 50
    calls = len(store.calls)
    assert 3 <= calls <= 3 + DictStore.threads, "what waits in the queue is not tried"
    for _ in range(100):
        assert tier.load(records["key"]) == [None] * 50
        assert not tier.save(records, payload).any()
    assert len(store.calls) == calls
    assert count("missed_blocks_total", tier) == 101 * 50
    assert count("breaker_state", tier) == 2


def test_one_trial_detects_the_recovery_of_the_store(open_tier: Open) -> None:
    store = DictStore(broken)
    tier = open_tier(store, RemoteSettings(retries=0, open_s=0.001, open_limit_s=0.002))
    records, payload = blocks([10])
    for _ in range(3):
        tier.load(records["key"])
    store.calls.clear()
    assert eventually(lambda: not tier.load(records["key"])[0] and len(store.calls) > 3, 60)
    assert set(store.calls) == {"exists"}, "only trials reach the store"
    assert store.most_running == 1
    store.before = lambda operation: None
    assert eventually(lambda: bool(tier.save(records, payload).all()), 60)
    assert count("breaker_state", tier) == 0


def test_a_failure_is_retried_as_configured(open_tier: Open) -> None:
    failing = [0]

    def fail(_: str) -> None:
        if failing[0]:
            failing[0] -= 1
            raise ConnectionError("reset")

    store = DictStore(fail)
    tier = open_tier(store)
    records, payload = blocks([10])
    assert tier.save(records, payload).all()
    for failures, expected in ((2, True), (3, False)):
        failing[0] = failures
        assert same(tier.load(records["key"]), records, payload) == [expected]
    assert count("retries_total", tier) == 4
    assert count("errors_total", tier, kind="store") == 1
    assert count("operation_seconds", tier, operation="load") == 1


def test_no_retry_begins_that_could_not_end_in_time(open_tier: Open) -> None:
    """An attempt may take 0.8 of operation_s, so one that took half of it is the last."""

    def slow(operation: str) -> None:
        if operation == "get":
            time.sleep(0.5)
            raise ConnectionError("reset")

    store = DictStore(slow)
    tier = open_tier(store, RemoteSettings(operation_s=1, retries=5))
    assert tier.load(blocks([1])[0]["key"]) == [None]
    assert store.calls == ["get"]


def test_a_refusal_counts_as_a_reply(open_tier: Open) -> None:
    """A full store is not retried, and still serves its objects."""
    full = threading.Event()

    def refuse(operation: str) -> None:
        if full.is_set() and operation == "put":
            raise RefusedError("out of memory")

    store = DictStore(refuse)
    tier = open_tier(store)
    records, payload = blocks([10] * 5)
    assert tier.save(records, payload).all()
    full.set()
    more, more_payload = blocks([10] * 20, seed=1)
    store.calls.clear()
    assert not tier.save(more, more_payload).any()
    assert store.calls.count("put") == 20
    assert all(same(tier.load(records["key"]), records, payload))
    assert count("breaker_state", tier) == 0
    assert count("errors_total", tier, kind="refused") == 20


def test_present_blocks_are_not_stored_again(open_tier: Open) -> None:
    store = DictStore()
    first, second = open_tier(store), RemoteTier(store, name="test://second", settings=PATIENT)
    records, payload = blocks([10] * 6)
    assert first.save(records[:4], payload[:4]).all()
    store.calls.clear()
    assert second.save(records, payload).all()
    assert store.calls.count("put") == 2
    assert count("saved_bytes_total", first) == 40
    assert count("saved_bytes_total", second) == 20
    store.close = lambda: None  # type: ignore[method-assign]
    second.close()


def test_the_caller_may_reuse_its_payload_when_save_returns(open_tier: Open) -> None:
    """Even if the store has not read the payload yet: it later reads the original bytes."""
    gate = Gate("put")
    store = DictStore(gate)
    tier = open_tier(store, HASTY)
    records, payload = blocks([1000])
    given = payload.copy()
    assert not tier.save(records, given).any()
    given[:] = 0
    gate.open.set()
    assert eventually(lambda: bool(store.objects), 60)
    assert eventually(lambda: same(tier.load(records["key"]), records, payload) == [True], 60)


def test_loads_overtake_slow_saves(open_tier: Open) -> None:
    gate = Gate("put")
    store = DictStore(gate)
    tier = open_tier(store)
    there, there_payload = blocks([100] * 8, seed=1)
    gate.open.set()
    assert tier.save(there, there_payload).all()
    gate.open.clear()
    store.most_running = 0
    with ThreadPoolExecutor(3) as savers:
        saves = [savers.submit(tier.save, *blocks([100] * 8, seed=2 + each)) for each in range(3)]
        assert eventually(lambda: store.running == THREADS // 2, 60)
        for _ in range(20):
            assert all(same(tier.load(there["key"]), there, there_payload))
        assert store.running == THREADS // 2
        gate.open.set()
        assert all(each.result().all() for each in saves)
    assert store.most_running <= THREADS


def test_urgent_loads_run_first() -> None:
    order: list[str] = []
    gate = threading.Event()
    workers = StoreThreads(2, spare=0, limit_s=60, hung=lambda begun: None)
    held = [workers.submit(gate.wait, urgent=True) for _ in range(2)]
    others = [
        workers.submit(lambda name=name: order.append(name), urgent=name == "load")
        for name in ["save"] * 3 + ["load"] * 3
    ]
    gate.set()
    workers.wait([*held, *others], time.monotonic() + 60)
    assert sorted(order[:4]) != ["save"] * 3, order
    assert order.index("load") == 0
    assert order.count("load") == 3
    workers.close(time.monotonic() + 60)


def test_a_wrong_object_is_a_miss_until_it_is_saved_again(open_tier: Open) -> None:
    store = DictStore()
    tier = open_tier(store)
    records, payload = blocks([100] * 2)
    assert tier.save(records, payload).all()
    names = list(store.objects)
    store.objects[names[0]], store.objects[names[1]] = (store.objects[name] for name in names[::-1])
    assert tier.load(records["key"]) == [None] * 2
    assert count("errors_total", tier, kind="wrong") == 2
    store.calls.clear()
    assert tier.save(records, payload).all()
    assert store.calls.count("put") == 2
    assert tier.save(records, payload).all()
    assert store.calls.count("put") == 2, "it is right again"
    assert all(same(tier.load(records["key"]), records, payload))


def test_a_block_that_is_too_large_is_not_saved(open_tier: Open) -> None:
    store = DictStore()
    tier = open_tier(store, RemoteSettings(block_bytes=1000))
    records, payload = blocks([1000, 1001, 3])
    assert tier.save(records, payload).tolist() == [True, False, True]
    assert count("errors_total", tier, kind="size") == 1


def test_one_warning_is_logged_a_minute(open_tier: Open, caplog: pytest.LogCaptureFixture) -> None:
    tier = open_tier(DictStore(broken), RemoteSettings(retries=0, failures=1000))
    keys = blocks([1] * 20)[0]["key"]
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            tier.load(keys)
    assert [each.getMessage() for each in caplog.records] == [
        f"{tier.name}: load: ConnectionError: no route"
    ]
    assert count("errors_total", tier, kind="store") == 100


@pytest.mark.parametrize("seed", range(3))
def test_concurrent_threads_never_read_wrong_bytes(open_tier: Open, seed: int) -> None:
    """The store fails, refuses, loses and damages at random."""
    chance = random.Random(seed)
    store = DictStore()

    def fault(operation: str) -> None:
        drawn = chance.random()
        if drawn < 0.05:
            raise ConnectionError("reset")
        if drawn < 0.08:
            raise RefusedError("busy")
        if drawn < 0.12 and store.objects:
            name = chance.choice(list(store.objects))
            damaged = bytearray(store.objects.get(name, b"?"))
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
            store.objects[name] = bytes(damaged)

    store.before = fault
    tier = open_tier(
        store, RemoteSettings(threads=4, backoff_s=0.0001, open_s=0.0001, open_limit_s=0.001)
    )
    records, payload = blocks([chance.randrange(2000) for _ in range(40)], seed)

    def work(worker: int) -> int:
        own, hits = random.Random(seed * 10 + worker), 0
        for _ in range(60):
            rows = np.array(own.sample(range(40), own.randrange(1, 8)))
            keys = records["key"][rows]
            match own.randrange(6):
                case 0 | 1:
                    assert tier.save(records[rows], payload[rows]).shape == rows.shape
                case 2:
                    assert tier.contains(keys).shape == rows.shape
                case 3:
                    assert 0 <= tier.remove(keys[:1]) <= 1
                case _:
                    hits += sum(same(tier.load(keys), records[rows], payload[rows]))
        return hits

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(work, range(6))) > 0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(BREAKER_SETTINGS, clock=clock.monotonic, chance=lambda: 0.5)


def fail(breaker: Breaker, times: int) -> list[bool]:
    return [breaker.failed(float("inf")) for _ in range(times)]


def delay_of(breaker: Breaker, clock: Clock) -> float:
    """Return the time until a trial starts, in tenths of a second."""
    begun = clock.now_s
    while not breaker.begin_trial():
        clock.sleep(0.1)
        assert clock.now_s < begun + 100
    return clock.now_s - begun


def test_consecutive_failures_open_the_breaker(breaker: Breaker) -> None:
    for _ in range(10):
        assert fail(breaker, 2) == [False, False]
        breaker.succeeded()
    assert breaker.state == CLOSED
    assert fail(breaker, 3) == [False, False, True]
    assert (breaker.state, breaker.closed, breaker.openings) == (OPEN, False, 1)
    assert fail(breaker, 3) == [False] * 3, "one opening is reported once"


def test_only_one_trial_is_allowed_at_a_time(breaker: Breaker, clock: Clock) -> None:
    assert not breaker.begin_trial(), "a closed breaker needs none"
    fail(breaker, 3)
    assert delay_of(breaker, clock) == pytest.approx(1, abs=0.11)
    assert breaker.state == HALF_OPEN
    clock.sleep(1000)
    assert not breaker.begin_trial()
    breaker.end_trial(True)
    assert breaker.closed


def test_the_pause_doubles_to_its_limit_and_resets_after_a_success(
    breaker: Breaker, clock: Clock
) -> None:
    fail(breaker, 3)
    for expected in (1, 2, 4, 8, 8):
        assert delay_of(breaker, clock) == pytest.approx(expected, abs=0.11)
        breaker.end_trial(False)
    delay_of(breaker, clock)
    breaker.end_trial(True)
    breaker.succeeded()
    fail(breaker, 3)
    assert delay_of(breaker, clock) == pytest.approx(1, abs=0.11)


def test_a_store_that_only_passes_trials_gets_longer_pauses(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    for expected in (1, 2, 4, 8):
        assert delay_of(breaker, clock) == pytest.approx(expected, abs=0.11)
        breaker.end_trial(True)
        assert fail(breaker, 1) == [True], "after a trial, one failure is enough"


def test_late_results_are_ignored(breaker: Breaker, clock: Clock) -> None:
    breaker.end_trial(True)
    breaker.end_trial(False)
    assert breaker.closed
    fail(breaker, 3)
    breaker.succeeded()
    breaker.end_trial(True)
    assert breaker.state == OPEN
    delay_of(breaker, clock)
    breaker.succeeded()
    fail(breaker, 5)
    assert breaker.state == HALF_OPEN
    breaker.end_trial(True)
    breaker.end_trial(False)
    assert breaker.closed


def test_failures_from_before_the_trial_do_not_reopen_the_breaker(
    breaker: Breaker, clock: Clock
) -> None:
    begun = clock.now_s
    fail(breaker, 3)
    delay_of(breaker, clock)
    breaker.end_trial(True)
    assert not breaker.failed(begun)
    assert breaker.failed(clock.now_s)


def test_pauses_vary_between_clients(clock: Clock) -> None:
    delays = []
    for seed in range(20):
        breaker = Breaker(
            BREAKER_SETTINGS, clock=clock.monotonic, chance=random.Random(seed).random
        )
        fail(breaker, 3)
        delays.append(delay_of(breaker, clock))
    assert 0.7 < min(delays) < 0.95
    assert 1.05 < max(delays) < 1.4


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 3),  # time between two calls
            st.integers(0, 3),  # successful operations of 4
            st.booleans(),  # and whether a trial succeeds
        ),
        max_size=300,
    ),
    st.integers(0, 1 << 32),
)
def test_a_store_that_never_serves_costs_few_operations(
    calls: list[tuple[float, int, bool]], seed: int
) -> None:
    clock = Clock()
    breaker = Breaker(BREAKER_SETTINGS, clock=clock.monotonic, chance=random.Random(seed).random)
    lost, served, trial = 0, 0, False
    for delay_s, share, answers in calls:
        clock.sleep(delay_s)
        if breaker.closed:
            if share == 3:
                breaker.succeeded()
                served += 1
            else:
                breaker.failed(clock.now_s)
                lost += 1
        elif trial:
            breaker.end_trial(answers)
            trial = False
        else:
            trial = breaker.begin_trial()
    spent = clock.now_s - 1000
    if not served:  # delays of at least .75, 1.5, 3, 6, 6, ... s
        assert lost <= 3 + 4 + spent / 6
    assert (breaker.state == HALF_OPEN) == trial


def forged(payload: bytes = b"", **fields: object) -> bytes:
    """Return an object whose header has other fields and matching checksums."""
    header = np.frombuffer(OBJECT[:64], HEADER).copy()
    for name, value in fields.items():
        (header["record"] if name in ("key", "length") else header)[name] = value
    header["payload_crc"] = crc32c(payload, crc32c(header["record"]["key"].tobytes()))
    header["crc"] = crc32c(header.tobytes()[:60])
    return header.tobytes() + payload


def test_the_format_of_an_object_is_frozen() -> None:
    """Tiers of other releases read it, so the format changes only with its version and name."""
    assert HEADER.itemsize == 64
    assert (OBJECT[:8], OBJECT[8:12], len(OBJECT)) == (b"BELUGAKV", b"\1\0\0\0", 264)
    assert OBJECT[16:48] == RECORDS[0].tobytes()
    assert OBJECT[12:16] == crc32c(OBJECT[64:], crc32c(KEY.tobytes())).to_bytes(4, "little")
    assert OBJECT[48:60] == bytes(12)
    assert OBJECT[60:64] == crc32c(OBJECT[:60]).to_bytes(4, "little")
    assert name_of(np.array([0x0123456789ABCDEF, 2], np.uint64)) == (
        "beluga-1/ef/efcdab89674523010200000000000000"
    )


def test_a_packed_block_is_unpacked() -> None:
    block = unpack(KEY, OBJECT)
    assert block.record == RECORDS[0]
    assert np.array_equal(block.payload, PAYLOAD[0])


def test_every_flipped_bit_and_every_other_length_is_found() -> None:
    whole = int.from_bytes(OBJECT, "little")
    flipped = [(whole ^ 1 << bit).to_bytes(len(OBJECT), "little") for bit in range(len(OBJECT) * 8)]
    for damaged in (*flipped, *(OBJECT[:end] for end in range(len(OBJECT))), OBJECT + b"\0"):
        with pytest.raises(WrongObjectError):
            unpack(KEY, damaged)


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"", "less than a header"),
        (forged(length=0, version=2), "another version"),
        (forged(length=0, magic=b"BELUGAKW"), "it is not a block"),
        (forged(length=0, key=KEY + np.uint64(1)), "another block"),
        (forged(b"abc", length=4), "3 bytes instead of 4"),
        (forged(b"abc", length=0xFFFFFFFF), "3 bytes instead of 4294967295"),
        (forged(b"abc", length=3)[:-1] + b"d", "payload is damaged"),
    ],
)
def test_an_object_with_matching_checksums_is_validated_too(contents: bytes, reason: str) -> None:
    with pytest.raises(WrongObjectError, match=reason):
        unpack(KEY, contents)


def test_a_payload_under_another_key_is_rejected() -> None:
    """A store that swaps two payloads is detected, although both are intact."""
    mixed = bytearray(forged(b"abc", length=3, key=KEY + np.uint64(1)))
    mixed[16:32] = KEY.tobytes()
    mixed[60:64] = crc32c(bytes(mixed[:60])).to_bytes(4, "little")
    with pytest.raises(WrongObjectError, match="payload is damaged"):
        unpack(KEY, bytes(mixed))


@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda tail: OBJECT[:64] + tail))
def test_arbitrary_bytes_are_a_block_or_rejected(contents: bytes) -> None:
    with contextlib.suppress(WrongObjectError):
        assert contents == OBJECT or unpack(KEY, contents) is None
