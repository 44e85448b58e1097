# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The exporter counts every event of a pool under the names in its table."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.prometheus_lint import complaints

from beluga import IndexServer, KVCache, Pool
from beluga.admin import Admin, server_routes
from beluga.exporter import METRICS, REGISTRY_PREFIXES
from beluga.index import fetch_counters
from beluga.kvcache import Namespace
from beluga.rpc import Client, read_trace, report
from beluga.transfer import LinkSettings
from beluga.transfer.link import Speed
from tests.exporter.scraped import Scrape, raw, scrape

LENGTH = 64 << 10
BLOCKS = 96


@pytest.fixture
def pool(paths: list[Path]) -> Iterator[Pool]:
    options = {"device_size": 32 << 20, "sparse": True, "max_blocks": BLOCKS}
    with Pool.create(paths, coherence="software", **options) as pool:
        yield pool


@pytest.fixture
def exporter(server: IndexServer, pool: Pool) -> Iterator[Admin]:
    exporter = Admin(server_routes(server, pool), address=("127.0.0.1", 0))
    exporter.start()
    yield exporter
    exporter.stop()


@pytest.fixture
def look(exporter: Admin, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Scrape]:
    """Scrape; clients report with each call."""
    monkeypatch.setattr(report, "INTERVAL_S", 0.0)
    return lambda: scrape(exporter.metrics_url)


def names(count: int, *, start: int = 0) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(start, start + count)]


def payload(count: int, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, length), dtype=np.uint8)


def test_puts_and_gets_are_counted_by_the_server_and_by_their_client(
    pool: Pool, look: Callable[[], Scrape]
) -> None:
    with KVCache(pool, namespace="a") as cache:
        cache.put(names(6), payload(6))
        cache.put(names(6), payload(6))
        assert cache.get(names(10), payload(10)).hits == 6
        assert cache.lookup(names(10)) == 6
        cache.get(names(1), payload(1))  # reports the lookup
        scraped = look()
    value = scraped.value
    assert (value("beluga_blocks"), value("beluga_blocks_limit")) == (6, BLOCKS)
    assert value("beluga_pool_payload_bytes") == 6 * LENGTH
    assert value("beluga_commits_total") == value("beluga_client_stored_blocks_total") == 6
    assert value("beluga_client_present_blocks_total") == 6
    assert value("beluga_client_requested_blocks_total", client="other") == 11
    assert value("beluga_client_hit_blocks_total") == 7
    assert value("beluga_client_written_bytes_total") == 6 * LENGTH
    read = value("beluga_client_read_bytes_total")
    assert read == value("beluga_client_flushed_bytes_total") == 7 * LENGTH
    assert value("beluga_client_put_seconds_count") == 2
    assert value("beluga_client_get_seconds_count") == 2
    assert value("beluga_client_lookup_seconds_count") == 1
    assert 0 < value("beluga_client_get_seconds_sum") < 60
    assert value("beluga_client_get_seconds_bucket", le="+Inf") == 2
    assert value("beluga_rpc_calls_total", method="reserve") == 2
    assert value("beluga_rpc_calls_total", method="commit") == 1
    assert value("beluga_lookup_hits_total") == 6 + 6 + 1
    assert (value("beluga_server_serving"), value("beluga_sessions")) == (1, 1)
    assert value("beluga_device_bytes") == 64 << 20


def test_counters_of_missing_tiers_are_not_an_error(pool: Pool, look: Callable[[], Scrape]) -> None:
    """Otherwise each ``beluga stat`` would be counted, and an alert would fire eventually."""
    with Client(pool) as client:
        assert fetch_counters(client) is None
        assert [call.method for call in read_trace(pool.runtime_dir).calls()] == ["counters"]
    scraped = look()
    assert scraped.value("beluga_rpc_calls_total", method="counters") == 1
    assert scraped.value("beluga_rpc_errors_total", method="counters") == 0


