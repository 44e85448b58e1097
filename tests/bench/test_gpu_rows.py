# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The GPU's rows: a reason where there is no GPU; the code itself with host-compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from beluga_bench.gpu import CASES, gpu_coherence, gpu_latency
from beluga_bench.gpu_copy import gpu_copy
from beluga_bench.options import Options
from beluga_bench.region import region_of
from beluga_bench.row import Recorder

from beluga.errors import EngineUnavailableError
from beluga.pool import Pool
from beluga.transfer.cuda import HostDriver

FIXED = {"memory": "made up", "discipline": "non-coherent", "depth": 1, "threads": 1}


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


def test_the_rows_are_measured_where_kernels_run(shm: Path) -> None:
    try:
        HostDriver().close()
    except EngineUnavailableError as error:
        pytest.skip(str(error))
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


def test_copies_are_measured_beside_a_copy_engine_and_peers(shm: Path) -> None:
    try:
        HostDriver().close()
    except EngineUnavailableError as error:
        pytest.skip(str(error))
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
