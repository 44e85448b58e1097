# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A server's metrics for Prometheus (``GET /metrics`` of its admin endpoint).

They are the figures of C (``csrc/api/figures.h``), those that Python counts (:data:`_OWN`), and the
registry's (:mod:`beluga.metrics`) with one of :data:`REGISTRY_PREFIXES`: handlers, lower tiers and
emulated engines. The poll loop maintains the figures anyway, so it never waits for a scrape.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import beluga
from beluga.errors import BelugaError
from beluga.figures import FIGURES
from beluga.metrics import REGISTRY, Distribution, Sample
from beluga.rpc import DEMOTIONS, KINDS, LOST, REASONS, SECONDS, TAKEN, Operation
from beluga.transfer import Direction, Link, TransferClass, host_link_now

if TYPE_CHECKING:
    from collections.abc import Mapping

    from beluga.index import IndexServer
    from beluga.pool import Pool
    from beluga.rpc import Server

HANDLER_PREFIX = "beluga_handler_"
REGISTRY_PREFIXES = (
    *("beluga_tier_", "beluga_onboard_", "beluga_offload_", "beluga_kvbm_"),
    HANDLER_PREFIX,
)
_PICOSECONDS = 10**12


class Metric(NamedTuple):
    """The description of a metric. ``labels`` are the names of its labels."""

    kind: str
    help: str
    labels: tuple[str, ...] = ()


# The labels of the structs of which there are several.
_LABELS = {
    "bl_calls": ("method",),
    "bl_tenant": ("tenant", "block_bytes"),
    "bl_share_view": ("share",),
    "bl_client_figures": ("client",),
}

# What Python counts, by names without a prefix.
_OWN: dict[str, Metric] = {
    "server_info": Metric(
        "gauge", "Always 1; the labels name the program and its pool.", ("version", "pool")
    ),
    "server_serving": Metric("gauge", "1 if this server serves; 0 if it is a standby."),
    "takeovers_total": Metric("counter", TAKEN.help, ("reason",)),
    "demotions_total": Metric("counter", LOST.help, ("reason",)),
    "lanes": Metric("gauge", "Sessions that the pool has room for."),
    "refusals_total": Metric("counter", "Grants that were refused.", ("reason",)),
    "device_bytes": Metric("gauge", "Size of each device.", ("device",)),
    "client_get_seconds": Metric("histogram", "Time of a get of a batch.", ("client",)),
    "client_put_seconds": Metric("histogram", "Time of a put of a batch.", ("client",)),
    "client_lookup_seconds": Metric(
        "histogram", "Time of a lookup of a batch: one call to the server.", ("client",)
    ),
    "link_bytes_total": Metric(
        "counter", "Bytes that the link scheduler admitted.", ("direction", "class")
    ),
    "link_pieces_total": Metric(
        "counter", "Pieces that the link scheduler admitted.", ("direction", "class")
    ),
    "link_busy_seconds_total": Metric(
        "counter", "Admitted time of the link; its rate is the utilization.", ("direction",)
    ),
    "link_reaped_total": Metric(
        "counter", "Processes that died while holding tokens of the link.", ("direction",)
    ),
    "link_device_busy_seconds_total": Metric(
        "counter", "Admitted time of each memory device.", ("device",)
    ),
    "link_device_bytes_per_second": Metric(
        "gauge",
        "Speed of each memory device, as configured; multiplied by the busy rate it is the used "
        "bandwidth.",
    ),
    "exporter_scrapes_total": Metric("counter", "Scrapes that were served."),
    "exporter_seconds_total": Metric("counter", "Processor time that scrapes took."),
}
_PROCESS: dict[str, Metric] = {
    "process_cpu_seconds_total": Metric("counter", "Processor time of the server's process."),
    "process_resident_memory_bytes": Metric("gauge", "Memory of the server's process."),
    "process_start_time_seconds": Metric("gauge", "When the process started, in Unix time."),
    "process_open_fds": Metric("gauge", "Open file descriptors of the process."),
}

METRICS: dict[str, Metric] = {
    **{
        figure.metric: Metric(
            figure.kind,
            figure.help,
            (*_LABELS.get(struct, ()), *(label for label, _ in figure.labels)),
        )
        for struct, figures in FIGURES.items()
        for figure in figures
        if figure.help != "-"
    },
    **{f"beluga_{name}": metric for name, metric in _OWN.items()},
    **_PROCESS,
}
"""All metrics by name, except the registry's."""


