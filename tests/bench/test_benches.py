# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Each benchmark in smoke mode: its rows, its judgments, and what it reports without its peer."""

import importlib.util
import os
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beluga_bench import BENCHES, FIELDS, USES, Options, Row, save_crossings
from beluga_bench.harness.ground import ground
from beluga_bench.harness.machine import cores
from beluga_bench.harness.region import region_of, skewed, uniform
from beluga_bench.harness.row import Recorder
from beluga_bench.harness.tails import tails_row
from beluga_bench.paper.copy_save import with_sizes
from beluga_bench.paper.dsa import CASES, crossover, dsa_coherence, dsa_latency
from beluga_bench.peers import echoes, rpc_peers
from beluga_bench.peers.echoes import ECHOES, Echo
from beluga_bench.studies import growth
from beluga_bench.system.blocks import COUNT
from beluga_bench.system.indexer import LENGTH
from beluga_bench.system.linkmodel import ONBOARD, Piece, Shared, run
from beluga_bench.system.orders import Fifo, orders
from beluga_bench.system.scheduler import RATE
from support.leftovers import leftovers
from support.soft_dsa import soft_portal

from beluga import config
from beluga._ffi import ffi, lib
from beluga.errors import BelugaError, PoolError
from beluga.pool import Pool
from beluga.transfer import ENGINES, CpuEngine, EngineEntry
from beluga.transfer.dsa import nearest, work_queues

REQUIRED = {
    *("bench", "case", "bytes", "depth", "threads", "memory", "coherence", "p50_ns", "p99_ns"),
    *("ops_per_s", "gb_per_s", "limit", "ratio_to_limit", "machine", "commit", "command"),
}
JUDGED: dict[str, list[str]] = {  # those that are not listed are judged below
    "coherence": ["streamed store", "read after flush"],
    "latency": ["read", "write"],
    "bandwidth": ["read, uniform, interleaved", "write, skewed, not interleaved"],
    "rpc": ["c", "python"],
    "recovery": ["restart"],
    "copy": [
        *("gather_write", "scatter_read", "sparse_read"),
        *("null_gpu write, alone", "null_gpu read, alone", "null_gpu read, 2 processes"),
    ],
    "index": ["lookup", "reserve_commit"],
    "events": ["in the server's loop", "put, with pauses", "put, without pauses"],
}
BELOW = {
    *("rpc-peers", "indexer", "blocks", "tiers-disk", "tiers-pool", "tiers-remote", "gateway"),
    "scheduler",
}


# These take several seconds, even in smoke mode.
LONG = {"copy", "events", "gateway", "rpc", "rpc-peers", "scheduler", "tiers-pool"}
EACH = [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in BENCHES]

Smoke = Callable[[str], list[Row]]

HAS_REDIS = bool(importlib.util.find_spec("redis") and shutil.which("redis-server"))

REDIS_PROGRAM = {"file": importlib.util.find_spec("obstore") is not None, "redis": HAS_REDIS}

DSA_SIZES = (4096, 16384)

MB = 1_000_000
GB = 1_000_000_000


@pytest.mark.parametrize("name", EACH)
def test_every_row_has_the_required_fields(smoke: Smoke, name: str) -> None:
    assert set(FIELDS) >= REQUIRED
    for row in smoke(name):
        assert tuple(row) == FIELDS
        assert row["bench"] == name
        assert row["command"] == f"beluga bench {name} --smoke"
        measured = row["ops_per_s"] is not None
        assert measured != str(row["note"]).startswith("skipped: ")
        timed = row["p50_ns"] is not None  # a row of CPU time has no percentiles
        assert not timed or row["p50_ns"] <= row["p99_ns"]


