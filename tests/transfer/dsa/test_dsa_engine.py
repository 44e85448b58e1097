# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The DSA engine's lifecycle: timeouts, early close, forks, deaths, failing devices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.soft_dsa import soft_engine, soft_portal

from beluga._ffi import lib
from beluga.errors import (
    DeviceFaultError,
    ForkedSessionError,
    LayoutError,
    TransferError,
    TransferTimeoutError,
)
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer import CHUNK, PIECE, DsaEngine, Plan, dsa, plan_blocks, policy

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 60.0
BLOCK = 1 << 20


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    paths = [shm / "a", shm / "b"]
    with Pool.create(paths, device_size=8 * STRIPE_SIZE, coherence="software", sparse=True) as made:
        yield made


def block(pool: Pool, memory: Any, *, at: int = 0, chunk_size: int = 16384) -> Plan:
    """A plan of one block in one fragment."""
    offset = pool.geometry.data_offset + at
    addresses = np.array([[memory.ctypes.data]], np.uint64)
    return plan_blocks(
        addresses,
        np.array([len(memory)]),
        np.array([offset], np.uint64),
        chunk_size=chunk_size,
        owners=(memory,),
    )


def slow(pool: Pool, delay_us: int) -> DsaEngine:
    return DsaEngine(pool, soft_portal(faults={"delay_us": delay_us}))


def test_a_transfer_runs_while_its_caller_does_other_work(pool: Pool) -> None:
    engine = slow(pool, 100_000)
    memory = np.ones(BLOCK, np.uint8)
    start = time.monotonic()
    transfer = engine.gather_write(block(pool, memory))
    if time.monotonic() - start < 0.1:  # otherwise this thread had slept
        assert not transfer.done()
    transfer.wait(TIMEOUT_S)
    assert transfer.done()
    transfer.wait(0.0)
    engine.close()


def test_polling_alone_completes_a_transfer(pool: Pool) -> None:
    engine = soft_engine(pool)
    transfer = engine.gather_write(block(pool, np.ones(BLOCK, np.uint8)))
    deadline = time.monotonic() + TIMEOUT_S
    while not transfer.done():
        assert time.monotonic() < deadline
    transfer.wait()
    engine.close()


def test_a_transfer_continues_after_a_timeout(pool: Pool) -> None:
    engine = slow(pool, 20_000)
    memory = np.random.default_rng(0).integers(0, 256, 8 * BLOCK, np.uint8)
    transfer = engine.gather_write(block(pool, memory))
    with pytest.raises(TransferTimeoutError, match="continues"):
        transfer.wait(0.0)
    transfer.wait(TIMEOUT_S)
    target = np.zeros(8 * BLOCK, np.uint8)
    engine.scatter_read(block(pool, target, chunk_size=0)).wait(TIMEOUT_S)
    assert np.array_equal(target, memory)
    engine.close()


def test_closing_ends_submitted_work_and_fails_unfinished_transfers(pool: Pool) -> None:
    engine = slow(pool, 50_000)
    plan = block(pool, np.ones(8 * BLOCK, np.uint8))  # more chunks than are submitted at once
    transfer = engine.gather_write(plan)
    engine.close()
    engine.close()
    with pytest.raises(TransferError, match="closed before"):
        transfer.wait(TIMEOUT_S)
    assert transfer.done()
    with pytest.raises(TransferError, match="is closed"):
        engine.gather_write(plan)


def test_closing_the_pool_closes_the_engine(shm: Path) -> None:
    with Pool.create([shm / "c"], device_size=8 * STRIPE_SIZE, sparse=True) as pool:
        engine = slow(pool, 20_000)
        transfer = engine.gather_write(block(pool, np.ones(4 * BLOCK, np.uint8)))
    with pytest.raises(TransferError):
        transfer.wait(TIMEOUT_S)


def test_transfers_without_a_waiter_are_completed_by_other_waits(pool: Pool) -> None:
    engine = soft_engine(pool)
    memory = np.random.default_rng(4).integers(0, 256, BLOCK, np.uint8)
    engine.gather_write(block(pool, memory))
    engine.gather_write(block(pool, memory[::-1].copy(), at=2 * BLOCK)).wait(TIMEOUT_S)
    target = np.zeros(BLOCK, np.uint8)
    engine.scatter_read(block(pool, target, chunk_size=0)).wait(TIMEOUT_S)
    assert np.array_equal(target, memory)
    engine.close()


def test_a_plan_whose_pieces_leave_their_chunk_is_refused(pool: Pool) -> None:
    engine = soft_engine(pool)
    start = pool.geometry.data_offset
    memory = np.zeros(4096, np.uint8)
    chunks = np.array([(start, 1024, 0)], CHUNK)
    for piece in (
        (memory.ctypes.data, start, 1025, 0),
        (memory.ctypes.data, start - 1, 10, 0),
        (memory.ctypes.data, start, 1023, 0),
        (memory.ctypes.data, start, 64, 1),
    ):
        with pytest.raises(LayoutError, match="do not tile"):
            engine.scatter_read(Plan(np.array([piece], PIECE), chunks))
    empty = Plan(np.empty(0, PIECE), np.empty(0, CHUNK))
    engine.gather_write(empty).wait(TIMEOUT_S)
    engine.close()


