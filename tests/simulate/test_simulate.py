# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The options of the simulator: the defaults of a cluster, and invalid values.

Whole runs: no request is lost, results depend on seeds, memories have equal sizes, and workers
join and leave.

Runs in several processes: the same rows in the same order, and no process remains.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from beluga.errors import SimulateError
from beluga.router import POLICIES, Goals
from beluga.simulate import (
    MEMORIES,
    PRESETS,
    Options,
    Scale,
    Trace,
    TraceEntry,
    make_trace,
    simulate,
    sweep,
)
from beluga.simulate.cluster import Cluster

GIB = 1 << 30


def test_the_default_cluster_is_that_of_the_reference() -> None:
    options = Options()
    assert (options.workers, options.engine, options.eviction) == (8, "chunked", "lru")
    assert options.pool_bytes == 1950 * GIB
    assert options.local_bytes * 8 == 1950 * GIB
    assert (options.adapter_count, options.device_count) == (4, 8)
    assert (options.path_speed, options.local_bandwidth) == (26e9, 50e9)
    assert (options.step_tokens, options.slots) == (8192, 256)
    assert (options.offload, options.shuffle, options.speed) == (True, True, 1)
    assert options.hbm_bytes == options.model.hbm_bytes
    assert options.step_s == 0.012


def test_a_serial_worker_has_no_steps() -> None:
    assert Options(engine="serial").step_s == 0


def test_explicit_options_replace_defaults() -> None:
    options = Options(hbm=5, bandwidth=7.0, gpu_path="switch", local=3, pool=11)
    assert (options.hbm_bytes, options.path_speed) == (5, 7)
    assert (options.local_bytes, options.pool_bytes) == (3, 11)


def test_the_replay_of_the_reference_has_470_blocks_of_hbm_and_15600_in_all() -> None:
    options = PRESETS["feasibility"](Options(workers=3, speed=2.0))
    block = 512 * options.model.kv_bytes_per_token
    assert (options.workers, options.engine, options.speed) == (8, "serial", 2)
    assert options.hbm_bytes == 470 * block
    assert options.pool_bytes == options.local_bytes * 8 == 15600 * block
    assert (options.adapter_count, options.device_count) == (8, 1000)
    assert (options.offload, options.shuffle) == (False, False)
    assert options.policy_defaults == {"host_credit": 1.0}


@pytest.mark.parametrize("name", ["workers", "step_tokens", "slots", "hbm", "pool", "local",
                                  "adapters", "devices"])  # fmt: skip
def test_every_count_is_at_least_one(name: str) -> None:
    lowest: dict[str, Any] = {name: 1}
    assert getattr(Options(**lowest), name) == 1
    with pytest.raises(SimulateError, match=f"{name} is 0, but must be at least 1"):
        Options(**{name: 0})


@pytest.mark.parametrize("name", ["bandwidth", "local_bandwidth", "speed"])
@pytest.mark.parametrize("value", [0.0, float("inf")])
def test_speeds_and_times_are_greater_than_zero_and_finite(name: str, value: float) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(SimulateError, match=f"{name} is {value}, but must be greater than 0"):
        Options(**options)
    assert Options(**{name: 0.5})


def test_all_but_one_worker_may_be_removed() -> None:
    assert Options(workers=2, scale=Scale(0.0, -1)).scale
    with pytest.raises(SimulateError, match="scaling by -2 leaves no worker"):
        Options(workers=2, scale=Scale(0.0, -2))
    assert Options(goals=Goals()).goals


def conversations(count: int = 60, turns: int = 4, gap_s: float = 4.0) -> Trace:
    """Create growing chats: each turn's prompt starts with the previous one, and all start with the
    same block.
    """
    random = Random(5)
    prompts, fresh = [], 1
    for chat in range(count):
        blocks, start = [0], chat * gap_s / 2
        for turn in range(turns):
            added = random.randint(1, 8)
            blocks = [*blocks, *range(fresh, fresh + added)]
            fresh += added
            tokens = len(blocks) * 512 + random.randint(0, 511)
            prompts.append(TraceEntry(start + turn * 20, tokens, random.randint(1, 200), blocks))
    return make_trace("conversations", 512, prompts, 1.0)