@pytest.mark.parametrize("name", EACH)
def test_rows_with_a_goal_have_a_ratio_and_a_spread(smoke: Smoke, name: str) -> None:
    assert (name in JUDGED) != (name in BELOW)
    if name == "rpc" and len(cores()) < 2:
        pytest.skip("needs two cores")
    for case in JUDGED.get(name, []):
        rows = [r for r in smoke(name) if r["case"] == case and r["ratio_to_limit"] is not None]
        assert rows, case
        for row in rows:
            assert 0 < row["ratio_q1"] <= row["ratio_to_limit"] <= row["ratio_q3"]
            assert row["limit"] > 0
            assert row["memory"] == "tmpfs/DRAM" or "file" in str(row["memory"])


@pytest.mark.long
def test_rpc_measures_all_depths_under_each_coherence(smoke: Smoke) -> None:
    if len(cores()) < 2:
        pytest.skip("needs two cores")
    measured = {(row["coherence"], row["depth"]) for row in smoke("rpc") if row["case"] == "c"}
    modes = ("software", "hardware", "software, metadata hardware")
    assert measured == {(mode, depth) for mode in modes for depth in (1, 8, 32, 128, 256)}


@pytest.mark.long
def test_paced_rows_never_mix_with_others() -> None:
    for name in ("latency", "bandwidth"):
        rows = BENCHES[name](Options(smoke=True, pace="device=20GB/s,latency=650ns"))
        assert {row["memory"] for row in rows} == {"paced"}
        assert {row["ratio_to_limit"] for row in rows} == {None}
        assert all(row["p50_ns"] >= 650 for row in rows if row["p50_ns"] is not None)


def test_bandwidth_has_the_series_of_the_papers_figures(smoke: Smoke) -> None:
    """Exp 3: interleaved, not interleaved and local; Exp 4: lines beside another process's load."""
    rows = smoke("bandwidth")
    cases = {str(row["case"]): row for row in rows}
    for verb, pattern in product(("read", "write"), ("uniform", "skewed")):
        for where in ("interleaved", "not interleaved", "local DRAM"):
            assert cases[f"{verb}, {pattern}, {where}"]["p50_ns"] is not None
        assert cases[f"{verb}, {pattern}, local DRAM"]["memory"] == "DRAM (private)"
    if len(cores()) < 2:
        return
    for verb, other in product(("read", "write"), repeat=2):
        direction = "same" if verb == other else "opposite"
        loaded = cases[f"{verb}, beside {other}s at 50% ({direction} direction)"]
        assert (loaded["bytes"], cases[f"{verb}, alone"]["bytes"]) == (64, 64)
        assert re.search(r"another process (read|write)s [\d.]+ GB/s", str(loaded["note"]))


def measure_at(bench: str, path: Path, **options: str) -> list[Row]:
    return BENCHES[bench](Options(smoke=True, pool=(str(path),), **options))


def test_a_pool_of_the_user_is_used_and_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "device"
    Pool.create([path], device_size=40 << 20, coherence="software").close()
    rows = measure_at("latency", path)
    assert {row["coherence"] for row in rows if row["case"] == "write"} <= {"software", None}
    with Pool.open([path]) as pool:
        assert pool.devices[0].coherence == "software"


def test_a_pool_with_blocks_or_of_another_coherence_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "device"
    with Pool.create([path], device_size=40 << 20, coherence="hardware") as pool:
        with pytest.raises(PoolError, match="hardware"):
            measure_at("coherence", path, coherence="software")
        address = lib.bl_pool_address(pool.handle, pool.geometry.extent_offset)
        ffi.cast("bl_extent_line *", address).state = lib.BL_EXTENT_OPEN
    with pytest.raises(PoolError, match="holds blocks"):
        measure_at("latency", path)


def test_a_row_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(KeyError, match="speeed"):
        Recorder("rpc", Options(), {}).row("c", speeed=1)


def test_an_invalid_pace_is_rejected_and_leaves_no_files() -> None:
    with pytest.raises(BelugaError, match="no pace"):
        BENCHES["bandwidth"](Options(smoke=True, pace="fast"))
    assert leftovers("bench", os.getpid()) == set()


