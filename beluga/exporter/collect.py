# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Collects a server's metrics: counters of the index, the calls, clients, the link and tiers."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

import beluga
from beluga.errors import BelugaError
from beluga.exporter.names import METRICS, REGISTRY_PREFIXES
from beluga.metrics import REGISTRY, Distribution, Sample
from beluga.rpc import DEMOTIONS, KINDS, LOST, REASONS, SECONDS, TAKEN, Figure, Operation
from beluga.transfer import Direction, Link, TransferClass, host_link_now

if TYPE_CHECKING:
    from collections.abc import Iterable

    from beluga.index import IndexServer
    from beluga.pool import Pool
    from beluga.rpc import Server

_STRIPE = 2 << 20
_PICOSECONDS = 10**12
_FIGURES = {
    Figure.REQUESTED_BLOCKS: "requested_blocks",
    Figure.HIT_BLOCKS: "hit_blocks",
    Figure.STORED_BLOCKS: "stored_blocks",
    Figure.PRESENT_BLOCKS: "present_blocks",
    Figure.REFUSED_BLOCKS: "refused_blocks",
    Figure.READ_BYTES: "read_bytes",
    Figure.WRITTEN_BYTES: "written_bytes",
    Figure.FLUSHED_BYTES: "flushed_bytes",
    Figure.MISMATCHES: "stale_reads",
    Figure.CHECKSUM_FAILURES: "checksum_failures",
}