TRACE = conversations()
OPTIONS = Options(workers=3, pool=64 * GIB, hbm=16 * GIB)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("engine", ["chunked", "serial"])
def test_every_request_is_served_in_order_and_nothing_is_left(
    policy: str, memory: str, engine: str
) -> None:
    options = dataclasses.replace(OPTIONS, engine=engine)
    cluster = Cluster(TRACE, options, policy=policy, memory=memory, seed=3)
    cluster.run()
    assert cluster.refused == 0
    assert sorted(request.index for request in cluster.requests) == list(range(len(TRACE)))
    for request in cluster.requests:
        assert request.arrival < request.first_token <= request.done <= cluster.end_s
        assert 0 <= request.device + request.far <= request.reusable
        assert request.left == 0 or engine == "serial"
    for load in cluster.router.tracker.loads.values():
        assert load.active_requests == load.outstanding_tokens == load.active_prefill_tokens == 0
        assert load.active_decode_blocks == 0
    assert cluster.network.read.copies == cluster.network.write.copies == []
    for worker in cluster.engines:
        assert worker.hbm.used == 0
        assert worker.hbm.stat.present <= worker.hbm.capacity
        assert worker.far.tier.stat.present <= worker.far.tier.capacity
    fetched = sum(request.far for request in cluster.requests) * cluster.block_bytes
    paths = cluster.network.paths
    assert sum(cluster.network.read.moved[path] for path in paths) == fetched


def test_both_memories_have_one_size_by_default() -> None:
    assert OPTIONS.local_bytes * OPTIONS.workers == pytest.approx(OPTIONS.pool_bytes, abs=3)
    assert Options(local=10 * GIB, workers=4).pool_bytes == 40 * GIB
    rows = simulate(TRACE, OPTIONS, policies=["random"])
    sizes = {row.memory: row.capacity_bytes for row in rows}
    assert sizes["pool"] == pytest.approx(sizes["split"], abs=3)


def test_a_seed_determines_the_whole_result() -> None:
    def run(seeds: int) -> list[object]:
        return list(simulate(TRACE, OPTIONS, policies=["two-choices", "linear"], seeds=seeds))

    assert run(2) == run(2)
    first, second, mean = (row for row in run(2)[:3])
    assert first.ttft_mean_s != second.ttft_mean_s
    assert (first.seed, second.seed, mean.seed) == (0, 1, None)
    assert mean.ttft_mean_s == pytest.approx((first.ttft_mean_s + second.ttft_mean_s) / 2)
    spread = mean.spread["ttft_mean_s"]
    assert {spread.min, spread.max} == {first.ttft_mean_s, second.ttft_mean_s}
    assert first.spread is None


def test_a_pool_has_hits_of_all_workers_and_split_dram_does_not() -> None:
    rows = simulate(TRACE, OPTIONS, policies=["least-tokens"])
    hits = {row.memory: row.hit_rate for row in rows}
    assert hits["pool"] == pytest.approx(TRACE.ideal_hit_rate, abs=0.02)
    assert hits["split"] < hits["pool"] - 0.05
    for row in rows:
        assert row.hit_rate == pytest.approx(
            row.hit_rate_hbm + row.hit_rate_pool + row.hit_rate_local
        )
        assert 1 <= row.load_imbalance <= 3
        assert 0 <= row.link_read_utilisation < 1


def test_slower_links_increase_copy_and_queue_times() -> None:
    def row(**change: object) -> object:
        options = dataclasses.replace(OPTIONS, **change)
        return simulate(TRACE, options, policies=["random"], memories=["pool"])[-1]

    # The small pool of OPTIONS lies on one memory device, which would hide all other effects.
    base, slow = row(devices=100), row(bandwidth=2e9)
    assert slow.onboard_ms > 5 * base.onboard_ms
    assert slow.ttft_mean_s > base.ttft_mean_s
    assert row(gpu_path="switch", devices=100).onboard_ms < base.onboard_ms  # O7
    wide = {"gpu_path": "switch", "devices": 100}
    few, many = row(adapters=1, **wide), row(adapters=3, **wide)
    assert many.onboard_queue_ms < few.onboard_queue_ms  # O8


