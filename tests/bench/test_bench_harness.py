# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The harness of the benchmarks: runs, paces, ratios, the bandwidth limiter, and tokens. The page
of benchmarks: its figures are the rows', and it shows important limits prominently.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import beluga_bench
import msgspec
import numpy as np
import pytest
from beluga_bench import Options, Recorded, Results, Row, load, report, run
from beluga_bench._limit import ffi, lib
from beluga_bench.harness import drive
from beluga_bench.harness.charts import charts
from beluga_bench.harness.drive import Driver, Load
from beluga_bench.harness.pace import Pace, Paces, make_paces, parse_pace, shared_paces
from beluga_bench.harness.ratio import compare, race
from beluga_bench.harness.row import Recorder, is_emulated, is_smoke
from beluga_bench.harness.tokens import SELECTED, analysis, run_lengths, selection
from click.testing import CliRunner
from numpy import float64
from page.well_formed import Page, row

from beluga.cli.app import app
from beluga.errors import BelugaError, CallTimeoutError
from beluga.pool import STRIPE_SIZE, Pool

Bench = Callable[[Any], list[Row]]

SIZE = 16 << 10
WRITES = ["write", "store", "store_clflush", "store_clflushopt", "store_clwb"]


def rows_then(count: int, end: BaseException | None = None) -> Bench:
    """Return a benchmark that finishes that many rows and then fails or succeeds."""

    def measure(options: Options) -> list[Row]:
        recorder, rows = Recorder("rpc", options, {"memory": "DRAM"}), []
        for number in range(count):
            options.report(f"case {number}")
            rows.append(recorder.row(f"case {number}", depth=number, ops_per_s=1))
        if end is not None:
            raise end
        return rows

    return measure


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Bench]:
    made: dict[str, Bench] = {}
    monkeypatch.setattr(beluga_bench, "BENCHES", made)
    return made


@pytest.mark.parametrize("end", [CallTimeoutError("late"), OSError(5, "gone")])
def test_rows_before_a_failure_are_kept_and_later_benchmarks_run(end: Exception) -> None:
    done = run({"a": rows_then(3, end), "b": rows_then(2)}, ["a", "b"], Options())
    assert [row["case"] for row in done.rows] == ["case 0", "case 1", "case 2", "case 0", "case 1"]
    assert list(done.missing) == ["a"] and "it failed after 3 rows" in done.missing["a"]
    assert done.ended is None


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interruption_ends_the_run_and_loses_no_row(end: BaseException) -> None:
    done = run({"a": rows_then(2, end), "b": rows_then(1)}, ["a", "b"], Options())
    assert (len(done.rows), done.ended, list(done.missing)) == (2, end, ["a", "b"])


def test_progress_shows_a_total_and_the_remaining_time() -> None:
    calls: list[str] = []
    run({"a": rows_then(2), "b": rows_then(2)}, ["a", "b"], Options(progress=calls.append))
    assert calls[0].startswith("case 0 (1 of about ")
    assert all(", about " in line and line.endswith(" left)") for line in calls[1:])
    assert calls[-1].startswith("case 1 (4 of about 4, about ")


@pytest.mark.parametrize(
    ("end", "status"),
    [(BelugaError("late"), 1), (KeyboardInterrupt(), 130), (SystemExit(143), 143)],
)
@pytest.mark.parametrize("form", ["--json", "--wide"])
def test_the_command_prints_what_was_finished(
    benches: dict[str, Bench], end: BaseException, status: int, form: str
) -> None:
    benches["rpc"] = rows_then(3, end)
    done = CliRunner().invoke(app, ["bench", "rpc", form])
    assert done.exit_code == status
    if form == "--json":
        assert [row["case"] for row in json.loads(done.stdout)] == ["case 0", "case 1", "case 2"]
    else:
        assert [f"case {number}" in done.stdout for number in range(4)] == [True] * 3 + [False]
    output = done.stderr + str(done.exception)
    assert "3 completed rows" in output


def test_a_table_is_printed_when_its_benchmark_ends(benches: dict[str, Bench]) -> None:
    benches["one"] = rows_then(1)
    benches["two"] = rows_then(2, KeyboardInterrupt())
    done = CliRunner().invoke(app, ["bench", "one", "two"])
    assert done.exit_code == 130
    assert done.stdout.count("case 0") == 2


