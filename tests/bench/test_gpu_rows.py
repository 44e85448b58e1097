# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The GPU's rows: a reason without a GPU, and the code itself on a stand-in for a GPU. The demo of
GPU workers.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beluga_bench.gpu import all as gpu_all
from beluga_bench.gpu import clock as gpu_clock
from beluga_bench.gpu import copy as gpu_copy_module
from beluga_bench.gpu import demo as gpu_demo
from beluga_bench.gpu.beside import gpu_beside
from beluga_bench.gpu.clock import StreamClock
from beluga_bench.gpu.copy import BLOCK_SIZE, SMOKE_BATCHES, _Bench, gpu_copy
from beluga_bench.gpu.demo import Report, _Counts
from beluga_bench.gpu.demo_worker import Served
from beluga_bench.gpu.many import gpu_bandwidth
from beluga_bench.gpu.peers import BATCH, EACH
from beluga_bench.gpu.single import CASES, gpu_coherence, gpu_latency
from beluga_bench.gpu.stub import StandIn
from beluga_bench.harness.machine import pinned
from beluga_bench.harness.options import Options
from beluga_bench.harness.recorded import read_record
from beluga_bench.harness.region import region_of
from beluga_bench.harness.row import Recorder, Row
from support.commands import captured
from support.cuda_gpu import NOT_READY, Gpu

from beluga.errors import EngineUnavailableError
from beluga.pool import Pool
from beluga.transfer import CudaDevice
from beluga.transfer.cuda import DriverError

ROOT = Path(__file__).resolve().parents[2]
DENSE = ("gather_write", "scatter_read")
FIXED = {"memory": "made up", "coherence": "software", "depth": 1, "threads": 1}