def test_blocks_are_counted_by_tenant_and_block_size(
    pool: Pool, look: Callable[[], Scrape]
) -> None:
    with KVCache(pool, namespace="a") as first, KVCache(pool, namespace="b") as other:
        tenant = f"{first.fingerprint:016x}"
        first.put(names(3), payload(3))
        other.put(names(2), payload(2))
        other.put(names(2, start=50), payload(2, 4096))
        assert first.get(names(3), payload(3)).hits == 3
        scraped = look()
        assert scraped.labels("beluga_tenant_blocks", "tenant") == {
            tenant,
            f"{other.fingerprint:016x}",
        }
        assert scraped.value("beluga_tenant_blocks", tenant=tenant) == 3
        assert scraped.value("beluga_tenant_bytes", tenant=tenant) == 3 * LENGTH
        assert scraped.value("beluga_tenant_hits_total", tenant=tenant) == 3
        assert scraped.value("beluga_tenant_blocks", block_bytes="4096") == 2
        assert scraped.value("beluga_tenant_bytes") == scraped.value("beluga_pool_payload_bytes")
        assert first.remove(names(1)) == 1
        other.put(names(BLOCKS, start=100), payload(BLOCKS, 4096))  # evicts all earlier blocks
    scraped = look()
    assert scraped.value("beluga_tenant_blocks", tenant=tenant) == 0
    assert scraped.value("beluga_tenant_commits_total", tenant=tenant) == 3
    assert scraped.value("beluga_tenant_evictions_total", tenant=tenant) == 2
    assert scraped.value("beluga_tenant_evictions_total") == scraped.value("beluga_evictions_total")
    assert scraped.value("beluga_table_evictions_total") > 0
    assert scraped.value("beluga_tenant_blocks") == scraped.value("beluga_blocks") == BLOCKS


def test_a_successor_counts_the_blocks_that_it_takes_over(pool: Pool) -> None:
    with IndexServer(pool), KVCache(pool, namespace="a") as cache:
        cache.put(names(3), payload(3))
        tenant = cache.fingerprint
    with IndexServer(pool) as successor:
        (row,) = successor.tenants()
    assert (row.fingerprint, row.length, row.block_count) == (tenant, LENGTH, 3)
    assert row.commit_count == 0


def test_tenants_beyond_the_table_are_counted_together(shm: Path) -> None:
    count = 4000
    options = {"device_size": 64 << 20, "sparse": True, "max_blocks": count}
    with (
        Pool.create([shm / "many"], **options) as pool,
        IndexServer(pool) as server,
        KVCache(pool, namespace="a") as cache,
    ):
        for length in range(64, 64 + count):
            assert cache.put(names(1, start=length), payload(1, length)).stored == 1
        crowded = server.tenants()
        cache.remove(names(count, start=64))
        emptied = server.tenants()
        cache.put(names(1, start=9999), payload(1, 9999))
        again = server.tenants()
    assert sum(tenant.block_count for tenant in crowded) == count
    assert crowded[0].length == 0  # the rest
    assert 256 < len(crowded) <= 513
    assert crowded[0].block_count == count - (len(crowded) - 1)
    assert not any(tenant.block_count for tenant in emptied)
    assert [tenant.length for tenant in again if tenant.block_count] == [9999]


def test_refusals_have_their_reason(pool: Pool, look: Callable[[], Scrape]) -> None:
    with KVCache(pool, namespace="a") as cache, KVCache(pool, namespace="b") as reader:
        reader.put(names(BLOCKS), payload(BLOCKS, 4096))
        pins = reader.pin(names(BLOCKS))
        assert cache.put(names(2), payload(2, 4096)).refused == 2
        reader.release(pins)
        scraped = look()
    assert scraped.value("beluga_refusals_total", reason="table full") == 2
    assert scraped.value("beluga_refusals_total") == 2
    assert scraped.value("beluga_client_refused_blocks_total") == 2
    assert scraped.value("beluga_blocks_pinned") == 0