@pytest.mark.parametrize("count", [2, -1])
def test_workers_are_added_and_removed_during_a_run(count: int) -> None:
    options = dataclasses.replace(OPTIONS, scale=Scale(60.0, count))
    for memory in MEMORIES:
        cluster = Cluster(TRACE, options, policy="least-tokens", memory=memory)
        cluster.run()
        assert cluster.refused == 0
        late = {request.worker for request in cluster.requests if request.arrival > 60}
        assert late == set(range(3 + count))
        row = simulate(TRACE, options, policies=["least-tokens"], memories=[memory])[-1]
        assert 0 < row.hit_rate_before < 1
        assert 0 < row.hit_rate_after < 1


def test_new_workers_find_the_pool_full_and_their_own_dram_empty() -> None:
    def after(memory: str, scale: Scale | None) -> float:
        # Everything fits, so that the memory of new workers does not matter.
        options = dataclasses.replace(OPTIONS, scale=scale, pool=1024 * GIB)
        cluster = Cluster(TRACE, options, policy="random", memory=memory)
        cluster.run()
        late = [request for request in cluster.requests if request.arrival >= 60]
        hits = sum(request.device + request.far for request in late)
        return hits / sum(request.blocks for request in late)

    more = Scale(60.0, 3)
    assert after("pool", more) == pytest.approx(after("pool", None), abs=0.02)
    assert after("split", more) < after("split", None) - 0.02


@pytest.mark.parametrize("engine", ["chunked", "serial"])
def test_the_planner_adds_workers_where_prompts_wait_and_stops_idle_ones(engine: str) -> None:
    crowd = [TraceEntry(0.5 * n, 20000, 10, ()) for n in range(400)]
    calm = [TraceEntry(400.0 + 20 * n, 1000, 10, ()) for n in range(40)]
    trace = make_trace("crowd", 512, [*crowd, *calm], 1.0)
    options = dataclasses.replace(OPTIONS, workers=2, goals=Goals(workers_max=5), engine=engine)
    [row, _] = simulate(trace, options, policies=["least-tokens"], memories=["pool"])
    [alone, _] = simulate(
        trace,
        dataclasses.replace(options, goals=None),
        policies=["least-tokens"],
        memories=["pool"],
    )
    assert row.workers_most > 2
    assert row.workers_most <= 5
    assert row.ttft_mean_s < alone.ttft_mean_s
    assert row.worker_hours < alone.worker_hours  # one worker suffices for the calm part
    assert alone.workers_most == 2


def test_min_ttft_rejects_requests_beyond_the_objective() -> None:
    crowd = make_trace("crowd", 512, [TraceEntry(0, 20000, 10, ())] * 30, 1.0)
    policy = "min-ttft:ttft_objective_s=10"
    row = simulate(crowd, OPTIONS, policies=[policy], memories=["pool"])[-1]
    assert row.policy == policy
    assert 0 < row.rejects < 30
    assert row.ttft_p99_s < 15


def test_requests_wait_for_busy_workers_and_none_is_lost() -> None:
    options = dataclasses.replace(OPTIONS, slots=1)
    [row, _] = simulate(TRACE, options, policies=["alpha-gamma"], memories=["pool"])
    assert row.rejects == 0
    assert row.ttft_p99_s > 10


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"workers": 0}, "workers is 0, but must be"),
        ({"pool": 0}, "pool is 0, but must be"),
        ({"speed": 0.0}, "speed is 0.0, but must be greater than 0"),
        ({"speed": math.nan}, "speed is nan, but must be greater than 0"),
        ({"bandwidth": -1.0}, "bandwidth is -1.0, but must be greater than 0"),
        ({"engine": "steam"}, "engine is one of chunked, serial"),
        ({"gpu_path": "x"}, "gpu_path is one of root-complex, switch"),
        ({"eviction": "x"}, "eviction is one of lru, s3fifo, fifo"),
        ({"scale": Scale(1, -8)}, "leaves no worker"),
        ({"scale": Scale(1, 1), "goals": Goals()}, "either at a given time or by the planner"),
    ],
)
def test_invalid_options_are_rejected(change: dict[str, object], what: str) -> None:
    with pytest.raises(SimulateError, match=what):
        Options(**change)


