# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Every benchmark in smoke mode: its rows have the fields, it cleans up, and it overwrites
nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from beluga_bench import BENCHES, FIELDS, Options, Row
from beluga_bench.harness.machine import cores
from beluga_bench.harness.region import skewed, uniform
from beluga_bench.harness.row import Recorder
from support.leftovers import leftovers

from beluga._ffi import ffi, lib
from beluga.errors import BelugaError, PoolError
from beluga.pool import Pool

REQUIRED = {
    "bench",
    "case",
    "bytes",
    "depth",
    "threads",
    "memory",
    "coherence",
    "p50_ns",
    "p99_ns",
    "ops_per_s",
    "gb_per_s",
    "limit",
    "ratio_to_limit",
    "machine",
    "commit",
    "command",
}
JUDGED = {
    "coherence": ["streamed store", "read after flush"],
    "latency": ["read", "write"],
    "bandwidth": ["read, uniform, interleaved", "write, skewed, not interleaved"],
    "rpc": ["c", "python"],
    "rpc-peers": [],  # see test_rpc_peers_bench.py
    "recovery": ["restart"],
    "copy": [
        *("gather_write", "scatter_read", "sparse_read"),
        *("null_gpu write, alone", "null_gpu read, alone", "null_gpu read, 2 processes"),
    ],
    "index": ["lookup", "reserve_commit"],
    "indexer": [],  # see test_indexer_bench.py
    "events": ["in the server's loop", "put, with pauses", "put, without pauses"],
    "blocks": [],  # see test_blocks_bench.py
    "tiers-disk": [],  # see test_tiers_disk_bench.py
    "tiers-pool": [],  # see test_tiers_pool_bench.py
    "tiers-remote": [],  # see test_tiers_remote_bench.py
    "gateway": [],  # see test_gateway_bench.py
    "scheduler": [],  # see test_scheduler_bench.py
}


# These take several seconds, even in smoke mode.
LONG = {"copy", "events", "gateway", "rpc", "rpc-peers", "scheduler", "tiers-pool"}
EACH = [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in BENCHES]

Smoke = Callable[[str], list[Row]]


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
    if name == "rpc" and len(cores()) < 2:
        pytest.skip("needs two cores")
    for case in JUDGED[name]:
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
    found = {(row["coherence"], row["depth"]) for row in smoke("rpc") if row["case"] == "c"}
    modes = ("software", "hardware", "software, metadata hardware")
    assert found == {(mode, depth) for mode in modes for depth in (1, 8, 32, 128, 256)}


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
        beside = cases[f"{verb}, beside {other}s at 50% ({direction} direction)"]
        assert (beside["bytes"], cases[f"{verb}, alone"]["bytes"]) == (64, 64)
        assert re.search(r"another process (read|write)s [\d.]+ GB/s", str(beside["note"]))


def test_a_pool_of_the_user_is_used_and_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "device"
    Pool.create([path], device_size=40 << 20, coherence="software").close()
    rows = BENCHES["latency"](Options(smoke=True, pool=(str(path),)))
    assert {row["coherence"] for row in rows if row["case"] == "write"} <= {"software", None}
    with Pool.open([path]) as pool:
        assert pool.devices[0].coherence == "software"


def test_a_pool_with_blocks_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "device"
    with Pool.create([path], device_size=40 << 20) as pool:
        address = lib.bl_pool_address(pool.handle, pool.geometry.extent_offset)
        ffi.cast("bl_extent_line *", address).state = lib.BL_EXTENT_OPEN
    with pytest.raises(PoolError, match="holds blocks"):
        BENCHES["latency"](Options(smoke=True, pool=(str(path),)))


def test_a_coherence_that_differs_from_the_pools_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "device"
    Pool.create([path], device_size=40 << 20, coherence="hardware").close()
    with pytest.raises(PoolError, match="hardware"):
        BENCHES["coherence"](Options(smoke=True, pool=(str(path),), coherence="software"))


def test_a_row_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(KeyError, match="speeed"):
        Recorder("rpc", Options(), {}).row("c", speeed=1)


def test_an_invalid_pace_is_rejected_and_leaves_no_files() -> None:
    with pytest.raises(BelugaError, match="no pace"):
        BENCHES["bandwidth"](Options(smoke=True, pace="fast"))
    assert leftovers("bench", os.getpid()) == set()


def test_uniform_offsets_are_in_the_region_and_do_not_overlap() -> None:
    places = uniform(1 << 20, 4096, 7)
    assert len(set(places)) == 256
    assert max(places) + 4096 <= 1 << 20
    assert not (places % 4096).any()


def test_skewed_offsets_are_mostly_hot() -> None:
    places = skewed(1 << 20, 4096, 7)
    hot = (places < 1 << 18).mean()
    assert 0.88 < hot < 0.97
    assert max(places) + 4096 <= 1 << 20