def test_a_table_of_a_benchmark_fits_80_columns(
    benches: dict[str, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(options: Options) -> list[Row]:
        recorder = Recorder("copy", options, {"memory": "DRAM", "threads": 1, "bytes": 40})
        figures = {"p50_ns": 123456.7, "p99_ns": 1234567.8, "ops_per_s": 29_000_000.0,
                   "gb_per_s": 123.4, "limit": 54_000_000.0, "ratio_to_limit": 0.987,
                   "ratio_to_peer": 1.23, "paper": "12.13 M calls/s"}  # fmt: skip
        return [recorder.row(f"a case of many words {n}", depth=n, **figures) for n in range(8)]

    monkeypatch.setenv("COLUMNS", "80")
    benches["copy"] = measure
    done = CliRunner().invoke(app, ["bench", "copy"])
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("┏") for line in lines) == 1  # one table
    assert "threads 1" in lines[0] and "0.987" in done.stdout
    assert "--wide" in done.stderr
    whole = CliRunner().invoke(app, ["bench", "copy", "--wide"]).stdout
    assert "12.13 M calls/s" in whole


def clock(bytes_per_s: int, latency_ns: int = 0) -> Any:
    return ffi.new("drive_pace *", {"bytes_per_s": bytes_per_s, "latency_ns": latency_ns})


def test_a_pace_is_parsed_with_its_units() -> None:
    assert parse_pace("device=22.5GB/s,latency=650ns") == Pace(22_500_000_000, 650)
    assert parse_pace("device=500MB/s") == Pace(500_000_000, 0)
    assert parse_pace("latency=2us,device=1GB/s") == Pace(10**9, 2000)


@pytest.mark.parametrize(
    "text", ["", "device=0GB/s", "latency=650ns", "device=22.5", "device=3ns", "device=1GB/s,x=2ns"]
)
def test_an_invalid_pace_is_rejected(text: str) -> None:
    with pytest.raises(BelugaError, match="no pace"):
        parse_pace(text)


@pytest.mark.parametrize(
    ("latency_ns", "operations", "ends"),
    [
        (650, [(5_000, 1000)], [5_000 + 1000 + 650]),  # idle: the transfer and the latency
        # Operations queue for the bandwidth, and their latencies overlap.
        (650, [(0, 1000)] * 4, [1650, 2650, 3650, 4650]),
        (0, [(0, 1000), (10_000, 1000)], [1000, 11_000]),  # idle time accumulates no credit
    ],
)
def test_operations_end_when_the_device_has_moved_their_bytes(
    latency_ns: int, operations: list[tuple[int, int]], ends: list[int]
) -> None:
    device = clock(10**9, latency_ns)
    assert [lib.drive_pace_take(device, *operation) for operation in operations] == ends


def test_every_offset_uses_the_clock_of_its_device(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    clocks = tmp_path / "clocks"
    make_paces(clocks, 2, Pace(10**9, 7))
    for interleave in (True, False):
        with Pool.create(paths, device_size=16 << 20, interleave=interleave, sparse=True) as pool:
            offsets = [stripe * STRIPE_SIZE for stripe in range(14)]
            for first, verb in enumerate(("read", "write")):
                paces = shared_paces(pool, clocks, verb, offsets)
                numbers = [paces.pointers[i] - paces.clocks for i in range(len(offsets))]
                devices = [0, 1] * 7 if interleave else [0] * 7 + [1] * 7
                assert numbers == [2 * device + first for device in devices]
                assert paces.pointers[0].latency_ns == 7
        Pool.destroy(paths)


@pytest.mark.parametrize(
    ("other", "ends"), [("write", [6000, 7000]), ("read", [1000, 6000])], ids=["shared", "apart"]
)
def test_clocks_are_shared_by_processes_but_not_by_reads_and_writes(
    tmp_path: Path, other: str, ends: list[int]
) -> None:
    make_paces(tmp_path / "clocks", 1, Pace(10**9))
    with Pool.create([tmp_path / "a"], device_size=16 << 20, sparse=True) as pool:
        clocks = [shared_paces(pool, tmp_path / "clocks", verb, [0]) for verb in ("write", other)]
        mine, theirs = (each.pointers[0] for each in clocks)
        lib.drive_pace_take(mine, 0, 5000)
        assert [lib.drive_pace_take(each, 0, 1000) for each in (theirs, mine)] == ends


def test_a_load_that_overlaps_does_not_wait_for_its_own_latencies() -> None:
    """Its operations queue for the bandwidth, but the next one starts during a latency."""
    memory = np.zeros(4096, np.uint8)
    for overlaps in (False, True):
        pace = clock(10**12, 5_000_000_000 if overlaps else 50_000_000)
        pointers = ffi.new("drive_pace *[]", [pace] * 4)
        load = Load(
            drive.bare("load", memory.ctypes.data),
            np.zeros(4, np.uint64),
            64,
            Paces(pointers, pace),
            overlaps=overlaps,
        )
        start_ns = drive.now_ns()
        assert Driver(load).count(4) > 0
        taken_ns = drive.now_ns() - start_ns
        assert taken_ns < 5_000_000_000 if overlaps else taken_ns >= 200_000_000


@pytest.mark.parametrize(
    ("pairs", "ratios", "limit_ours"),
    [
        # the median of the pairs, and not of the speeds
        ([(100, 50), (200, 180), (110, 66)], (0.55, 0.6, 0.75), (110, 66)),
        ([(10, ours) for ours in (1, 2, 3, 4, 5)], (0.2, 0.3, 0.4), (10, 3)),
    ],
)
def test_a_ratio_and_its_spread_are_those_of_the_pairs(
    pairs: list[tuple[float, float]], ratios: tuple[float, ...], limit_ours: tuple[float, float]
) -> None:
    results = compare(pairs)
    assert (results.ratio_q1, results.ratio, results.ratio_q3) == pytest.approx(ratios)
    assert (results.limit, results.ours) == limit_ours


@pytest.mark.parametrize(("last", "noisy"), [(124.0, False), (126.0, True)])
def test_a_limit_that_varies_by_more_than_a_quarter_is_noisy(last: float, noisy: bool) -> None:
    assert compare([(100.0, 90.0), (100.0, 90.0), (last, 90.0)]).noisy is noisy


@pytest.mark.parametrize(
    ("speeds", "pair_count", "timed", "noisy"),
    [
        ([10.0] * 9, 9, 9, False),
        ([10.0, 20.0, 10.0, 10.0, 10.0, 10.0], 2, 4, False),  # measured again until stable,
        ([10.0, 20.0] * 4, 2, 8, True),  # at most three times
    ],
)
def test_limit_and_engine_are_timed_alternately_until_the_limit_is_stable(
    speeds: list[float], pair_count: int, timed: int, noisy: bool
) -> None:
    log: list[str] = []
    left = iter(speeds)
    ratio = race(
        lambda: log.append("limit") or next(left),
        lambda: log.append("ours") or 5.0,
        pair_count=pair_count,
        retry_count=3,
    )
    assert log == ["limit", "ours"] * timed
    assert ratio.noisy is noisy
    assert noisy or ratio.ratio == 0.5


def run_limited(name: str, memory: np.ndarray, buffer: np.ndarray) -> None:
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
    run_limited(name, memory, data)
    assert np.array_equal(memory[64:-64], data)
    assert not memory[:64].any()
    assert not memory[-64:].any()


@pytest.mark.parametrize("name", ["read", "load"])
def test_a_read_returns_all_bytes(name: str, memory: np.ndarray) -> None:
    memory[:] = np.random.default_rng(2).integers(0, 256, len(memory), dtype=np.uint8)
    target = np.zeros(SIZE, np.uint8)
    run_limited(name, memory, target)
    assert np.array_equal(target, memory[64:-64])


def test_rows_are_gathered_and_scattered(memory: np.ndarray) -> None:
    private = np.random.default_rng(3).integers(0, 256, (8, 256), dtype=np.uint8)
    wanted, base = private.copy(), memory.ctypes.data
    near = private.ctypes.data + np.array([5, 0, 7, 2], np.uint64) * np.uint64(256)
    far = base + np.array([512, 2048, 0, 1024], np.uint64)
    pointers = [ffi.cast("uint64_t *", array.ctypes.data) for array in (near, far)]
    rows = ffi.new("limit_rows *", {"private_places": pointers[0], "pool_places": pointers[1]})
    rows.size = 256
    assert lib.limit_gather(rows, 1, ffi.NULL, 3 * 256) == 0
    assert not memory[512:1024].any()  # the first row was not copied
    for number, offset in ((0, 2048), (7, 0), (2, 1024)):
        assert np.array_equal(memory[offset : offset + 256], wanted[number])
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


def driver_of(verb: str, memory: np.ndarray, *offsets: int, size: int = 64, **more: int) -> Driver:
    operation = drive.bare(verb, memory.ctypes.data)
    return Driver(Load(operation, np.array(offsets, np.uint64), size, **more))


def test_a_driver_visits_every_offset_in_order(memory: np.ndarray) -> None:
    driver = driver_of("write", memory, 64, 0)
    driver.count(1)
    assert memory[64:128].all()
    assert not memory[:64].any()
    driver.count(3)
    assert driver.done == 3
    assert memory[:128].all()


def test_a_fixed_rate_is_not_exceeded_and_each_operation_is_timed(memory: np.ndarray) -> None:
    driver = driver_of("load", memory, 0, period_ns=100_000)
    driver.hold(0.002)
    assert 1 <= driver.done <= 20
    samples = driver_of("read", memory, 0, size=SIZE).sample(50)
    assert len(samples) == 50
    assert (samples > 0).all()


def test_the_hash_table_finds_stored_keys() -> None:
    keys = np.random.default_rng(5).integers(1, 1 << 63, 700, dtype=np.uint64)
    slots = np.zeros(2 * 1024, np.uint64)
    table = ffi.new("limit_hash *", {"slot": ffi.cast("limit_slot *", slots.ctypes.data)})
    table.slots = 1024
    lib.limit_hash_put(table, ffi.cast("uint64_t *", keys.ctypes.data), 600)
    for first, last in ((0, 1), (10, 20), (590, 600)):
        stored = np.ascontiguousarray(keys[first:last])
        walked = lib.limit_hash_walk(table, ffi.cast("uint64_t *", stored.ctypes.data), len(stored))
        assert walked == sum(range(first, last))
    absent = np.ascontiguousarray(keys[600:])
    assert lib.limit_hash_walk(table, ffi.cast("uint64_t *", absent.ctypes.data), 100) == 0


def test_ctrl_c_ends_drivers_before_it_is_raised(memory: np.ndarray) -> None:
    """Otherwise the pool would be unmapped while C still writes to it."""
    drivers = [driver_of("write", memory, 64, size=SIZE) for _ in range(2)]
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


def test_runs_are_counted_by_their_tokens() -> None:
    assert run_lengths(np.array([1, 2, 3, 7, 9, 10, 20])) == {1: 2, 2: 2, 3: 3}


def test_of_sixteen_tokens_74_percent_have_no_neighbor() -> None:
    selections = [selection(turn, 1000) for turn in range(50)]
    for tokens in selections:
        assert len(tokens) == SELECTED
        assert (np.diff(tokens) > 0).all()
        assert 0 <= tokens[0] <= tokens[-1] < 1000
    alone = sum(run_lengths(tokens)[1] for tokens in selections)
    assert alone / (50 * SELECTED) == 0.74
    assert analysis(selections).startswith("of 800 tokens 74 % in runs of 1, ")


# ---- The page

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDED = sorted((ROOT / "bench/results").glob("*.json"))


def page(*rows: Row, **given: Any) -> Page:
    return Page(report(Results(rows=rows, source="made up", **given)))


def test_every_figure_of_a_row_is_on_the_page_with_its_origin() -> None:
    read = page(row())
    cells = read.texts["td"]
    for text in ("950 ns", "1.23 us", "1.1 M/s", "2.2 M/s", "0.5 (0.4, 0.6)", "devdax"):
        assert text in cells, text
    assert any(
        "a CPU, commit unknown, 2026-01-02, command: beluga bench rpc" in text
        for text in read.texts["p"]
    )
    assert "Half of 1 measured cases reach 50 % or more" in read.texts["p"][0].replace("\xa0", " ")
    assert "50 % of the limit's speed, devdax" in read.texts["dd"]


def warnings(read: Page) -> str:
    return " ".join(text for text in read.texts["p"])


def test_a_normal_run_has_no_warning() -> None:
    shown = warnings(page(row()))
    assert not any(word in shown for word in ("SMOKE", "Emulated", "Noisy", "missing", "machines"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"command": "beluga bench rpc --smoke"}, "SMOKE RUN"),
        ({"noisy": True}, "Noisy: in 1 of 1 rows"),
        *(({"memory": at}, "Emulated memory") for at in ("tmpfs/DRAM", "ext4 file", "paced")),
    ],
)
def test_important_limits_are_shown_prominently(given: dict[str, Any], message: str) -> None:
    read = page(row(**given))
    assert message in warnings(read)
    assert "(" in next(text for text in read.texts["h2"] if text.startswith("rpc"))