def test_invalid_runs_are_rejected() -> None:
    with pytest.raises(SimulateError, match="no policy 'x'; choose one of"):
        simulate(TRACE, OPTIONS, policies=["x"])
    with pytest.raises(SimulateError, match="name a policy"):
        simulate(TRACE, OPTIONS, policies=[])
    with pytest.raises(SimulateError, match="no room for a block"):
        simulate(TRACE, dataclasses.replace(OPTIONS, hbm=1000), policies=["random"])


SMALL = make_trace(
    "small", 16, [TraceEntry(n / 4, 16 * (n % 9) + 1, n % 5, range(n % 9)) for n in range(60)], 1.0
)
REQUESTED: dict[str, Any] = {"policies": ["least-cost", "linear", "random"], "seeds": 3}


def children() -> set[str]:
    """Return the child processes of this one, without multiprocessing's tracker of resources."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = {pid: Path("/proc", pid, "cmdline").read_text() for pid in pids}
    return {pid for pid, command in commands.items() if "resource_tracker" not in command}


def test_rows_are_the_same_in_the_same_order() -> None:
    cases = [Options(workers=3, speed=speed) for speed in (1.0, 40.0)]
    alone = sweep(SMALL, cases, courses=True, **REQUESTED)
    moves: list[tuple[int, int]] = []
    before = children()
    together = sweep(
        SMALL,
        cases,
        courses=True,
        processes=3,
        advance=lambda *at: moves.append(at),
        **REQUESTED,
    )
    assert repr(together) == repr(alone)
    assert moves == [(done, 36) for done in range(1, 37)]
    assert children() == before


@pytest.mark.parametrize("count", [0, -1, 1 << 17])
def test_the_number_of_processes_has_a_range(count: int) -> None:
    with pytest.raises(SimulateError, match=f"processes is from 1 to 65536, not {count}"):
        simulate(SMALL, Options(), processes=count, **REQUESTED)


def test_no_more_processes_start_than_there_are_runs() -> None:
    started: set[str] = set()
    before = children()
    simulate(
        SMALL, Options(workers=1), policies=["random"], processes=100,
        advance=lambda *at: started.update(children() - before),
    )  # fmt: skip
    assert len(started) <= 2


def test_the_error_of_a_run_is_raised_and_no_process_is_left() -> None:
    """A tier that exceeds the memory fails in the child."""
    before = children()
    huge = dataclasses.replace(SMALL, id_count=1 << 45)
    with pytest.raises((SimulateError, OverflowError)) as alone:
        simulate(huge, Options(), **REQUESTED)
    with pytest.raises(type(alone.value), match=re.escape(str(alone.value))):
        simulate(huge, Options(), processes=2, **REQUESTED)
    assert children() == before


def test_a_killed_process_is_an_error() -> None:
    def kill(done: int, total: int) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    before = multiprocessing.active_children()
    with pytest.raises(SimulateError, match="before its run was done; use fewer"):
        simulate(SMALL, Options(), processes=2, advance=kill, **{**REQUESTED, "seeds": 30})
    assert multiprocessing.active_children() == before


_INTERRUPTED = """
import sys
from beluga.simulate import Options, TraceEntry, make_trace, simulate
prompts = [TraceEntry(n / 4, 9000, 500, range(500)) for n in range(2000)]
trace = make_trace("long", 16, prompts, 1.0)
def advance(done, total):
    print("one is done", flush=True)
try:
    simulate(trace, Options(workers=8), policies=["least-cost"], seeds=1000, processes=2,
             advance=advance)
except KeyboardInterrupt:
    import multiprocessing
    print(multiprocessing.active_children() or "none")
"""


def test_an_interrupt_ends_all_processes() -> None:
    """As a terminal does it: the signal goes to all processes of the group."""
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "one is done\n"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert out.splitlines()[-1] == "none"
    assert err == ""


def test_processes_end_if_their_parent_is_killed() -> None:
    code = _INTERRUPTED.replace(
        'print("one is done", flush=True)',
        "from multiprocessing import active_children\n"
        "    print(*(child.pid for child in active_children()), flush=True)",
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = process.stdout.readline().split()
    process.kill()
    process.communicate()
    until = time.monotonic() + 30
    while alive := [pid for pid in pids if Path("/proc", pid).exists()]:
        assert time.monotonic() < until, alive
        time.sleep(0.05)
    assert len(pids) == 2