@pytest.fixture(autouse=True)
def little_ballast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the ballast, because a CPU copies no faster than it plans copies."""
    monkeypatch.setattr(gpu_clock, "_BALLAST_SIZE", 8 << 20)


def no_gpu() -> StandIn:
    raise EngineUnavailableError("there is no usable GPU here: made up")


def test_without_a_gpu_rows_are_skipped_with_a_reason(shm: Path) -> None:
    with Pool.create([shm / "a"], device_size=32 << 20, sparse=True) as pool:
        recorder = Recorder("coherence", Options(smoke=True), dict(FIXED))
        rows = gpu_coherence(recorder, region_of(pool), 16384, no_gpu)
        rows += gpu_latency(recorder, region_of(pool), (64, 16384), [], no_gpu)
    assert len(rows) == len(CASES) + 3
    for row in rows:
        assert row["note"] == "skipped: there is no usable GPU here: made up"
        assert row["p50_ns"] is None


@pytest.mark.usefixtures("compiled")
def test_the_rows_are_measured_where_kernels_run(shm: Path) -> None:
    cpus, all_cpus = list[int](), len(os.sched_getaffinity(0))

    def make() -> StandIn:
        cpus.append(len(os.sched_getaffinity(0)))
        return StandIn()

    with (
        Pool.create([shm / "a"], device_size=32 << 20, sparse=True) as pool,
        pinned(min(os.sched_getaffinity(0))),
    ):
        recorder = Recorder("latency", Options(smoke=True), dict(FIXED))
        cpu = [
            recorder.row("read", bytes=64, p50_ns=1e12),
            recorder.row("write", bytes=64, p50_ns=1),
        ]
        rows = gpu_coherence(recorder, region_of(pool), 16384, make)
        rows += gpu_latency(recorder, region_of(pool), (64, 16384), cpu, make)
    assert set(cpus) == {all_cpus}  # the GPU's threads do not share the caller's CPU
    assert len(rows) == len(CASES) + 6
    assert all(float(str(row["p50_ns"])) > 0 for row in rows)
    notes = {row["case"]: row["note"] for row in rows if row["note"]}
    assert notes == {
        "gpu read": "ahead of the CPU from 64 bytes on",
        "gpu read by memcpy": "ahead of the CPU from 64 bytes on",
        "gpu write": "never ahead of the CPU",
    }


def spread(rows: list[Row]) -> None:
    """Check the same as tests/bench/test_benches.py does for every measured row."""
    for row in rows:
        measured = row["ops_per_s"] is not None
        assert measured != str(row["note"]).startswith("skipped: ")
        assert not measured or 0 < float(str(row["p50_ns"])) <= float(str(row["p99_ns"]))


@pytest.mark.usefixtures("compiled")
def test_copies_are_compared_with_a_copy_engine_and_peers(shm: Path) -> None:
    with Pool.create([shm / "a"], device_size=64 << 20, sparse=True) as pool:
        recorder = Recorder("copy", Options(smoke=True), dict(FIXED))
        rows = gpu_copy(recorder, pool, StandIn)
        without = gpu_copy(recorder, pool, no_gpu)
    spread(rows + without)
    ours = [row for row in rows if row["engine"] == "cuda"]
    assert all(float(str(row["ratio_to_limit"])) > 0 for row in ours)
    measured = {
        (str(row["note"]).split(";")[0], row["case"], row["crc"], row["bytes"]) for row in ours
    }
    for case in ("gather_write", "scatter_read"):
        for blocks in SMOKE_BATCHES:
            for crc in (False, True):
                assert ("None", case, crc, blocks * BLOCK_SIZE) in measured
    for share, crc in ((8, False), (16, True)):
        note = f"{share} multiprocessors"
        shares = [row["case"] for row in ours if row["note"] == note and row["crc"] is crc]
        assert shares == [*DENSE]
    sparse = [row for row in ours if row["case"] == "sparse_read"]
    assert {row["fragment_bytes"] for row in sparse} == {1280, 2048}
    assert {row["bytes"] for row in sparse} == {16 * 128 * 1280, 16 * 64 * 2048}
    peers = {(row["peer"], row["case"], row["bytes"]) for row in rows if row["ratio_to_peer"]}
    dense = {(EACH, case, b * BLOCK_SIZE) for case in DENSE for b in SMOKE_BATCHES}
    assert peers == dense | {(EACH, "sparse_read", 16 * 128 * 1280)}
    batch = [row["note"] for row in rows if row["peer"] == BATCH]
    assert batch == ["skipped: what stands in for the GPU has no such call"] * 5
    assert [row["case"] for row in rows if "pool's memory" in str(row["peer"])] == list(DENSE)
    assert {row["case"] for row in without} == {*DENSE, "sparse_read"}
    assert all("skipped: " in str(row["note"]) for row in without)


@pytest.mark.usefixtures("compiled")
def test_a_failed_row_does_not_affect_other_rows(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fails(self: object) -> list[Row]:
        tried.append(self)
        raise DriverError("made up")

    monkeypatch.setattr(_Bench, "rows", fails)
    monkeypatch.setattr(gpu_copy_module, "SMOKE_BATCHES", (1,))
    with Pool.create([shm / "a"], device_size=64 << 20, sparse=True) as pool:
        recorder = Recorder("copy", Options(smoke=True), dict(FIXED))
        rows = gpu_copy(recorder, pool, StandIn)
    assert len(tried) == 1
    assert [str(row["note"])[:7] for row in rows] == ["skipped"] * 3 + ["8 multi"] * 2 + [
        "16 mult"
    ] * 2


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("tries", "ballast"), [(0, 1), (2, 1 + 2 + 4), (9, 1 + 2 + 4 + 8)])
def test_the_clock_enqueues_enough_work_to_hide_the_host(
    monkeypatch: pytest.MonkeyPatch, tries: int, ballast: int
) -> None:
    gpu, queries, copied = Gpu(), list[str](), list[str]()

    def seen(function: str, event: int) -> int | None:
        """The ballast has already ended at the first few queries."""
        if function == "cuMemcpyAsync":
            copied.append(function)
        if function != "cuEventQuery":
            return None
        queries.append(function)
        if len(queries) > tries:
            return NOT_READY
        gpu.wait(event)
        return None

    monkeypatch.setattr(gpu_clock, "_BALLAST_MAX", 8)
    clock = StreamClock(gpu)
    gpu.seen = seen
    assert clock.seconds(lambda _: None) >= 0
    assert len(copied) == ballast
    assert clock.exposed == (tries == 9)
    clock.close()


@pytest.mark.usefixtures("compiled")
def test_several_gpus_share_a_device_and_a_node(shm: Path) -> None:
    with Pool.create([shm / "a"], device_size=32 << 20, sparse=True) as pool:
        recorder = Recorder("bandwidth", Options(smoke=True), dict(FIXED))
        rows = gpu_bandwidth(recorder, pool, lambda: [StandIn(), StandIn()])

        def none() -> list[CudaDevice]:
            return [no_gpu()]

        without = gpu_bandwidth(recorder, pool, none)
    targets = {str(row["case"]).split(", ")[1] for row in rows}
    assert "the pool's device" in targets
    assert any(target.startswith("DRAM of NUMA node ") for target in targets)
    measured = [(row["case"], row["threads"]) for row in rows]
    assert len(set(measured)) == len(measured) == len(targets) * 2 * 2
    spread(rows + without)
    assert all(float(str(row["gb_per_s"])) > 0 for row in rows)
    assert {row["memory"] for row in rows if "pool" in str(row["case"])} == {"made up"}
    assert all(str(row["memory"]) in str(row["case"]) for row in rows if "node" in str(row["case"]))
    assert len(without) == len(targets) * 2
    assert all("skipped: " in str(row["note"]) for row in without)


@pytest.mark.usefixtures("compiled")
def test_a_matrix_product_is_measured_alone_and_during_copies(shm: Path) -> None:
    square = np.eye(64)
    with Pool.create([shm / "a"], device_size=32 << 20, sparse=True) as pool:
        recorder = Recorder("copy", Options(smoke=True), dict(FIXED))
        rows = gpu_beside(recorder, pool, StandIn, lambda: lambda: _ignore(square @ square))
        without = gpu_beside(recorder, pool, no_gpu, lambda: lambda: None)
    assert [row["case"] for row in rows] == [row["case"] for row in without]
    assert {row["engine"] for row in rows} == {"cuda"}
    spread(rows + without)
    for row in rows:
        assert float(str(row["ratio_to_limit"])) > 0
        assert float(str(row["note"]).split(" GB/s")[0].split()[-1]) > 0
    assert all(row["note"] == "skipped: there is no usable GPU here: made up" for row in without)


def test_rows_are_kept_when_a_stage_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(options: Options) -> list[Row]:
        raise RuntimeError(f"made up {options.smoke}")

    stages = {"a": lambda _: [{"commit": "unknown", "machine": "CPU"}], "b": fails}
    monkeypatch.setattr(gpu_all, "STAGES", stages)
    target = tmp_path / "rows.json"
    assert gpu_all.measure(Options(smoke=True), target, "abc", "NVIDIA H200") == ["b"]
    assert read_record(target) == [{"commit": "abc", "machine": "CPU, NVIDIA H200"}]
    assert "made up True" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [(["all"], 1, "no part or option 'all'"), (["--out"], 1, "--out needs a value"), ([], 77, "")],
)
def test_the_script_reports_missing_tools(given: list[str], status: int, words: str) -> None:
    if status == 77 and shutil.which("nvidia-smi"):
        pytest.skip("there is an NVIDIA driver here")
    ended = captured([ROOT / "scripts" / "gpu", *given], timeout=60)
    assert ended.returncode == status
    assert len(ended.stderr.splitlines()) == 1
    assert words in ended.stderr


def _ignore(_: object) -> None:
    """Ignore a result."""


# ---- The demo

TIMEOUT_S = 300
SMALL = ("--conversations", "6", "--turns", "4")


def has_gpu() -> bool:
    try:
        CudaDevice()
    except EngineUnavailableError:
        return False
    return True


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "beluga_bench.gpu.demo", *arguments]
    environment = os.environ | {"COLUMNS": "200"}  # readline, which pytest imports, sets 80
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as child:
        try:
            output = child.communicate(timeout=TIMEOUT_S)
        finally:
            child.kill()
    return subprocess.CompletedProcess([child.pid], child.returncode, *output)


@pytest.mark.usefixtures("compiled")
def test_two_workers_share_stored_blocks() -> None:
    completed = demo(*SMALL, "--json")
    assert completed.returncode == 0, completed.stderr
    report: dict[str, Any] = json.loads(completed.stdout)
    assert report["policy"] == "least-tokens"
    assert sum(report["requests"]) == 24
    assert min(report["requests"]) > 0
    assert report["wrong_blocks"] == 0
    assert 0 < report["crossed"] <= report["blocks_from_pool"] < report["blocks_looked_up"]
    moved = report["blocks_in_engines"] + report["blocks_from_pool"] + report["blocks_stored"]
    assert moved <= report["blocks_looked_up"]
    assert report["blocks_in_engines"] > 0
    assert report["blocks_evicted"] > 0
    assert report["kernel_launches"] > 0
    assert report["bytes_bounced"] == 0  # every window was registered
    assert report["gpu"] == has_gpu()
    if not report["gpu"]:
        assert "NOT a GPU" in report["copied_by"]
        assert "these times do not apply to a GPU" in completed.stderr
    assert leftovers(completed.args[0]) == []


@pytest.mark.long
@pytest.mark.usefixtures("compiled")
def test_the_text_report_names_the_copying_engine() -> None:
    completed = demo("--conversations", "2", "--turns", "3")
    assert completed.returncode == 0, completed.stderr
    assert "ignores caches" in completed.stdout
    assert ("NOT a GPU" in completed.stdout) != has_gpu()


def test_a_demo_that_cannot_run_is_refused() -> None:
    for options, status, why in (
        (("--conversations", "100", "--turns", "3"), 2, "1 to 200 turns"),
        ((*SMALL, "--engine-blocks", "1"), 1, "an engine of 1 blocks is too small"),
    ):
        completed = demo(*options)
        assert completed.returncode == status
        assert why in completed.stderr


def test_blocks_of_the_other_worker_are_counted_separately() -> None:
    counts = _Counts()
    counts.add(0, Served(3, 0, [], 0, [1, 2]))
    counts.add(1, Served(3, 0, [1, 2], 0, [3]))
    counts.add(1, Served(3, 1, [2, 3], 1, []))
    assert (counts.device_hits, counts.onboarded) == (1, 4)
    assert (counts.looked_up, counts.wrong) == (9, 1)
    assert counts.crossed == 3, "blocks 1 and 2, and 2 once more"
    assert counts.requests == [1, 2]


def test_wrong_blocks_fail_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(True, "made up", "", "", [1, 1], 9, 9, 9, 4, 9, 9, 9, 9, 0, 9, 2, 1.0)
    monkeypatch.setattr(gpu_demo, "run", lambda *_: report)
    monkeypatch.setattr(sys, "argv", ["demo-gpu"])
    with pytest.raises(SystemExit, match="2 blocks came with wrong bytes"):
        gpu_demo.main()
    assert "GPU" not in capsys.readouterr().err


def leftovers(pid: int) -> list[Path]:
    roots = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return [path for root in roots for path in root.glob(f"beluga-demo-gpu-{pid}-*")]
