# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The loops that measure the machine's limit, and the stopwatch, do the work that they report."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from beluga_bench._limit import ffi, lib
from beluga_bench.harness import drive
from beluga_bench.harness.drive import Driver, Load

SIZE = 16 << 10
WRITES = ["write", "store", "store_clflush", "store_clflushopt", "store_clwb"]


def run(name: str, memory: np.ndarray, buffer: np.ndarray) -> None:
    function = getattr(lib, f"limit_{name}")
    base, private = (ffi.cast("void *", array.ctypes.data) for array in (memory, buffer))
    assert function(base, 64, private, SIZE) == 0


@pytest.fixture
def memory() -> np.ndarray:
    raw = np.zeros(SIZE + 192, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + SIZE + 128]


@pytest.mark.parametrize("name", WRITES)
def test_a_write_stores_all_bytes_at_their_offsets(name: str, memory: np.ndarray) -> None:
    kind = name.partition("_")[2]
    if kind in ("clflushopt", "clwb") and not getattr(lib, f"limit_has_{kind}")():
        pytest.skip(f"this CPU has no {kind}")
    data = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    run(name, memory, data)
    assert np.array_equal(memory[64:-64], data)
    assert not memory[:64].any()
    assert not memory[-64:].any()


@pytest.mark.parametrize("name", ["read", "load"])
def test_a_read_returns_all_bytes(name: str, memory: np.ndarray) -> None:
    memory[:] = np.random.default_rng(2).integers(0, 256, len(memory), dtype=np.uint8)
    target = np.zeros(SIZE, np.uint8)
    run(name, memory, target)
    assert np.array_equal(target, memory[64:-64])


def test_rows_are_gathered_and_scattered(memory: np.ndarray) -> None:
    private = np.random.default_rng(3).integers(0, 256, (8, 256), dtype=np.uint8)
    wanted, base = private.copy(), memory.ctypes.data
    near = private.ctypes.data + np.array([5, 0, 7, 2], np.uint64) * np.uint64(256)
    far = base + np.array([512, 2048, 0, 1024], np.uint64)
    places = [ffi.cast("uint64_t *", array.ctypes.data) for array in (near, far)]
    rows = ffi.new("limit_rows *", {"private_places": places[0], "pool_places": places[1]})
    rows.size = 256
    assert lib.limit_gather(rows, 1, ffi.NULL, 3 * 256) == 0
    assert not memory[512:1024].any()  # the first row was not copied
    for row, place in ((0, 2048), (7, 0), (2, 1024)):
        assert np.array_equal(memory[place : place + 256], wanted[row])
    private[:] = 0
    assert lib.limit_scatter(rows, 2, ffi.NULL, 2 * 256) == 0
    assert np.array_equal(private[[7, 2]], wanted[[7, 2]])
    assert not np.delete(private, [7, 2], axis=0).any()


def lines(memory: np.ndarray, **fields: int) -> object:
    requests = ffi.cast("uint8_t *", memory.ctypes.data)
    fixed = {"slots": 16, "stride": 128, "timeout_ns": 5 * 10**9, "sequence": 1}
    replies = requests + 16 * 128
    return ffi.new("limit_lines *", {"requests": requests, "replies": replies, **fixed, **fields})


@pytest.mark.parametrize("coherent", [0, 1])
@pytest.mark.parametrize(("depth", "batch"), [(1, 1), (16, 4), (16, 16)])
def test_every_line_of_an_exchange_is_answered(
    memory: np.ndarray, coherent: int, depth: int, batch: int
) -> None:
    exchange = lines(memory, depth=depth, batch=batch, count=320, coherent=coherent)
    answered: list[int] = []
    other = threading.Thread(target=lambda: answered.append(lib.limit_answer(exchange)))
    other.start()
    assert lib.limit_request(exchange) == 0
    other.join()
    assert answered == [0]
    last = memory[16 * 128 :].view(np.uint32)[:: 128 // 4][:16]
    assert sorted(last) == list(range(305, 321))


def test_an_exchange_without_a_peer_ends(memory: np.ndarray) -> None:
    alone = lines(memory, depth=1, batch=1, count=1, timeout_ns=10**6)
    assert lib.limit_request(alone) < 0


def test_a_driver_visits_every_offset_in_order(memory: np.ndarray) -> None:
    places = np.array([64, 0], np.uint64)
    driver = Driver(Load(drive.bare("write", memory.ctypes.data), places, 64))
    driver.count(1)
    assert memory[64:128].all()
    assert not memory[:64].any()
    driver.count(3)
    assert driver.done == 3
    assert memory[:128].all()


def test_a_fixed_rate_is_not_exceeded(memory: np.ndarray) -> None:
    places = np.zeros(1, np.uint64)
    load = Load(drive.bare("load", memory.ctypes.data), places, 64, period_ns=100_000)
    driver = Driver(load)
    driver.hold(0.002)
    assert 1 <= driver.done <= 20


def test_each_operation_is_timed(memory: np.ndarray) -> None:
    places = np.zeros(1, np.uint64)
    samples = Driver(Load(drive.bare("read", memory.ctypes.data), places, SIZE)).sample(50)
    assert len(samples) == 50
    assert (samples > 0).all()


def test_the_hash_table_finds_stored_keys() -> None:
    keys = np.random.default_rng(5).integers(1, 1 << 63, 700, dtype=np.uint64)
    slots = np.zeros(2 * 1024, np.uint64)
    table = ffi.new("limit_hash *", {"slot": ffi.cast("limit_slot *", slots.ctypes.data)})
    table.slots = 1024
    lib.limit_hash_put(table, ffi.cast("uint64_t *", keys.ctypes.data), 600)
    for first, last in ((0, 1), (10, 20), (590, 600)):
        some = np.ascontiguousarray(keys[first:last])
        walked = lib.limit_hash_walk(table, ffi.cast("uint64_t *", some.ctypes.data), len(some))
        assert walked == sum(range(first, last))
    absent = np.ascontiguousarray(keys[600:])
    assert lib.limit_hash_walk(table, ffi.cast("uint64_t *", absent.ctypes.data), 100) == 0


def test_ctrl_c_ends_drivers_before_it_is_raised(memory: np.ndarray) -> None:
    """Otherwise the pool would be unmapped while C still writes to it."""
    operation = drive.bare("write", memory.ctypes.data)
    drivers = [Driver(Load(operation, np.array([64], np.uint64), SIZE)) for _ in range(2)]
    threads = threading.active_count()
    interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        drive.together(drivers, sorted(os.sched_getaffinity(0)), 60.0)
    assert time.monotonic() - began < 30
    interrupt.join()
    assert threading.active_count() == threads
    assert drivers[0].count(1) == 0  # a stopped driver does no further work