def test_uniform_offsets_are_in_the_region_and_do_not_overlap() -> None:
    offsets = uniform(1 << 20, 4096, 7)
    assert len(set(offsets)) == 256
    assert max(offsets) + 4096 <= 1 << 20
    assert not (offsets % 4096).any()


def test_skewed_offsets_are_mostly_hot() -> None:
    offsets = skewed(1 << 20, 4096, 7)
    hot = (offsets < 1 << 18).mean()
    assert 0.88 < hot < 0.97
    assert max(offsets) + 4096 <= 1 << 20


def test_each_step_is_measured_on_a_free_pool_and_on_a_full_one(
    smoke: Smoke,
) -> None:
    rows = {str(row["case"]): row for row in smoke("blocks")}
    assert list(rows) == [
        *("reserve, free", "release, free"),
        *("reserve, evicting", "register, evicting", "match, evicting", "release, evicting"),
    ]
    for case, row in rows.items():
        assert 0 < row["p50_ns"] <= row["p99_ns"], case
        assert row["fragments"] == COUNT
    assert rows["reserve, free"]["paper"] == "allocation < 1 ms"
    assert rows["release, evicting"]["paper"] == "release < 0.5 ms"


def test_the_first_exhausted_resource_follows_from_the_measurements() -> None:
    work = growth.Work(requests_per_s=1.0, prompt_tokens=1600, hit_rate=0.25)
    assert work.keys == 100
    rows = {
        name: (needed, has)
        for name, needed, has, _ in growth.table(work, growth.Measured(key_s=1e-6, route_s=1e-4))
    }
    request = 1600 * 262144 / 1e9
    assert rows["GPU paths, onboarding"] == pytest.approx((128 * 0.25 * request, 128 * 26))
    assert rows["adapters, written"] == pytest.approx((128 * 0.75 * request, 64 * 33))
    assert rows["32 memory devices"] == pytest.approx((128 * request, 720))
    assert rows["the switch"] == pytest.approx((128 * request, 1000))
    # Each key is looked up and released; three of four are also reserved and committed.
    assert rows["the pool's server, one thread"] == pytest.approx((128 * 100 * 3.5 / 1e6, 1.0))
    assert rows["a router, one process"] == pytest.approx((128, 10_000))


def test_the_costs_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "_ROUNDS", 3)
    measured = growth.measure(growth.Work(prompt_tokens=320))
    assert 0 < measured.key_s < 1
    assert 0 < measured.route_s < 1


def test_lookups_have_a_ratio_and_the_rest_percentiles(smoke: Smoke) -> None:
    rows = {str(row["case"]): row for row in smoke("indexer")}
    for case in ("find_matches, c", "find_matches, python"):
        row = rows[case]
        assert row["memory"] == "DRAM (private)"
        assert row["fragments"] == LENGTH
        assert 0 < row["ratio_q1"] <= row["ratio_to_limit"] <= row["ratio_q3"]
    assert {"stored", "removed", "decision, least-tokens", "decision, linear"} <= rows.keys()
    assert all(0 < row["p50_ns"] <= row["p99_ns"] for row in rows.values())


def test_both_engines_are_compared_with_fio(smoke: Smoke) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    rows = smoke("tiers-disk")
    read = [row for row in rows if str(row["case"]).endswith("read")]
    assert {row["case"] for row in read} == {"random read", "sequential read"}
    assert {row["engine"] for row in read} == {"uring", "threads"}
    assert {row["engine"] for row in rows if row["case"] == "save"} == {"uring", "threads"}
    loaded = [row for row in rows if str(row["case"]).startswith("load beside saves")]
    assert len(loaded) == 2
    for row in rows:
        if not str(row["note"]).startswith("skipped: "):
            assert 0 < row["ratio_q1"] <= row["ratio_to_limit"] <= row["ratio_q3"]
    assert rows[-1]["case"] == "index rebuild"