def test_a_smoke_run_is_marked_in_headline_title_and_each_chart() -> None:
    read = page(*(row(depth=depth, command="beluga bench rpc --smoke") for depth in (1, 8)))
    assert read.texts["title"][0].startswith("Smoke run")
    assert read.texts["p"][0].startswith("SMOKE RUN")
    assert all("SMOKE RUN" in text for text in read.texts["figcaption"])
    assert len(read.texts["figcaption"]) == 2


def test_missing_rows_are_listed_with_their_reason() -> None:
    read = page(row(), missing={"latency": "the run was interrupted", "copy": "it failed: <x>"})
    assert "latency is missing: the run was interrupted" in warnings(read)
    assert "copy is missing: it failed: <x>" in warnings(read)


def test_runs_of_other_machines_are_shown_separately() -> None:
    read = page(row(depth=1), row(depth=8, machine="another CPU"))
    assert "The rows come from 2 machines" in warnings(read)
    assert sum(text.startswith("From a") for text in read.texts["p"]) == 2


def test_skipped_cases_have_their_reason_and_no_empty_row() -> None:
    lacking = row("latency", "dsa read", note="skipped: no <dsa>", ops_per_s=None,
                  ratio_to_limit=None)  # fmt: skip
    read = page(row("latency", "read", bytes=64), lacking)
    assert "dsa read: no <dsa>" in read.texts["li"]
    assert "dsa read" not in read.texts["td"]


