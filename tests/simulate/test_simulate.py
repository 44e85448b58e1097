# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Whole runs: no request is lost, results depend on seeds, memories have equal sizes, workers join
and leave; in several processes, no process remains. Rows and reports in numbers computed by hand.
"""

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
from types import SimpleNamespace
from typing import Any

import pytest
from page.well_formed import Page

from beluga.errors import SimulateError
from beluga.page import percent, plain, seconds
from beluga.router import POLICIES, Goals
from beluga.simulate import (
    MEMORIES,
    PRESETS,
    Options,
    Row,
    Scale,
    Trace,
    TraceEntry,
    make_report,
    make_trace,
    simulate,
)
from beluga.simulate.cluster import Cluster
from beluga.simulate.memory import Request
from beluga.simulate.report import summarize, sustained_load
from beluga.simulate.result import make_row, mean_row

GIB = 1 << 30


def test_the_replay_of_the_reference_has_470_blocks_of_hbm_and_15600_in_all() -> None:
    options = PRESETS["feasibility"](Options(workers=3, speed=2.0))
    block = 512 * options.model.kv_bytes_per_token
    assert (options.workers, options.engine, options.speed) == (8, "serial", 2)
    assert options.hbm_bytes == 470 * block
    assert options.pool_bytes == options.local_bytes * 8 == 15600 * block
    assert (options.adapter_count, options.device_count) == (8, 1000)
    assert (options.offload, options.shuffle) == (False, False)
    assert options.policy_defaults == {"host_credit": 1.0}


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


COUNTS = ("workers", "step_tokens", "slots", "hbm", "pool", "local", "adapters", "devices")
SPEEDS = ("bandwidth", "local_bandwidth", "speed")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        *(({name: 0}, f"{name} is 0, but must be at least 1") for name in COUNTS),
        *(
            ({name: value}, f"{name} is {value}, but must be greater than 0")
            for name in SPEEDS
            for value in (0.0, math.inf, math.nan)
        ),
        ({"engine": "steam"}, "engine is one of chunked, serial"),
        ({"gpu_path": "x"}, "gpu_path is one of root-complex, switch"),
        ({"eviction": "x"}, "eviction is one of lru, s3fifo, fifo"),
        ({"workers": 2, "scale": Scale(1, -2)}, "scaling by -2 leaves no worker"),
        ({"scale": Scale(1, 1), "goals": Goals()}, "either at a given time or by the planner"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected(change: dict[str, Any], what: str) -> None:
    with pytest.raises(SimulateError, match=what):
        Options(**change)


def test_options_at_the_limits_of_their_ranges_are_accepted() -> None:
    for name in COUNTS:
        one: dict[str, Any] = {name: 1}
        assert getattr(Options(**one), name) == 1
    assert Options(bandwidth=0.5, local_bandwidth=0.5, speed=0.5)
    assert Options(workers=2, scale=Scale(0.0, -1)).scale
    options = Options(hbm=5, bandwidth=7.0, gpu_path="switch", local=3, pool=11, engine="serial")
    assert (options.hbm_bytes, options.path_speed, options.step_s) == (5, 7, 0)
    assert (options.local_bytes, options.pool_bytes) == (3, 11)


def test_invalid_runs_are_rejected() -> None:
    with pytest.raises(SimulateError, match="no policy 'x'; choose one of"):
        simulate(TRACE, OPTIONS, policies=["x"])
    with pytest.raises(SimulateError, match="name a policy"):
        simulate(TRACE, OPTIONS, policies=[])
    with pytest.raises(SimulateError, match="less than a block"):
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
    alone = simulate(SMALL, cases, courses=True, **REQUESTED)
    moves: list[tuple[int, int]] = []
    before = children()
    together = simulate(
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


# ---- Rows and reports

BLOCK = 10  # tokens


def request(arrival: float, ttft: float, *, out: int, done: float, hits: tuple[int, int]) -> Any:
    made = Request(0, arrival, (25, out, BLOCK), None, 2)
    made.first_token, made.done = arrival + ttft, arrival + ttft + done
    made.device, made.far = hits
    return made


def cluster(*requests: Request, memory: str = "pool", **options: Any) -> Any:
    """Make a cluster after a run of 20 s with two workers and two copies of one second each."""
    return SimpleNamespace(
        requests=list(requests),
        trace=SimpleNamespace(block_tokens=BLOCK),
        memory=memory,
        refused=1,
        end_s=20.0,
        worker_s=7200.0,
        engines=[SimpleNamespace(busy_s=busy) for busy in (3.0, 1.0)],
        options=Options(workers=2, pool=1000, local=300, **options),
        network=SimpleNamespace(
            utilisation=lambda elapsed_s: (elapsed_s / 40, elapsed_s / 80),
            read=SimpleNamespace(count=2, busy_s=2.0, waited_s=0.5),
        ),
    )


def row(*requests: Request, seed: int = 7, **options: Any) -> Row:
    return make_row(cluster(*requests, **options), policy="random", seed=seed)


REQUESTS = (
    request(0.0, 1.0, out=11, done=2.0, hits=(1, 1)),
    request(5.0, 3.0, out=1, done=0.0, hits=(0, 2)),
    request(9.0, 2.0, out=3, done=0.8, hits=(0, 0)),
    Request(3, 10.0, (25, 2, BLOCK), None, 2),  # refused
)


def test_a_row_has_the_means_of_served_requests() -> None:
    result = row(*REQUESTS)
    assert (result.policy, result.memory, result.seed) == ("random", "pool", 7)
    assert (result.requests, result.rejects) == (4, 1)
    assert result.ttft_mean_s == result.ttft_p50_s == pytest.approx(2.0)
    assert result.ttft_p90_s == pytest.approx(2.8)
    assert result.ttft_p99_s == pytest.approx(2.98)
    # There are 10 further tokens in 2 s, and 2 in 0.8 s. An answer of one token has none.
    assert result.tpot_mean_ms == pytest.approx(300)
    assert result.tpot_p99_ms == pytest.approx(398)
    assert result.throughput_per_s == 3 / 20


def test_hit_rates_count_blocks_and_their_tails() -> None:
    result = row(*REQUESTS)
    assert result.hit_rate == pytest.approx(4 / 9)
    assert result.hit_rate_hbm == pytest.approx(1 / 9)
    assert (result.hit_rate_pool, result.hit_rate_local) == (pytest.approx(3 / 9), 0)
    assert result.hit_rate_tokens == pytest.approx(40 / 75)
    split = row(*REQUESTS, memory="split")
    assert (split.hit_rate_pool, split.hit_rate_local) == (0, pytest.approx(3 / 9))


def test_a_row_has_the_work_of_workers_and_links() -> None:
    result = row(*REQUESTS)
    assert result.load_imbalance == 1.5
    assert (result.link_read_utilisation, result.link_write_utilisation) == (0.5, 0.25)
    assert (result.onboard_ms, result.onboard_queue_ms) == (1000, 250)
    assert (result.workers, result.workers_most, result.worker_hours) == (2, 2, 2)
    assert result.capacity_bytes == 1000
    assert row(memory="split").capacity_bytes == 600


def test_before_and_after_are_separated_by_arrival() -> None:
    result = row(*REQUESTS, scale=Scale(5.0, 1))
    assert (result.hit_rate_before, result.hit_rate_after) == (2 / 3, 2 / 6)
    assert (result.ttft_mean_before_s, result.ttft_mean_after_s) == (1.0, 2.5)
    late = row(*REQUESTS, scale=Scale(0.0, 1))
    assert (late.hit_rate_before, late.ttft_mean_before_s) == (None, None)
    never = row(*REQUESTS)
    assert (never.hit_rate_before, never.hit_rate_after) == (None, None)
    assert (never.ttft_mean_before_s, never.ttft_mean_after_s) == (None, None)


def test_a_run_without_served_requests_has_no_times() -> None:
    idle = cluster(REQUESTS[3])
    idle.end_s = 0.0
    idle.network.read = SimpleNamespace(count=1, busy_s=3.0, waited_s=2.0)
    idle.engines = [SimpleNamespace(busy_s=0.0)]
    result = make_row(idle, policy="random", seed=0)
    assert (result.ttft_mean_s, result.ttft_p99_s, result.tpot_mean_ms) == (None, None, None)
    assert result.load_imbalance == 1
    assert (result.throughput_per_s, result.hit_rate, result.hit_rate_tokens) == (0, 0, 0)
    assert (result.onboard_ms, result.onboard_queue_ms) == (3000, 2000)


def test_one_row_summarizes_all_seeds() -> None:
    first, second = row(*REQUESTS[:1], seed=0), row(*REQUESTS[1:2], seed=1)
    mean = mean_row([first, second])
    assert mean.seed is None
    assert mean.ttft_mean_s == 2.0
    assert (mean.requests, mean.workers, mean.capacity_bytes) == (1, 2, 1000)
    assert mean.spread is not None
    spread = mean.spread["ttft_mean_s"]
    assert (spread.min, spread.max, spread.std) == (1, 3, 1)
    assert not {"requests", "workers", "capacity_bytes", "seed"} & set(mean.spread)


@pytest.mark.parametrize("first", [0, 1])
def test_a_mean_covers_the_runs_that_have_the_figure(first: int) -> None:
    seeds = [row(*REQUESTS[first : first + 1]), row(*REQUESTS[1 - first : 2 - first])]
    mean = mean_row(seeds)
    assert mean.tpot_mean_ms == pytest.approx(200)
    assert mean.spread is not None and mean.spread["tpot_mean_ms"].std == 0
    assert (mean.hit_rate_before, "hit_rate_before" in mean.spread) == (None, False)


PAIR = make_trace("a<b", BLOCK, [TraceEntry(0, 25, 2, (1, 2)), TraceEntry(1, 25, 2, (1, 2))], 1.0)


@pytest.fixture
def rows() -> list[Row]:
    """Make the rows of one policy on a pool with two seeds, which the report leaves out, and their
    mean; and of another policy on split DRAM that served nothing.
    """
    first = row(*REQUESTS[:1], seed=0)
    two = row(*REQUESTS[1:2], seed=1)
    none = dataclasses.replace(
        row(memory="split"), policy="<none>", seed=None, ttft_mean_s=None, hit_rate=0.125
    )
    return [first, two, mean_row([first, two]), none]


def html(options: Options, rows: list[Row], **origin: str) -> str:
    return make_report(PAIR, options, rows, origin).decode()


def cards(source: str) -> dict[str, tuple[str, ...]]:
    matches = re.findall(
        r"<div><dt>(.*?)</dt><dd>(.*?)</dd>(?:<dd class=\"than\">(.*?)</dd>)?", source
    )
    return {name: (value, than) for name, value, than in matches}


def test_the_cards_have_the_figures_of_the_row(rows: list[Row]) -> None:
    mean = rows[2]
    read = Page(html(Options(workers=2), rows))
    shown = cards(read.source)
    assert shown["Mean time to first token"][0] == seconds(mean.ttft_mean_s or 0)
    assert shown["90th percentile of it"][0] == seconds(mean.ttft_p90_s or 0)
    assert shown["Prompt blocks found"][0] == percent(mean.hit_rate)
    assert shown["Prompt tokens not computed"] == ("20", "of 50")
    assert shown["GPU time saved"][0] == f"{plain(mean.prefill_saved_s)} GPU-s"
    assert shown["Requests refused"][0] == "1"
    assert read.texts["p"][0] == (
        "With a shared pool 2 engines begin to answer after 2\xa0s on average at this load."
    )


def test_saved_prefill_is_the_time_of_the_hit_tokens() -> None:
    result = row(*REQUESTS[:1])
    costs = Options().model
    assert result.tokens_saved == 20
    assert result.prefill_saved_s == pytest.approx(
        (costs.prefill_ms(25) - costs.prefill_ms(5, 20)) / 1e3
    )


def test_an_empty_report_is_marked_as_empty() -> None:
    read = Page(html(Options(), []))
    assert read.texts["p"][0] == "No request was served."
    assert "svg" not in read.count


def test_names_in_a_page_are_escaped(rows: list[Row]) -> None:
    read = Page(html(Options(workers=2), rows, Command="simulate '<b>'"))
    assert "a<b at 1x: 2 workers, qwen3-32b-h200, chunked engines" in read.texts["h1"]
    assert "<none>" in read.texts["td"]
    assert "simulate '<b>'" in read.texts["dd"]


def test_a_page_describes_the_simulation(rows: list[Row]) -> None:
    options = Options(
        workers=2, hbm=80 * 10**9, pool=3 * 10**12, local=500 * 10**9, bandwidth=7e9, speed=2.0
    )
    text = " ".join(Page(html(options, rows)).texts["dd"])
    assert "a<b: 2 requests in 1 s, 50 prompt tokens, 10 tokens a block" in text
    assert "an unlimited cache would hit 33.3 %" in text
    assert "80 GB of HBM" in text and "3.00 TB" in text and "11 devices" in text
    assert "500 GB of each worker's own DRAM at 50 GB/s" in text


def test_unequal_memories_and_queues_cause_warnings(rows: list[Row]) -> None:
    late = dataclasses.replace(rows[2], ttft_p99_s=120.0)
    source = html(Options(workers=2, pool=1 << 40, local=1 << 30), [late])
    warned = " ".join(re.findall(r'<p class="warn" role="note">(.*?)</p>', source))
    assert "Saturated: in 1 of 1 runs" in warned and "2 min" in warned
    assert "The two memories are not equal" in warned
    assert "cannot keep up" in Page(source).texts["p"][0]
    assert 'class="warn" role' not in html(Options(workers=2), rows)


@pytest.mark.parametrize(
    ("pool_s", "split_s", "message"),
    [
        (1.0, 3.0, "begin to answer after 1 s instead of 3 s at this load."),
        (1.0, 1.02, "A shared pool makes no difference here"),
        (3.0, 1.0, "A shared pool does not help here"),
    ],
)
def test_the_headline_names_the_better_memory(
    rows: list[Row], pool_s: float, split_s: float, message: str
) -> None:
    pool = dataclasses.replace(rows[2], ttft_mean_s=pool_s)
    split = dataclasses.replace(rows[2], memory="split", ttft_mean_s=split_s)
    assert message in Page(html(Options(workers=2), [pool, split])).texts["p"][0].replace(
        "\xa0", " "
    )


def test_the_pool_is_compared_with_the_best_of_split_dram(rows: list[Row]) -> None:
    mean = rows[2]
    listed = [
        dataclasses.replace(mean, policy="least-cost", ttft_mean_s=2.0),
        dataclasses.replace(mean, policy="random", ttft_mean_s=1.0),
        dataclasses.replace(mean, policy="random", memory="split", ttft_mean_s=9.0),
        dataclasses.replace(mean, policy="linear", memory="split", ttft_mean_s=4.0),
    ]
    chosen = summarize(listed, 5.0)
    assert (chosen.pool, chosen.split) == (listed[0], listed[3])


def test_of_several_loads_the_highest_within_the_objective_is_shown(rows: list[Row]) -> None:
    loads = [
        dataclasses.replace(rows[2], speed=speed, ttft_p90_s=p90)
        for speed, p90 in ((1.0, 2.0), (2.0, 4.0), (3.0, 8.0))
    ]
    assert summarize(loads, 5.0).speed == 2.0
    assert summarize(loads, 1.0).speed == 1.0
    assert sustained_load(loads, "pool", "random", 5.0) == pytest.approx(2.25)
    source = html(Options(workers=2), loads)
    # The trace has two requests in one second; its own speed is 2 requests per second.
    assert cards(source)["Load within the objective"] == ("4.5/s", "p90 within 5 s")
    assert "at 2x: 2 workers" in Page(source).texts["h1"][0]
    assert "Requests served" in Page(source).texts["figcaption"]


def test_the_time_series_adds_up_to_the_row() -> None:
    trace = make_trace("t", BLOCK, [TraceEntry(at / 4, 25, 20, (1, 2)) for at in range(40)], 1.0)
    results = simulate(trace, Options(workers=1), policies=["random"], memories=["pool"],
                     courses=True)  # fmt: skip
    course = results[0].course
    assert course is not None and results[1].course == course
    step = course.end_s[0]
    # Little's law: the mean number of waiting requests is the arrival rate times the mean wait.
    assert sum(course.waiting) * step == pytest.approx(40 * (results[0].ttft_mean_s or 0))
    assert course.hit_rate[0] == 0 or course.hit_rate[0] is None or course.hit_rate[0] < 1
    assert None in course.ttft_mean_s  # after the last arrival
    assert simulate(trace, Options(workers=1), policies=["random"])[0].course is None
