# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A client counts what only it can observe, and reports it without delaying a call."""

from __future__ import annotations

import struct
import time

import numpy as np
import pytest

from beluga import IndexServer, KVCache, Pool
from beluga._ffi import ffi, lib
from beluga.errors import BadRequestError
from beluga.rpc import KINDS, Operation, report
from beluga.transfer import CpuEngine
from tests.kvcache.conftest import digests, payload
from tests.kvcache.test_cache import flip, place


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients report with each call."""
    monkeypatch.setattr(report, "INTERVAL_S", 0.0)


def call_count(server: IndexServer) -> int:
    found = server.calls().get("report")
    return found.calls if found else 0


@pytest.mark.parametrize("own_engine", [False, True])
def test_a_damaged_block_counts_as_a_checksum_and_a_removed_one_does_not(
    pool: Pool, server: IndexServer, at_once: None, own_engine: bool
) -> None:
    engine = CpuEngine(pool) if own_engine else "auto"
    with KVCache(pool, namespace="test", engine=engine) as cache:
        cache.put(digests(3), payload(3, 40_000))
        flip(pool, place(cache, digests(3)[1]) + 39_999)
        assert cache.get(digests(3), np.zeros((3, 40_000), np.uint8)).hits == 1
        found = server.reported(0)
        assert (found[report.Figure.MISMATCHES], found[report.Figure.CHECKSUM_FAILURES]) == (1, 1)
        assert cache.client.stat().checksum_count == 1
        assert cache.get(digests(1), np.zeros((1, 39_999), np.uint8)).hits == 0  # another length
        found = server.reported(0)
        assert (found[report.Figure.MISMATCHES], found[report.Figure.CHECKSUM_FAILURES]) == (2, 1)


def test_a_client_reports_at_most_once_per_interval(
    cache: KVCache, server: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(20):
        cache.put(digests(2), payload(2, 100))
    assert call_count(server) == 0
    monkeypatch.setattr(report, "INTERVAL_S", 0.0)
    cache.client.report.take()  # starts again: earlier counts are dropped
    cache.put(digests(2), payload(2, 100))
    assert call_count(server) == 1
    assert server.reported(0)[report.Figure.PRESENT_BLOCKS] == 2
    cache.client.send_report()
    assert call_count(server) == 1  # there was nothing to report


def test_a_server_without_support_gets_no_reports(
    at_once: None, cache: KVCache, server: IndexServer
) -> None:
    with server._running() as handle:
        lib.bl_server_handle_method(handle, lib.BL_METHOD_REPORT, ffi.NULL, ffi.NULL)
    for _ in range(3):
        cache.put(digests(2), payload(2, 100))
    assert server.calls()["report"] == (1, 1)


def test_a_report_that_fails_is_lost_and_no_call_fails_for_it(
    at_once: None, cache: KVCache, server: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "KINDS", (*("x",) * lib.BL_REPORT_KINDS, *KINDS))
    assert cache.put(digests(2), payload(2, 100)).stored == 2  # of a kind that the server rejects
    assert server.calls()["report"].errors == 1
    monkeypatch.setattr(report, "KINDS", KINDS)
    assert cache.get(digests(2), np.zeros((2, 100), np.uint8)).hits == 2
    found = server.reported(0)
    assert (found[report.Figure.STORED_BLOCKS], found[report.Figure.HIT_BLOCKS]) == (0, 2)


def test_times_fall_into_the_bucket_of_their_bound(
    at_once: None, cache: KVCache, server: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in (report.SECONDS[0], 0.3, 1.0, 1.5, 7.0):
        with monkeypatch.context() as clock:
            clock.setattr(time, "perf_counter", lambda now=seconds: now)
            cache.client.report.looked_up(0.0)
    cache.client.send_report()
    counts, total = server.reported(0).times(Operation.LOOKUP)
    assert (counts[0], counts[-2], counts[-1], sum(counts)) == (1, 2, 2, 5)
    assert total == pytest.approx(9.80001)


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        bytes(7),
        bytes(8 * (lib.BL_REPORT_FIGURES + 2)),
        bytes(9),
        struct.pack("=2Q", lib.BL_REPORT_KINDS, 1),
        struct.pack("=2Q", 1 << 63, 1),
    ],
    ids=["empty", "short", "long", "uneven", "kind", "far kind"],
)
def test_a_malformed_report_is_rejected(
    cache: KVCache, server: IndexServer, request_: bytes
) -> None:
    with pytest.raises(BadRequestError):
        cache.client.call(lib.BL_METHOD_REPORT, request_)
    assert not any(server.reported(kind) for kind in range(lib.BL_REPORT_KINDS))
    cache.client.call(lib.BL_METHOD_REPORT, bytes(8 * (lib.BL_REPORT_FIGURES + 1)))  # the longest