def test_the_link_shows_bytes_of_engines_in_use(pool: Pool, look: Callable[[], Scrape]) -> None:
    assert not any(name.startswith("beluga_link_") for name in look().series)
    speed = Speed(20_000_000_000)
    settings = LinkSettings(read=speed, write=speed, device=speed)
    with KVCache(pool, namespace="a", link=settings) as cache:
        cache.put(names(8), payload(8))
        assert cache.get(names(8), payload(8)).hits == 8
        scraped = look()
        again = look()
    assert scraped.value("beluga_link_bytes_total", direction="read") >= 8 * LENGTH
    assert scraped.value("beluga_link_bytes_total", direction="write", **{"class": "offload"}) >= (
        8 * LENGTH
    )
    assert scraped.value("beluga_link_busy_seconds_total", direction="read") > 0
    assert scraped.labels("beluga_link_device_busy_seconds_total", "device") == {
        str(device.path) for device in pool.devices
    }
    assert scraped.value("beluga_link_device_busy_seconds_total") > 0
    assert again.value("beluga_link_bytes_total") == scraped.value("beluga_link_bytes_total")
    assert not any(name.startswith("beluga_link_") for name in look().series)


def test_tokens_and_seconds_that_an_engine_saved_are_summed_by_kind(
    pool: Pool, look: Callable[[], Scrape]
) -> None:
    with KVCache(pool, namespace="a") as cache:
        cache.client.report.kind = "vllm"
        for _ in range(2):
            cache.client.report.saved(1600, 0.125)
            cache.get(names(1), payload(1))
        scraped = look()
    assert scraped.value("beluga_saved_tokens_total", client="vllm") == 3200
    assert scraped.value("beluga_saved_prefill_seconds_total", client="vllm") == 0.25
    assert scraped.value("beluga_saved_tokens_total", client="other") == 0


def test_every_series_is_in_the_table_with_its_kind_and_labels(
    pool: Pool, look: Callable[[], Scrape]
) -> None:
    with KVCache(pool, namespace=Namespace({"name": "a"}), link=LinkSettings()) as cache:
        cache.put(names(1), payload(1))
        cache.get(names(1), payload(1))
        scraped = look()
    ours = {
        name: kind for name, kind in scraped.kinds.items() if not name.startswith(REGISTRY_PREFIXES)
    }
    assert ours == {name: metric.kind for name, metric in METRICS.items()}
    for name, series in scraped.series.items():
        base = name
        for end in ("_bucket", "_sum", "_count"):
            if METRICS.get(name.removesuffix(end), METRICS["beluga_blocks"]).kind == "histogram":
                base = name.removesuffix(end)
        if base in METRICS:
            for labels in series:
                assert {label for label, _ in labels} - {"le"} == set(METRICS[base].labels)


def test_promtool_accepts_the_metrics(pool: Pool, exporter: Admin) -> None:
    with KVCache(pool, namespace="a", link=LinkSettings()) as cache:
        cache.put(names(1), payload(1))
        assert complaints(raw(exporter.metrics_url)) == []


def test_an_ended_server_is_reported_until_the_exporter_stops(
    pool: Pool, server: IndexServer, look: Callable[[], Scrape]
) -> None:
    assert look().value("beluga_server_serving") == 1
    server.stop()
    scraped = look()
    assert scraped.value("beluga_server_serving") == 0
    assert "beluga_blocks" not in scraped.series


def test_process_metrics_are_of_this_process(look: Callable[[], Scrape]) -> None:
    scraped = look()
    started = scraped.value("process_start_time_seconds")
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    age_s = up_s - ticks / os.sysconf("SC_CLK_TCK")
    assert abs(time.time() - started - age_s) < 60
    assert scraped.value("process_resident_memory_bytes") > 1 << 20
    assert scraped.value("process_open_fds") > 3
    assert look().value("process_cpu_seconds_total") >= scraped.value("process_cpu_seconds_total")