def test_without_fio_a_row_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (row,) = BENCHES["tiers-disk"](Options(smoke=True))
    assert "apt-get install fio" in str(row["note"])


@pytest.mark.long
def test_gets_during_tier_work_are_compared_with_the_same_gets_alone(
    smoke: Smoke,
) -> None:
    onboard, hit = smoke("tiers-pool")
    assert onboard["case"] == "onboard beside offloads, 200 MB/s"
    assert hit["case"] == "hit beside a stopped store"
    assert str(hit["note"]).startswith("skipped: ") is not HAS_REDIS
    for row in [onboard, hit] if HAS_REDIS else [onboard]:
        assert 0 < row["ratio_q1"] <= row["ratio_to_limit"] <= row["ratio_q3"]
        assert 0 < row["p50_ns"] <= row["p99_ns"]


@pytest.mark.parametrize(
    "bench", [pytest.param("tiers-pool", marks=pytest.mark.long), "tiers-remote"]
)
def test_without_a_server_a_row_has_the_reason(bench: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")
    monkeypatch.setenv("PATH", "/nowhere")
    rows = BENCHES[bench](Options(smoke=True))
    assert "apt-get install redis-server" in str(rows[-1]["note"])


def test_the_ratio_is_that_of_the_99th_percentiles() -> None:
    alone = np.array([100] * 97 + [1000] * 3, np.uint64)
    loaded = np.array([100] * 97 + [4000] * 3, np.uint64)
    row = tails_row(
        Recorder("tiers-pool", Options(), {}), "get", [(alone, loaded)] * 2, work="tests"
    )
    assert row["ratio_to_limit"] == 0.25
    assert row["p50_ns"] == 100
    assert str(row["note"]).endswith("beside tests, 0.00 ms alone: 4.00 times")


def test_each_store_is_compared_with_its_bare_client(smoke: Smoke) -> None:
    rows = smoke("tiers-remote")
    for engine, installed in REDIS_PROGRAM.items():
        mine = [row for row in rows if row["engine"] == engine]
        if not installed:
            assert [str(row["note"]).startswith("skipped: ") for row in mine] == [True]
            continue
        assert [row["case"] for row in mine] == ["save", "load"]
        for row in mine:
            assert 0 < row["ratio_q1"] <= row["ratio_to_limit"] <= row["ratio_q3"]


def dsa_rows(**queue: Any) -> list[Row]:
    with ground(Options(smoke=True), devices=1) as pool:
        recorder, region = Recorder("coherence", Options(smoke=True), {}), region_of(pool)
        rows = dsa_coherence(recorder, region, 16384, **queue)
        return rows + dsa_latency(recorder, region, DSA_SIZES, [], **queue)


def test_without_a_device_rows_are_skipped_with_a_reason() -> None:
    if nearest(work_queues(), set()):
        pytest.skip("there is a DSA")
    rows = dsa_rows()
    assert [row["case"] for row in rows] == [*CASES, "dsa read", "dsa write"]
    assert all(str(row["note"]).startswith("skipped: ") for row in rows)
    assert all(row["ops_per_s"] is None for row in rows)


def test_rows_of_a_software_queue_are_measured_and_marked() -> None:
    rows = dsa_rows(queue=soft_portal)
    assert len(rows) == len(CASES) + 2 * len(DSA_SIZES)
    for row in rows:
        assert str(row["note"]).startswith("software queue")
        assert float(str(row["ops_per_s"])) > 0


@pytest.mark.parametrize(
    ("cpu", "device", "expected"),
    [
        ({64: 1, 4096: 2, 16384: 6}, {64: 3, 4096: 3, 16384: 5}, "from 16384 bytes"),
        ({64: 1, 4096: 4, 16384: 6}, {64: 3, 4096: 3, 16384: 5}, "from 4096 bytes"),
        ({64: 9, 4096: 2, 16384: 6}, {64: 3, 4096: 3, 16384: 5}, "from 16384 bytes"),
        ({64: 1, 4096: 2}, {64: 3, 4096: 3}, "never"),
        ({64: 1}, {}, "never"),
    ],
)
def test_the_crossover_is_the_size_from_which_dsa_stays_faster(
    cpu: dict[int, float], device: dict[int, float], expected: str
) -> None:
    assert expected in crossover(cpu, device)


@pytest.fixture(scope="module")
def scheduler_rows(smoke: Smoke) -> dict[str, Row]:
    return {str(row["case"]): row for row in smoke("scheduler")}


@pytest.mark.long
def test_every_order_and_the_decision_time_have_a_row(scheduler_rows: dict[str, Row]) -> None:
    virtual = {f"{name}, {how}" for name in orders(RATE) for how in ("at random", "evenly")}
    in_c = {"decision, in C, alone", "decision, in C, beside another", "waiting, in C"}
    decisions = {"decision", *in_c}
    link = {f"caches, slow link, {how}" for how in ("ours", "one class")}
    memory = {f"caches, memory, {what}" for what in ("host's link", "no link")}
    assert scheduler_rows.keys() == virtual | decisions | link | memory
    for case in link | memory:
        assert "processes that put" in str(scheduler_rows[case]["note"])
        assert ("a piece waited" in str(scheduler_rows[case]["note"])) == (
            case != "caches, memory, no link"
        )
    for case in virtual:
        assert scheduler_rows[case]["memory"] == "virtual time"
        assert float(str(scheduler_rows[case]["ratio_to_limit"])) > 0.95
        assert "without offloads: p50" in str(scheduler_rows[case]["note"])
    assert "only reads the clock" in str(scheduler_rows["decision"]["note"])


@pytest.mark.long
def test_only_the_fair_queue_keeps_onboards_short(scheduler_rows: dict[str, Row]) -> None:
    longer = {
        case: float(match[1])
        for case, row in scheduler_rows.items()
        if (match := re.search(r"p99 ([\d.]+) times as long", str(row["note"])))
    }
    for how in ("at random", "evenly"):
        assert longer[f"ours, {how}"] <= 1.3
        for other in ("FIFO", "shared counter", "copy first"):
            assert longer[f"{other}, {how}"] > 1.5


@pytest.mark.long
def test_rows_in_virtual_time_are_reproducible(scheduler_rows: dict[str, Row]) -> None:
    def made() -> list[int]:
        order = orders(RATE)["ours"]
        return run(
            order, bytes_per_s=RATE, onboard_share=0.5, offload=True, duration_ns=5 * MB, seed=3
        ).latencies_ns

    assert made() == made()


def test_every_benchmark_names_the_options_that_it_uses() -> None:
    assert list(USES) == list(BENCHES)
    assert {name for uses in USES.values() for name in uses} <= Options.__dataclass_fields__.keys()


@pytest.mark.parametrize(
    ("starts_us", "ends_us"),
    [
        ([0], [1000]),
        ([0, 0], [2000, 2000]),
        ([0, 500], [1500, 2000]),
        ([0] * 10, [10_000] * 10),
    ],
)
def test_the_link_shares_its_bandwidth_evenly(starts_us: list[int], ends_us: list[int]) -> None:
    """Dynamo's example for its own model: copies of a megabyte each over 1 GB/s."""
    link = Shared(GB)
    waiting = [(start * 1000, Piece(ONBOARD, key, MB)) for key, start in enumerate(starts_us)]
    ended: dict[int, int] = {}
    while len(ended) < len(starts_us):
        now = min([link.next_ns(), *(start for start, _ in waiting)])
        for piece in link.end(round(now)):
            ended[piece.block] = round(now / 1000)
        while waiting and waiting[0][0] <= now:
            link.start(waiting.pop(0)[1], round(now))
    assert [ended[key] for key in range(len(starts_us))] == ends_us


def test_the_time_on_an_idle_link_is_proportional_to_the_block() -> None:
    outcome = run(
        Fifo(), bytes_per_s=GB, onboard_share=0.3, offload=False, duration_ns=100 * MB, regular=True
    )
    expected = (5 << 19) / GB * 1e9
    assert all(abs(took - expected) < 100 for took in outcome.latencies_ns)
    assert outcome.utilisation == pytest.approx(0.3, abs=0.05)


# ---- The gateway


@pytest.fixture(scope="module")
def gateway_rows(smoke: Smoke) -> dict[str, Row]:
    pytest.importorskip("aiohttp", reason="the router's packages are not installed")
    return {str(row["case"]): row for row in smoke("gateway")}


@pytest.mark.long
def test_the_gateway_is_compared_with_a_bare_proxy(gateway_rows: dict[str, Row]) -> None:
    rows = gateway_rows
    for case in ("time to first byte", "time to last byte"):
        row = rows[case]
        assert 0 < float(str(row["ratio_q1"])) <= float(str(row["ratio_q3"]))
        figures = re.findall(r"(\w+) ([\d.]+) / ([\d.]+)", str(row["note"]))
        assert [name for name, *_ in figures] == ["engine", "bare", "ours"]
        assert all(0 < float(p50) <= float(p99) for _, p50, p99 in figures)
        assert "to the bare proxy's p50" in str(row["note"])


@pytest.mark.long
def test_cpu_time_is_reported_for_requests_and_events(gateway_rows: dict[str, Row]) -> None:
    rows = gateway_rows
    for case in ("CPU of 2 kB", "CPU of an event", "CPU of 64 kB"):
        match = re.search(
            r"^([\d.]+) times the bare proxy's .*; bare (\d+) us, ours (\d+) us$",
            str(rows[case]["note"]),
        )
        assert match is not None
        times, bare_us, ours_us = map(float, match.groups())
        assert times > 0 and bare_us > 0 and ours_us > 0
    bare = {case: float(str(rows[case]["limit"])) for case in rows if case.startswith("CPU")}
    assert bare["CPU of an event"] > 2 * bare["CPU of 2 kB"]  # an event costs less than a request


# ---- RPC compared with other libraries


needs_two_cores = pytest.mark.skipif(len(cores()) < 2, reason="needs two cores")


@needs_two_cores
@pytest.mark.long
def test_every_library_has_a_row_or_a_reason(smoke: Smoke) -> None:
    rows = {row["peer"]: row for row in smoke("rpc-peers") if row["peer"] in ECHOES}
    assert set(rows) == {"gRPC", "ZeroMQ", "iceoryx2", "pipe", "Redis"}
    for name, row in rows.items():
        echo = ECHOES[str(name)]
        if why := echo.missing():
            assert row["note"] == f"skipped: {why}"
        else:
            assert row["ratio_to_peer"] > 0
            assert row["p50_q1_ns"] <= row["p50_ns"] <= row["p50_q3_ns"]


@needs_two_cores
def test_the_papers_figures_of_rdma_are_rows_without_a_measurement(
    smoke: Smoke,
) -> None:
    rows = [row for row in smoke("rpc-peers") if row["case"] == "the paper's machine"]
    figures = {(row["peer"], row["depth"]): row["paper"] for row in rows}
    assert figures["RDMA, reliable connection", 1] == "8.39 us round trip"
    assert figures["RDMA, unreliable datagram", 128] == "6.65 M calls/s"
    for row in rows:
        assert str(row["note"]).startswith("skipped: not measured here")
        assert row["p50_ns"] is row["ops_per_s"] is row["memory"] is None


@needs_two_cores
def test_calls_from_c_and_from_python_have_rows(smoke: Smoke) -> None:
    rows = {row["case"]: row for row in smoke("rpc-peers") if row["peer"] is None}
    assert list(rows) == ["C to C", "Python to Python, by number", "Python to Python, by name"]
    assert all(row["bytes"] == 64 and row["ops_per_s"] > 0 for row in rows.values())


@needs_two_cores
def test_a_missing_library_is_reported_with_its_install_command() -> None:
    absent = replace(ECHOES["gRPC"], module="no_such_module_of_anybody", package="grpcio")
    assert absent.missing() == "grpcio is not installed; pip install grpcio"


@needs_two_cores
def test_mooncakes_master_has_a_row_or_a_reason(smoke: Smoke) -> None:
    (row,) = [row for row in smoke("rpc-peers") if row["peer"] == "Mooncake"]
    assert (row["case"], row["bytes"]) == ("Python to a master in C++", 64)
    if why := rpc_peers._mooncake_missing():
        assert row["note"] == f"skipped: {why}"
    else:
        assert row["p50_ns"] > 0


@needs_two_cores
def test_a_missing_server_is_reported_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("redis")
    monkeypatch.setenv("PATH", "")
    why = ECHOES["Redis"].missing()
    assert why == "redis-server is not installed; on Debian: apt-get install redis-server"


@needs_two_cores
@pytest.mark.parametrize("name", ECHOES)
@pytest.mark.parametrize("size", rpc_peers.SIZES)
def test_an_echo_of_a_library_returns_the_bytes(name: str, size: int) -> None:
    echo: Echo = echoes.ECHOES[name]
    if why := echo.missing():
        pytest.skip(why)
    with echoes.socket_folder() as folder, ExitStack() as stack:
        if echo.program is not None:
            stack.enter_context(echo.program(folder))
        elif echo.serve is not None:
            stack.callback(echo.serve(folder, size))
        call = stack.enter_context(echo.client(folder, size))
        for turn in range(3):
            request = bytes((index * 7 + turn) % 251 for index in range(size))
            assert call(request) == request
    assert not Path(folder).exists()
    assert not list(Path("/dev/shm").glob(f"{Path(folder).name}*"))


@needs_two_cores
def test_an_echo_that_returns_other_bytes_is_an_error() -> None:
    sample = rpc_peers._from_python(lambda request: request[:-1] + bytes(1), 64)
    with pytest.raises(BelugaError, match="other bytes"):
        sample(1)


# ---- Sizes that ``beluga bench copy --save`` writes

SIZES = {"dsa-write": 8192, "dsa-read": 4096}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "[copy]\ndsa-write = 8192\ndsa-read = 4096\n"),
        ("host = 1", "host = 1\n\n[copy]\ndsa-write = 8192\ndsa-read = 4096\n"),
        (
            "host = 1\n[copy]  # mine\npast = 3\ndsa-read = 1\n\n[serve]\ndsa-read = 1\n",
            "host = 1\n[copy]  # mine\ndsa-write = 8192\ndsa-read = 4096\npast = 3\n\n"
            "[serve]\ndsa-read = 1\n",
        ),
        ("[copy]", "[copy]\ndsa-write = 8192\ndsa-read = 4096\n"),
    ],
)
def test_only_the_sizes_change(before: str, after: str) -> None:
    assert with_sizes(before, SIZES) == after
    assert with_sizes(after, SIZES) == after


def test_measured_sizes_are_those_that_caches_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "beluga.toml"
    monkeypatch.setenv("BELUGA_CONFIG", str(path))
    monkeypatch.setitem(ENGINES, "dsa", EngineEntry(name="dsa", open=CpuEngine, memory="gpu"))
    assert save_crossings(Options(smoke=True)) is None
    monkeypatch.setitem(ENGINES, "toy", EngineEntry(name="toy", open=CpuEngine))
    assert save_crossings(Options(smoke=True)) == path
    assert config.copy_settings().keys() == {"toy-read", "toy-write"}