class ServerCollector:
    """Collects the metrics of one server of handlers, and of its pool. Not thread-safe."""

    def __init__(self, server: Server, pool: Pool) -> None:
        self._server, self._pool = server, pool
        self._started_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + _started_s()
        self._scrapes = 0
        self._spent_s = 0.0
        self._found: dict[str, Sample] = {}

    def collect(self) -> dict[str, Sample]:
        """Return all current metrics. A stopped server has only those of its process and pool."""
        started_s = time.thread_time()
        self._found = {}
        self._scrapes += 1
        try:
            self._of_running()
        except BelugaError:  # the server has stopped
            self._put("beluga_server_serving", 0)
        self._of_link()
        self._of_process()
        self._of_registry()
        self._put("beluga_exporter_scrapes_total", self._scrapes)
        self._spent_s += time.thread_time() - started_s
        self._put("beluga_exporter_seconds_total", self._spent_s)
        return {name: self._found[name] for name in sorted(self._found)}

    def _of_running(self) -> None:
        """Add the metrics of a server that has not stopped."""
        self._of_server()

    def _put(self, name: str, value: float | Distribution, *labels: str) -> None:
        """Set a series of a metric; ``labels`` are the values of its labels."""
        metric = METRICS[name]
        found = self._found.setdefault(name, Sample(metric.kind, metric.help, {}))
        found.series[tuple(zip(metric.labels, labels, strict=True))] = value

    def _all(self, pairs: Iterable[tuple[str, float]]) -> None:
        for name, value in pairs:
            self._put(f"beluga_{name}", value)

    def _of_server(self) -> None:
        stat = self._server.stat()
        serving = stat.epoch > 0 and self._server.failure is None
        self._put("beluga_server_info", 1, beluga.__version__, self._pool.id)
        for method, calls in self._server.calls().items():
            self._put("beluga_rpc_calls_total", calls.calls, method)
            self._put("beluga_rpc_errors_total", calls.errors, method)
        for kind, count in (
            ("calls", stat.quota_call_count),
            ("grants", stat.quota_grant_count),
            ("pins", stat.quota_pin_count),
        ):
            self._put("beluga_rpc_quota_refusals_total", count, kind)
        self._all(
            (
                ("server_serving", serving),
                ("server_epoch", stat.epoch),
                ("rpc_keys_total", stat.key_count),
                ("rpc_torn_lines_total", stat.torn_count),
                ("rpc_longest_wait_requests", stat.wait_request_max),
                ("sessions", stat.live_count),
                ("sessions_suspect", stat.inherited_count),
                ("sessions_watched", stat.watched_count),
                ("sessions_attached_total", stat.attach_count),
                ("sessions_ended_total", stat.end_count),
                ("lanes", self._pool.geometry.lane_count),
            )
        )
        for device in self._pool.devices:
            self._put("beluga_device_bytes", device.size, str(device.path))

    def _of_link(self) -> None:
        """Add the counters of this host's link, if engines use one now."""
        try:
            link = host_link_now(self._pool)
        except (BelugaError, OSError):
            return
        if link is None:
            return
        try:
            self._of_directions(link)
        finally:
            link.close()

    def _of_directions(self, link: Link) -> None:
        names = ("read", "write") if link.settings.duplex else ("both",)
        for place, direction in zip(Direction, names, strict=False):
            for kind in TransferClass:
                labels = direction, kind.name.lower()
                self._put("beluga_link_bytes_total", link.bytes_of(kind)[place], *labels)
                self._put("beluga_link_pieces_total", link.pieces_of(kind)[place], *labels)
            handle = link.directions[place].handle
            used_s = int(handle.used) / _PICOSECONDS
            self._put("beluga_link_busy_seconds_total", used_s, direction)
            self._put("beluga_link_reaped_total", int(handle.reaped), direction)
        if link.settings.device is not None:
            speed = link.settings.device.bytes_per_s
            self._put("beluga_link_device_bytes_per_second", speed)
        for device, bucket in zip(self._pool.devices, link.devices, strict=False):
            used_s = int(bucket.tail) / _PICOSECONDS
            self._put("beluga_link_device_busy_seconds_total", used_s, str(device.path))

    def _of_process(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = pages * resource.getpagesize()
        self._put("process_cpu_seconds_total", used.ru_utime + used.ru_stime)
        self._put("process_resident_memory_bytes", memory)
        self._put("process_start_time_seconds", self._started_s)
        for reason in REASONS:
            self._put("beluga_takeovers_total", TAKEN.value(reason=reason), reason)
        for reason in DEMOTIONS:
            self._put("beluga_demotions_total", LOST.value(reason=reason), reason)
        self._put("process_open_fds", sum(1 for _ in Path("/proc/self/fd").iterdir()))

    def _of_registry(self) -> None:
        for name, sample in REGISTRY.snapshot().items():
            if name.startswith(REGISTRY_PREFIXES):
                self._found[name] = sample


class Collector(ServerCollector):
    """Collects the metrics of one server with the block index, and of its pool. Not thread-safe."""

    def __init__(self, server: IndexServer, pool: Pool) -> None:
        super().__init__(server, pool)
        self._index = server

    def _of_running(self) -> None:
        super()._of_running()
        self._of_index()
        self._of_tenants()
        self._of_clients()
        self._of_lower()

    def _of_index(self) -> None:
        stat = self._index.index_stat()
        retired = stat.retired_stripe_count * _STRIPE
        self._all(
            (
                ("blocks", stat.block_count),
                ("blocks_limit", stat.block_count_max),
                ("blocks_pinned", stat.pinned_count),
                ("grants", stat.grant_count),
                ("lookup_keys_total", stat.lookup_count),
                ("lookup_hits_total", stat.hit_count),
                ("commits_total", stat.commit_count),
                ("aborts_total", stat.abort_count),
                ("evictions_total", stat.evict_count),
                ("table_evictions_total", stat.table_evict_count),
                ("removals_total", stat.remove_count),
                ("damaged_entries_total", stat.damaged_count),
                ("pool_bytes", stat.data_bytes),
                ("pool_used_bytes", stat.used_bytes),
                ("pool_payload_bytes", stat.block_bytes),
                ("pool_free_bytes", stat.data_bytes - stat.used_bytes - stat.held_bytes - retired),
                ("pool_quarantined_bytes", stat.held_bytes),
                ("pool_retired_bytes", retired),
                ("pool_extents", stat.extent_count),
                ("pool_free_run_bytes", stat.free_run_bytes),
            )
        )
        for reason, count in self._index.refusals().items():
            self._put("beluga_refusals_total", count, reason)

    def _of_tenants(self) -> None:
        for tenant in self._index.tenants():
            name = f"{tenant.fingerprint:016x}" if tenant.length else "other"
            for metric, value in (
                ("blocks", tenant.block_count),
                ("bytes", tenant.block_count * tenant.length),
                ("commits_total", tenant.commit_count),
                ("hits_total", tenant.hit_count),
                ("evictions_total", tenant.evict_count),
            ):
                self._put(f"beluga_tenant_{metric}", value, name, str(tenant.length))

        for share in self._index.shares():
            for metric, value in (
                ("bytes", share.bytes),
                ("used_bytes", share.used_bytes),
                ("blocks", share.blocks),
                ("evictions_total", share.evictions),
                ("hint_bytes", share.hint_bytes),
                ("hinted_bytes", share.hinted_bytes),
            ):
                self._put(f"beluga_share_{metric}", value, share.name)

        hints = self._index.hints()
        self._all(
            (
                ("hinted_blocks", hints.hint_count),
                ("hinted_bytes", hints.favored_bytes),
                ("hints_total", hints.given_count),
                ("hints_absent_total", hints.absent_count),
                ("hints_refused_total", hints.refuse_count),
                ("hints_expired_total", hints.expire_count),
            )
        )

    def _of_clients(self) -> None:
        for number, kind in enumerate(KINDS):
            reported = self._index.reported(number)
            if number and not reported:
                continue
            for figure, name in _FIGURES.items():
                self._put(f"beluga_client_{name}_total", reported[figure], kind)
            self._put("beluga_saved_tokens_total", reported[Figure.SAVED_TOKENS], kind)
            seconds = reported[Figure.SAVED_NS] / 1e9
            self._put("beluga_saved_prefill_seconds_total", seconds, kind)
            for operation in Operation:
                counts, total = reported.times(operation)
                name = f"beluga_client_{operation.name.lower()}_seconds"
                self._put(name, Distribution(SECONDS, counts, total), kind)

    def _of_lower(self) -> None:
        stat = self._index.lower_stat()
        self._all(
            (
                ("lower_known_keys", stat.name_count),
                ("lower_dirty_blocks", stat.dirty_count),
                ("lower_wanted_keys", stat.wanted_count),
                ("lower_requested_keys_total", stat.onboard_count),
                ("lower_unsaved_blocks_total", stat.unsaved_count),
                ("lower_removals", stat.removal_count),
                ("lower_failed_removals", stat.removal_failed),
                ("lower_removals_parked", stat.removal_parked),
                ("lower_removals_max", stat.removal_max),
            )
        )


def _started_s() -> float:
    """Return when this process started, in seconds since the machine booted."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")
