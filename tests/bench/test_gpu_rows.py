# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The GPU's rows: a reason where there is no GPU; the code itself with host-compiled kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from beluga_bench.gpu import CASES, gpu_coherence, gpu_latency
from beluga_bench.gpu_beside import gpu_beside
from beluga_bench.gpu_copy import gpu_copy
from beluga_bench.gpu_many import gpu_bandwidth
from beluga_bench.options import Options
from beluga_bench.region import region_of
from beluga_bench.row import Recorder

from beluga.errors import EngineUnavailableError
from beluga.pool import Pool
from beluga.transfer import CudaDriver, HostDriver

FIXED = {"memory": "made up", "discipline": "non-coherent", "depth": 1, "threads": 1}


@pytest.fixture
def compiled() -> None:
    """The kernels can be compiled for this CPU, or the test is skipped."""
    try:
        HostDriver().close()
    except EngineUnavailableError as error:
        pytest.skip(str(error))


def no_gpu() -> HostDriver:
    raise EngineUnavailableError("there is no usable GPU here: made up")


def test_without_a_gpu_every_row_says_why(shm: Path) -> None:
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
    with Pool.create([shm / "a"], device_size=32 << 20, sparse=True) as pool:
        recorder = Recorder("latency", Options(smoke=True), dict(FIXED))
        cpu = [
            recorder.row("read", bytes=64, p50_ns=1e12),
            recorder.row("write", bytes=64, p50_ns=1),
        ]
        rows = gpu_coherence(recorder, region_of(pool), 16384, HostDriver)
        rows += gpu_latency(recorder, region_of(pool), (64, 16384), cpu, HostDriver)
    assert len(rows) == len(CASES) + 6
    assert all(float(str(row["p50_ns"])) > 0 for row in rows)
    notes = {row["case"]: row["note"] for row in rows if row["note"]}
    assert notes == {
        "gpu read": "ahead of the CPU from 64 bytes on",
        "gpu read by memcpy": "ahead of the CPU from 64 bytes on",
        "gpu write": "never ahead of the CPU",
    }


@pytest.mark.usefixtures("compiled")
def test_copies_are_measured_beside_a_copy_engine_and_peers(shm: Path) -> None:
    with Pool.create([shm / "a"], device_size=32 << 20, sparse=True) as pool:
        recorder = Recorder("copy", Options(smoke=True), dict(FIXED))
        rows = gpu_copy(recorder, pool, HostDriver)
        without = gpu_copy(recorder, pool, no_gpu)
    measured = [row for row in rows if row["ratio_to_limit"]]
    found = {(row["note"], row["case"], row["crc"]) for row in measured if row["engine"] == "cuda"}
    for path in ("direct", "staged"):
        for case in ("gather_write", "scatter_read"):
            assert {(path, case, False), (path, case, True)} <= found
    assert ("direct", "sparse_read", False) in found
    peers = {(row["peer"], row["case"]) for row in measured if row["peer"]}
    name = "cudaMemcpyAsync per fragment"
    assert peers == {(name, "gather_write"), (name, "scatter_read")}
    batch = [row["note"] for row in rows if row["peer"] == "cudaMemcpyBatchAsync"]
    assert batch == ["skipped: what stands in for the GPU has no such call"] * 2
    assert {row["case"] for row in without} == {"gather_write", "scatter_read", "sparse_read"}
    assert all("skipped: " in str(row["note"]) for row in without)


@pytest.mark.usefixtures("compiled")
def test_several_gpus_share_a_device_and_a_node(shm: Path) -> None:
    with Pool.create([shm / "a"], device_size=32 << 20, sparse=True) as pool:
        recorder = Recorder("bandwidth", Options(smoke=True), dict(FIXED))
        rows = gpu_bandwidth(recorder, pool, lambda: [HostDriver(), HostDriver()])

        def none() -> list[CudaDriver]:
            return [no_gpu()]

        without = gpu_bandwidth(recorder, pool, none)
    targets = {str(row["case"]).split(", ")[1] for row in rows}
    assert "the pool's device" in targets
    assert any(target.startswith("DRAM of NUMA node ") for target in targets)
    measured = [(row["case"], row["threads"]) for row in rows]
    assert len(set(measured)) == len(measured) == len(targets) * 2 * 2
    assert all(float(str(row["gb_per_s"])) > 0 for row in rows)
    assert {row["memory"] for row in rows if "pool" in str(row["case"])} == {"made up"}
    assert all(str(row["memory"]) in str(row["case"]) for row in rows if "node" in str(row["case"]))
    assert len(without) == len(targets) * 2
    assert all("skipped: " in str(row["note"]) for row in without)


@pytest.mark.usefixtures("compiled")
def test_a_product_is_measured_alone_and_beside_copies(shm: Path) -> None:
    square = np.eye(64)
    with Pool.create([shm / "a"], device_size=32 << 20, sparse=True) as pool:
        recorder = Recorder("copy", Options(smoke=True), dict(FIXED))
        rows = gpu_beside(recorder, pool, HostDriver, lambda: lambda: _ignore(square @ square))
        without = gpu_beside(recorder, pool, no_gpu, lambda: lambda: None)
    assert [row["case"] for row in rows] == [row["case"] for row in without]
    assert {row["engine"] for row in rows} == {"cuda"}
    for row in rows:
        assert float(str(row["ratio_to_limit"])) > 0
        blocks = int(str(row["note"]).split()[-2])
        assert blocks >= 3  # one beside each measurement, at least
    assert all(row["note"] == "skipped: there is no usable GPU here: made up" for row in without)


def _ignore(_: object) -> None:
    """A product's result."""