class ServerCollector:
    """Collects the metrics of one server of handlers, and of its pool. Not thread-safe."""

    def __init__(self, server: Server, pool: Pool) -> None:
        self._server, self._pool = server, pool
        self._started_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + _started_s()
        self._scrapes = 0
        self._spent_s = 0.0
        self._samples: dict[str, Sample] = {}

    def collect(self) -> dict[str, Sample]:
        """Return all current metrics. A stopped server has only those of its process and pool."""
        started_s = time.thread_time()
        self._samples = {}
        self._scrapes += 1
        try:
            self._of_running()
        except BelugaError:  # the server has stopped
            self._put("beluga_server_serving", 0)
        self._of_link()
        self._of_process()
        for name, sample in REGISTRY.snapshot().items():
            if name.startswith(REGISTRY_PREFIXES):
                self._samples[name] = sample
        self._put("beluga_exporter_scrapes_total", self._scrapes)
        self._spent_s += time.thread_time() - started_s
        self._put("beluga_exporter_seconds_total", self._spent_s)
        return {name: self._samples[name] for name in sorted(self._samples)}

    def _put(self, name: str, value: float | Distribution, *labels: str) -> None:
        """Set a series of a metric; ``labels`` are the values of its labels."""
        metric = METRICS[name]
        sample = self._samples.setdefault(name, Sample(metric.kind, metric.help, {}))
        sample.series[tuple(zip(metric.labels, labels, strict=True))] = value

    def _put_all(self, struct: str, values: Mapping[str, float], *labels: str) -> None:
        """Set the figures of a C struct."""
        for field, name, more, _ in FIGURES[struct]:
            scale = 1e-9 if field.endswith("_ns") else 1  # Prometheus's unit is seconds
            self._put(name, values[field] * scale, *labels, *(value for _, value in more))

    def _of_running(self) -> None:
        """Add the metrics of a server that has not stopped."""
        stat = self._server.stat()
        self._put_all("bl_server_stat", stat.as_dict())
        serving = stat.epoch > 0 and self._server.failure is None
        self._put("beluga_server_serving", serving)
        self._put("beluga_server_info", 1, beluga.__version__, self._pool.id)
        self._put("beluga_lanes", self._pool.geometry.lane_count)
        for method, calls in self._server.calls().items():
            counts = {"call_count": calls.calls, "error_count": calls.errors}
            self._put_all("bl_calls", counts, method)
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
        for number, direction in zip(Direction, names, strict=False):
            for kind in TransferClass:
                labels = direction, kind.name.lower()
                self._put("beluga_link_bytes_total", link.bytes_of(kind)[number], *labels)
                self._put("beluga_link_pieces_total", link.pieces_of(kind)[number], *labels)
            handle = link.directions[number].handle
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
        self._put("process_open_fds", sum(1 for _ in Path("/proc/self/fd").iterdir()))
        for reason in REASONS:
            self._put("beluga_takeovers_total", TAKEN.value(reason=reason), reason)
        for reason in DEMOTIONS:
            self._put("beluga_demotions_total", LOST.value(reason=reason), reason)


class Collector(ServerCollector):
    """Collects the metrics of one server with the block index, and of its pool. Not thread-safe."""

    def __init__(self, server: IndexServer, pool: Pool) -> None:
        super().__init__(server, pool)
        self._index = server

    def _of_running(self) -> None:
        super()._of_running()
        index = self._index
        self._put_all("bl_index_stat", index.index_stat().as_dict())
        self._put_all("bl_hint_stat", index.hints().as_dict())
        self._put_all("bl_lower_stat", index.lower_stat().as_dict())
        for reason, count in index.refusals().items():
            self._put("beluga_refusals_total", count, reason)
        for tenant in index.tenants():
            name = f"{tenant.fingerprint:016x}" if tenant.length else "other"
            self._put_all("bl_tenant", tenant.as_dict(), name, str(tenant.length))
        for share in index.shares():
            self._put_all("bl_share_view", share.as_dict(), share.name)
        for number, kind in enumerate(KINDS):
            reported = index.reported(number)
            if number and not reported:
                continue
            self._put_all("bl_client_figures", reported.as_dict(), kind)
            for operation in Operation:
                counts, total = reported.times(operation)
                name = f"beluga_client_{operation.name.lower()}_seconds"
                self._put(name, Distribution(SECONDS, counts, total), kind)


def _started_s() -> float:
    """Return when this process started, in seconds since the machine booted."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")