def test_peers_of_the_run_and_recorded_peers_are_distinct() -> None:
    peer = row("copy", "gather_write", peer="numpy", ratio_to_peer=2.5, gb_per_s=8.0)
    old = Recorded("demo.json", {"machine": "M", "commit": "unknown", "date": "2025-05-05",
                                 "command": "demo", "ttft_hit_s": 0.1, "prompt_tokens": 9,
                                 "peers": {"<other>": 0.2}})  # fmt: skip
    read = page(row(), peer, recorded=[old])
    assert "ours is 2.5 times as fast" in read.texts["td"]
    assert "unknown, 2026-01-02" in read.texts["td"]
    assert "demo.json: M, commit unknown, 2025-05-05, command: demo" in read.texts["p"]
    assert "from <other>" in read.texts["td"] and "200 ms" in read.texts["td"]


def test_hostile_names_are_escaped() -> None:
    evil = "<script>alert(1)</script>"
    read = page(row(evil, evil, machine=evil, commit=evil, note=evil, memory=evil, command=evil))
    assert evil in read.texts["td"]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_every_recorded_file_makes_a_page(path: Path) -> None:
    content = load(path)
    if isinstance(content, Recorded):
        read = page(recorded=[content])
        assert any(content.content.get("machine", "") in text for text in read.texts["p"])
    else:
        read = page(*content)
        assert set(read.ids) >= {f"bench-{row['bench']}" for row in content}
        assert all(charts([r for r in content if r["bench"] == name]) for name in
                   {row["bench"] for row in content})  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[]", "has no results"),
        (b"[1]", "has no results"),
        (b"3", "has no results"),
        (b'[{"bench": "a", "case": "b", "p50_ns": "soon"}]', "p50_ns of case 'b' is 'soon'"),
        (b'[{"bench": "a", "case": "b", "limit": []}]', "limit of case 'b' is []"),
    ],
)
def test_files_without_results_are_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(BelugaError, match=r"x\.json") as refused:
        load(path)
    assert message in str(refused.value)


def test_rows_have_a_date_and_numbers_that_are_valid_json() -> None:
    from beluga_bench import Options

    made = Recorder("rpc", Options(smoke=True), {"memory": "paced"}).row("c", p50_ns=float64(2.5))
    assert msgspec.json.decode(msgspec.json.encode(made))["p50_ns"] == 2.5
    assert len(str(made["date"])) == len("2026-01-02")
    assert is_smoke(made) and is_emulated(made)