@pytest.mark.parametrize("device_flushes", [False, True])
@pytest.mark.parametrize("memory", list(policy.Memory))
@pytest.mark.parametrize("ddio", list(policy.Ddio))
def test_every_row_of_the_policy_moves_the_same_bytes(
    pool: Pool, ddio: str, memory: str, *, device_flushes: bool
) -> None:
    row = policy.row("dsa", memory, ddio)
    engine = soft_engine(pool, row=row, device_flushes=device_flushes)
    content = np.random.default_rng(4).integers(0, 256, 100_001, np.uint8)
    engine.gather_write(block(pool, content)).wait(TIMEOUT_S)
    target = np.zeros_like(content)
    engine.scatter_read(block(pool, target, chunk_size=0)).wait(TIMEOUT_S)
    assert np.array_equal(target, content)
    assert engine.stat.by_cpu == 0
    engine.close()


@pytest.mark.parametrize("device_flushes", [False, True])
@pytest.mark.parametrize("cache_control", [False, True])
@pytest.mark.parametrize("memory", list(policy.Memory))
@pytest.mark.parametrize("ddio", list(policy.Ddio))
def test_the_engine_uses_the_policy_row_of_the_machine(
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
    ddio: str,
    memory: str,
    *,
    cache_control: bool,
    device_flushes: bool,
) -> None:
    """Bytes that are written to the cache are flushed with every row of the policy."""
    seen = []

    class Lib:
        def bl_dsa_engine_open(
            self, pool: Any, queue: Any, limits: Any, rules: Any, out: Any
        ) -> int:
            seen.append((rules.before_read, rules.after_write, rules.write_to_cache))
            return int(lib.bl_dsa_engine_open(pool, queue, limits, rules, out))

        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

    monkeypatch.setenv("BELUGA_MEMORY", memory)
    monkeypatch.setenv("BELUGA_DDIO", ddio)
    monkeypatch.setattr(dsa, "lib", Lib())
    soft_engine(pool, device_flushes=device_flushes, cache_control=cache_control).close()
    row = policy.row("dsa", memory, ddio)
    flush = lib.BL_DSA_FLUSH_DEVICE if device_flushes else lib.BL_DSA_FLUSH_CPU
    drops = row.before_read == policy.Step.INVALIDATE
    flushes = cache_control or row.after_write == policy.Step.FLUSH
    assert seen == [(flush * drops, flush * flushes, cache_control)]


def test_a_truncated_device_is_an_error_of_the_transfer(shm: Path) -> None:
    path = shm / "short"
    with Pool.create([path], device_size=8 * STRIPE_SIZE, coherence="software") as pool:
        engine = soft_engine(pool)
        memory = np.ones(2 * STRIPE_SIZE, np.uint8)
        plan = block(pool, memory)
        engine.gather_write(plan).wait(TIMEOUT_S)
        os.truncate(path, pool.geometry.data_offset + 2 * STRIPE_SIZE + BLOCK)
        for move in (engine.gather_write, engine.scatter_read):
            with pytest.raises(DeviceFaultError):
                move(plan).wait(TIMEOUT_S)
        left = block(pool, np.ones(BLOCK, np.uint8))
        engine.gather_write(left).wait(TIMEOUT_S)  # the remaining queues are used
        engine.close()


def test_a_forked_child_has_no_engine(pool: Pool) -> None:
    engine = slow(pool, 20_000)
    memory = np.ones(BLOCK, np.uint8)
    transfer = engine.gather_write(block(pool, memory))
    raw, forked = (engine.handle, transfer.out[0]), -lib.BL_ERROR_FORKED
    child = os.fork()
    if child == 0:
        failures = int(lib.bl_dsa_wait(*raw, 0) != forked) + lib.bl_dsa_poll(raw[0])
        for act in (transfer.done, transfer.wait, lambda: engine.stat):
            try:
                act()
            except ForkedSessionError:
                continue
            failures += 1
        engine.close()
        os._exit(failures)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    transfer.wait(TIMEOUT_S)
    engine.close()


VICTIM = """
import sys, time
sys.path.insert(0, "tests")
import numpy as np
from beluga.pool import Pool
from beluga.transfer import DsaEngine, plan_blocks
from support.soft_dsa import soft_portal
pool = Pool.open([sys.argv[1]])
engine = DsaEngine(pool, soft_portal(faults={"delay_us": 2000}))
memory = np.full(1 << 22, 7, np.uint8)
offset = pool.geometry.data_offset
plan = plan_blocks(
    np.array([[memory.ctypes.data]], np.uint64), np.array([len(memory)]),
    np.array([offset], np.uint64), chunk_size=4096)
transfer = engine.gather_write(plan)
print("out", flush=True)
while True:
    transfer.done()
    time.sleep(0.01)
"""


def test_a_killed_process_corrupts_only_its_target(shm: Path) -> None:
    """The software queue ends with its process, and its open work is never done."""
    path = shm / "victim"
    with Pool.create([path], device_size=8 * STRIPE_SIZE, sparse=True) as pool:
        engine = soft_engine(pool)
        beside = np.full(BLOCK, 9, np.uint8)
        engine.gather_write(block(pool, beside, at=4 * BLOCK)).wait(TIMEOUT_S)
        victim = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert victim.stdout is not None
        assert victim.stdout.readline() == "out\n"
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        found, target = np.zeros(BLOCK, np.uint8), np.zeros(4 * BLOCK, np.uint8)
        engine.scatter_read(block(pool, found, at=4 * BLOCK, chunk_size=0)).wait(TIMEOUT_S)
        engine.scatter_read(block(pool, target, chunk_size=0)).wait(TIMEOUT_S)
        assert np.array_equal(found, beside)
        assert set(np.unique(target)) <= {0, 7}
        engine.close()
