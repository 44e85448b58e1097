#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Writes docs/monitoring/dashboard.json (Grafana), docs/monitoring/alerts.yml (Prometheus), and the
tables of docs/operate/monitoring.md, from the tables below and the exporter's metrics table.

With ``--check`` nothing is written; the exit status is 1 if a file is not up to date.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from check_option import is_check

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


from beluga import tiers  # noqa: E402, F401  its metrics are in the registry
from beluga.exporter import HANDLER_PREFIX, METRICS, REGISTRY_PREFIXES  # noqa: E402
from beluga.kvbm.metrics import METRICS as ENGINE_METRICS  # noqa: E402
from beluga.metrics import REGISTRY  # noqa: E402
from beluga.tiers import disk, remote  # noqa: E402, F401

PAGE = ROOT / "docs/operate/monitoring.md"
DASHBOARD = ROOT / "docs/monitoring/dashboard.json"
ALERTS_FILE = ROOT / "docs/monitoring/alerts.yml"

_RATE = "[$__rate_interval]"
_HITS = f"sum(rate(beluga_lookup_hits_total{_RATE}))"
_KEYS = f"sum(rate(beluga_lookup_keys_total{_RATE}))"


class Panel(NamedTuple):
    """A panel: its queries with their legends, and the unit of its values."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


def _rates(by: str, *names: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"sum by ({by}) (rate({name}{_RATE}))", f"{{{{{by}}}}}{label}")
        for name, label in (pair.partition("=")[::2] for pair in names)
    )


def _quantiles(name: str, by: str = "") -> tuple[tuple[str, str], ...]:
    labels, legend = (f"le, {by}", f"{{{{{by}}}}} ") if by else ("le", "")
    return tuple(
        (f"histogram_quantile({share}, sum by ({labels}) (rate({name}_bucket{_RATE})))", label)
        for share, label in ((0.5, f"{legend}p50"), (0.99, f"{legend}p99"))
    )


ROWS: dict[str, tuple[Panel, ...]] = {
    "Overview": (
        Panel("Serving", "none", (("sum(beluga_server_serving)", "servers"),), "stat"),
        Panel("Hit rate", "percentunit", ((f"{_HITS} / {_KEYS}", "keys"),), "stat"),
        Panel(
            "Pool full",
            "percentunit",
            (("sum(beluga_pool_used_bytes) / sum(beluga_pool_bytes)", "used"),),
            "stat",
        ),
        Panel("Sessions", "none", (("sum(beluga_sessions)", "sessions"),), "stat"),
        Panel("Tokens saved", "short", (("sum(beluga_saved_tokens_total)", "tokens"),), "stat"),
        Panel(
            "Prefill time saved",
            "s",
            (("sum(beluga_saved_prefill_seconds_total)", "seconds"),),
            "stat",
        ),
    ),
    "Hits": (
        Panel("Hit rate of keys", "percentunit", ((f"{_HITS} / {_KEYS}", "hit rate"),)),
        Panel("Keys", "ops", ((_KEYS, "looked up"), (_HITS, "found"))),
        Panel("Tokens saved", "ops", _rates("client", "beluga_saved_tokens_total")),
        Panel(
            "Prefill time saved and loading time, seconds per second",
            "none",
            (
                (f"sum(rate(beluga_saved_prefill_seconds_total{_RATE}))", "prefill saved"),
                (f"sum(rate(beluga_client_get_seconds_sum{_RATE}))", "loading"),
            ),
        ),
    ),
    "Space": (
        Panel(
            "Space",
            "bytes",
            (
                ("beluga_pool_bytes", "all"),
                ("beluga_pool_used_bytes", "used"),
                ("beluga_pool_payload_bytes", "payload"),
                ("beluga_pool_free_bytes", "free"),
            ),
        ),
        Panel(
            "Space that cannot be used",
            "bytes",
            (
                ("beluga_pool_quarantined_bytes", "quarantined"),
                ("beluga_pool_retired_bytes", "retired"),
            ),
        ),
        Panel(
            "Block table",
            "none",
            (
                ("beluga_blocks", "blocks"),
                ("beluga_grants", "being written"),
                ("beluga_blocks_pinned", "pinned"),
                ("beluga_blocks_limit", "limit"),
            ),
        ),
        Panel(
            "Blocks added and removed",
            "ops",
            (
                (f"rate(beluga_commits_total{_RATE})", "committed"),
                (f"rate(beluga_evictions_total{_RATE})", "evicted"),
                (f"rate(beluga_table_evictions_total{_RATE})", "evicted, table full"),
                (f"rate(beluga_removals_total{_RATE})", "removed"),
                (f"rate(beluga_aborts_total{_RATE})", "aborted"),
            ),
        ),
        Panel("Refused grants", "ops", _rates("reason", "beluga_refusals_total")),
    ),
    "Tenants": (
        Panel(
            "Payload by tenant and block size",
            "bytes",
            (("sum by (tenant, block_bytes) (beluga_tenant_bytes)", "{{tenant}} {{block_bytes}}"),),
        ),
        Panel("Hits by tenant", "ops", _rates("tenant", "beluga_tenant_hits_total")),
        Panel("Evictions by tenant", "ops", _rates("tenant", "beluga_tenant_evictions_total")),
        Panel(
            "Space of shares",
            "bytes",
            (
                ("sum by (share) (beluga_share_used_bytes)", "{{share}} used"),
                ("sum by (share) (beluga_share_bytes)", "{{share}}"),
            ),
        ),
        Panel(
            "Hints",
            "ops",
            (
                (f"sum(rate(beluga_hints_total{_RATE}))", "given"),
                (f"sum(rate(beluga_hints_refused_total{_RATE}))", "refused"),
                (f"sum(rate(beluga_hints_absent_total{_RATE}))", "of absent keys"),
                (f"sum(rate(beluga_hints_expired_total{_RATE}))", "expired"),
            ),
        ),
        Panel("Blocks with hints", "none", (("sum(beluga_hinted_blocks)", "blocks"),)),
    ),
    "Clients": (
        Panel("Time of gets", "s", _quantiles("beluga_client_get_seconds")),
        Panel("Time of puts", "s", _quantiles("beluga_client_put_seconds")),
        Panel("Time of lookups", "s", _quantiles("beluga_client_lookup_seconds")),
        Panel(
            "Payload",
            "Bps",
            _rates(
                "client",
                "beluga_client_read_bytes_total= read",
                "beluga_client_written_bytes_total= written",
                "beluga_client_flushed_bytes_total= flushed",
            ),
        ),
        Panel(
            "Stale reads and checksum failures",
            "ops",
            _rates(
                "client",
                "beluga_client_stale_reads_total= stale reads",
                "beluga_client_checksum_failures_total= checksums",
            ),
        ),
    ),
    "Calls and sessions": (
        Panel("Calls", "ops", _rates("method", "beluga_rpc_calls_total")),
        Panel("Errors", "ops", _rates("method", "beluga_rpc_errors_total")),
        Panel(
            "Torn lines and quota refusals",
            "ops",
            (
                (f"rate(beluga_rpc_torn_lines_total{_RATE})", "torn lines"),
                (f"sum by (kind) (rate(beluga_rpc_quota_refusals_total{_RATE}))", "{{kind}}"),
            ),
        ),
        Panel(
            "Sessions",
            "none",
            (
                ("beluga_sessions", "now"),
                ("beluga_sessions_suspect", "suspect"),
                ("beluga_lanes", "limit"),
            ),
        ),
        Panel(
            "Server",
            "none",
            (
                (f"rate(process_cpu_seconds_total{_RATE})", "cores"),
                (f"rate(beluga_exporter_seconds_total{_RATE})", "cores for metrics"),
            ),
        ),
        Panel("Memory of the server", "bytes", (("process_resident_memory_bytes", "resident"),)),
        Panel(
            "Takeovers and demotions",
            "none",
            (
                (f"sum by (reason) (increase(beluga_takeovers_total{_RATE}))", "{{reason}}"),
                (
                    f"sum by (reason) (increase(beluga_demotions_total{_RATE}))",
                    "demoted: {{reason}}",
                ),
            ),
        ),
    ),
    "Handlers": (
        Panel("Calls by handler", "ops", _rates("handler", "beluga_handler_calls_total")),
        Panel("Errors by handler", "ops", _rates("handler", "beluga_handler_errors_total")),
        Panel("Time of a handler", "s", _quantiles("beluga_handler_seconds", "handler")),
    ),
    "Link": (
        Panel(
            "Bytes by direction and class",
            "Bps",
            (
                (
                    f"sum by (direction, class) (rate(beluga_link_bytes_total{_RATE}))",
                    "{{direction}} {{class}}",
                ),
            ),
        ),
        Panel("Utilization", "percentunit", _rates("direction", "beluga_link_busy_seconds_total")),
        Panel(
            "Bandwidth of each device",
            "Bps",
            (
                (
                    f"sum by (device) (rate(beluga_link_device_busy_seconds_total{_RATE})) "
                    "* scalar(max(beluga_link_device_bytes_per_second))",
                    "{{device}}",
                ),
            ),
        ),
    ),
    "Lower tiers": (
        Panel(
            "Bytes",
            "Bps",
            _rates(
                "tier",
                "beluga_tier_saved_bytes_total= saved",
                "beluga_tier_loaded_bytes_total= loaded",
            ),
        ),
        Panel(
            "Blocks loaded from lower tiers", "ops", _rates("tier", "beluga_onboard_blocks_total")
        ),
        Panel("Blocks", "none", (("sum by (tier) (beluga_tier_blocks)", "{{tier}}"),)),
        Panel("Circuit breakers (2: open)", "none", (("beluga_tier_breaker_state", "{{tier}}"),)),
        Panel("Time of offloads", "s", _quantiles("beluga_offload_seconds")),
        Panel(
            "Waiting",
            "none",
            (
                ("beluga_lower_dirty_blocks", "to be offered"),
                ("beluga_lower_wanted_keys", "wanted"),
            ),
        ),
    ),
    "Engines' memory (replay)": (
        Panel(
            "Blocks that moved",
            "ops",
            _rates("kind", "beluga_kvbm_moved_blocks_total"),
        ),
        Panel(
            "Blocks found, evicted and dropped",
            "ops",
            (
                (f"sum(rate(beluga_kvbm_hit_blocks_total{_RATE}))", "found"),
                (f"sum(rate(beluga_kvbm_evicted_blocks_total{_RATE}))", "evicted"),
                (f"sum(rate(beluga_kvbm_ghost_hits_total{_RATE}))", "missed soon after"),
                (f"sum by (reason) (rate(beluga_kvbm_dropped_blocks_total{_RATE}))", "{{reason}}"),
            ),
        ),
        Panel(
            "Usage, and the offload threshold",
            "percentunit",
            (
                ("beluga_kvbm_usage_ratio", "engine {{engine}}"),
                ("max(beluga_kvbm_watermark_ratio)", "threshold"),
            ),
        ),
        Panel(
            "Heat of requested blocks, and the prefetch threshold",
            "percentunit",
            (
                *_quantiles("beluga_kvbm_heat_ratio"),
                ("max(beluga_kvbm_prefetch_heat_ratio)", "threshold"),
            ),
        ),
        Panel("Time of an allocation", "s", _quantiles("beluga_kvbm_allocation_seconds")),
        Panel(
            "Targets missed",
            "none",
            (("sum by (target) (beluga_kvbm_target_missed)", "{{target}}"),),
        ),
    ),
}


_NOT_DRAWN = ("beluga_server_info", "process_start_time_seconds")


def others() -> tuple[Panel, ...]:
    """Return panels of the metrics that no other panel shows, so that a new figure has one: those
    of a kind and a unit together.
    """
    shown = " ".join(expr for row in ROWS.values() for panel in row for expr, _ in panel.queries)
    panels: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, metric in METRICS.items():
        if re.search(rf"\b{name}\b", shown) or name in _NOT_DRAWN or metric.kind == "histogram":
            continue
        counter = metric.kind == "counter"
        unit = next((u for u in ("bytes", "seconds") if f"_{u}" in name), "")
        shows = {"bytes": ("bytes", "Bps"), "seconds": ("s", "none")}.get(unit, ("none", "ops"))
        query = f"rate({name}{_RATE})" if counter else name
        query = f"sum by ({', '.join(metric.labels)}) ({query})" if metric.labels else query
        legend = " ".join([name.removeprefix("beluga_"), *(f"{{{{{n}}}}}" for n in metric.labels)])
        title = f"{'Counters' if counter else 'Gauges'}{unit and ' in ' + unit}"
        panels.setdefault((title, shows[counter]), []).append((query, legend))
    return tuple(Panel(*key, tuple(queries)) for key, queries in panels.items())


class Alert(NamedTuple):
    """An alert rule. ``minutes`` is how long its condition must hold."""

    name: str
    expr: str
    minutes: int
    severity: str
    summary: str
    runbook: str


ALERTS = (
    Alert(
        "BelugaServerDown",
        'up{job="beluga"} == 0',
        1,
        "critical",
        "{{ $labels.instance }} does not answer",
        "Every lookup is a miss; the engines keep running without the pool. Start `beluga serve` "
        "again: it takes over with all committed blocks. A standby (`beluga serve --standby`) does "
        "this automatically.",
    ),
    Alert(
        "BelugaNobodyServes",
        "max by (pool) (beluga_server_serving * on (instance) group_left (pool) "
        "beluga_server_info) == 0",
        1,
        "critical",
        "The pool {{ $labels.pool }} has no active server",
        "Standby servers respond, but none took over: their logs have the reason (`the takeover "
        "failed`). If a machine is off, declare it with `beluga serve --declare-gone`.",
    ),
    Alert(
        "BelugaServerDied",
        'sum by (instance) (increase(beluga_takeovers_total{reason="gone"}[15m])) > 0',
        0,
        "warning",
        "{{ $labels.instance }} took over from a server that died",
        "The pool is being served. Find out why the other server died: its log, `beluga trace "
        "--before`, `journalctl -k` (out of memory?). Start it again as a standby.",
    ),
    Alert(
        "BelugaServerStoodStill",
        'sum by (instance, reason) (increase(beluga_takeovers_total{reason=~"stuck|silent"}'
        "[15m])) > 0",
        0,
        "warning",
        "{{ $labels.instance }} took over from a server whose heartbeat stopped "
        "({{ $labels.reason }})",
        "stuck: a process of the same host was stopped, hung or got no CPU time; `beluga trace "
        "--before` shows its last calls. silent: another host is off, hangs, or is overloaded. If "
        "it was overloaded, give the server dedicated cores, or raise `--silent`.",
    ),
    Alert(
        "BelugaFlaps",
        "sum by (job) (increase(beluga_takeovers_total[15m])) > 3",
        0,
        "critical",
        "The pool's server changed {{ $value | humanize }} times in 15 minutes",
        "Clients wait during each takeover. `beluga_takeovers_total` and the logs (`took over`) "
        "have the reasons; `beluga_demotions_total` counts the pools that this process lost.",
    ),
    Alert(
        "BelugaHitRateZero",
        "rate(beluga_lookup_keys_total[5m]) > 0 and rate(beluga_lookup_hits_total[5m]) == 0",
        15,
        "warning",
        "Engines look up blocks and find none",
        "`beluga stat`: if `block_count` is 0, nothing is stored: look at the engines' logs. Else "
        "they look up other keys than were stored: compare model, dtype, block size, salt and "
        "PYTHONHASHSEED of the engines that should share (docs: the page of the engine).",
    ),
    Alert(
        "BelugaTableFull",
        "increase(beluga_table_evictions_total[5m]) > 0 or "
        'increase(beluga_refusals_total{reason="table full"}[5m]) > 0',
        10,
        "warning",
        "The block table is full, though space may not be",
        "Blocks are smaller than the pool was created for. Create it again with `--max-blocks` or "
        "`--block-bytes`; `beluga size` computes them.",
    ),
    Alert(
        "BelugaRefuses",
        'sum by (reason) (rate(beluga_refusals_total{reason!="table full"}[5m])) > 0',
        10,
        "warning",
        "Blocks are not stored: {{ $labels.reason }}",
        "no space: everything is pinned or kept; look at `pinned_count`. offloading: the lower "
        "tier is slower than the rate of new blocks; look at its circuit breaker, or use "
        "`--offload drop`. quota: raise `--quota-*`, or find the client that uses it up.",
    ),
    Alert(
        "BelugaQuarantine",
        "beluga_pool_quarantined_bytes > 0",
        5,
        "warning",
        "{{ $value | humanize1024 }}B are quarantined",
        "A session on another machine stopped responding and may still write. If the machine is "
        "up, the space is freed automatically; if it is off for good, restart the server with "
        "`beluga serve --declare-gone`.",
    ),
    Alert(
        "BelugaSuspectSessions",
        "beluga_sessions_suspect > 0",
        30,
        "warning",
        "{{ $value }} sessions of earlier servers are not proven to have ended",
        "As for BelugaQuarantine: start the machine again, or declare it gone.",
    ),
    Alert(
        "BelugaChecksumFailures",
        "sum by (client) (increase(beluga_client_checksum_failures_total[15m])) > 0",
        0,
        "critical",
        "Bytes in the pool differ from what was stored; the blocks became misses",
        "No wrong bytes were returned. `beluga pool check --payload` finds the blocks, "
        "`beluga verify` tests the memory. Look at the devices' event logs (`cxl list`, `dmesg`).",
    ),
    Alert(
        "BelugaStaleReads",
        "sum(rate(beluga_client_stale_reads_total[5m])) "
        "/ sum(rate(beluga_client_requested_blocks_total[5m])) > 0.01",
        15,
        "warning",
        "More than 1 % of the blocks change while they are read",
        "Blocks are evicted while lower tiers read them, or the memory is less coherent than the "
        "pool was created for: run `beluga verify`.",
    ),
    Alert(
        "BelugaMemoryRetired",
        "beluga_pool_retired_bytes > 0",
        0,
        "critical",
        "A device of the pool failed at {{ $value | humanize1024 }}B",
        "The failed stripes are never used again. Plan to replace the device: stop the engines, "
        "and create the pool again without it.",
    ),
    Alert(
        "BelugaDamagedEntries",
        "beluga_damaged_entries_total > 0",
        0,
        "warning",
        "The takeover dropped {{ $value }} damaged entries",
        "Their blocks are misses. `beluga pool check` shows more; if it repeats, `beluga verify`.",
    ),
    Alert(
        "BelugaLanesScarce",
        "beluga_sessions / beluga_lanes > 0.9",
        10,
        "warning",
        "The pool has few lanes left for clients",
        "Each process of an engine uses one. Create the pool again with more `--lanes`.",
    ),
    Alert(
        "BelugaGetsSlow",
        "histogram_quantile(0.99, sum by (le) (rate(beluga_client_get_seconds_bucket[5m]))) > 0.25",
        15,
        "warning",
        "1 % of the gets take more than {{ $value | humanizeDuration }}",
        "Look at the link's utilization, its other traffic (`class`), and whether gets wait for a "
        "lower tier. `beluga ping` measures the calls, `beluga bench` the copies.",
    ),
    Alert(
        "BelugaErrors",
        "sum by (method) (rate(beluga_rpc_errors_total[5m])) "
        "/ sum by (method) (rate(beluga_rpc_calls_total[5m])) > 0.05",
        10,
        "warning",
        "More than 5 % of the calls of {{ $labels.method }} are answered with an error",
        "The clients' logs have the error. Likely causes: different versions of Beluga, or quotas.",
    ),
    Alert(
        "BelugaChurn",
        "beluga_blocks / rate(beluga_evictions_total[15m]) < 600",
        30,
        "warning",
        "The pool's contents are replaced within {{ $value | humanizeDuration }}",
        "The working set is larger than the pool: `beluga simulate` and `beluga size` estimate the "
        "gain of a larger pool, or of a lower tier (`--disk`).",
    ),
    Alert(
        "BelugaLinkSaturated",
        "rate(beluga_link_busy_seconds_total[5m]) > 0.95",
        15,
        "warning",
        "The link is saturated ({{ $labels.direction }})",
        "Loads have priority over saves, but they wait. Spread the engines over hosts, or set the "
        "link's real speed (the setting `link` of the connectors).",
    ),
    Alert(
        "BelugaTierOpen",
        "beluga_tier_breaker_state == 2",
        5,
        "warning",
        "The tier {{ $labels.tier }} fails and is not used",
        "The server's log has the error; the pool works without the tier. The circuit breaker "
        "closes automatically.",
    ),
    Alert(
        "BelugaEngineMissesTarget",
        "beluga_kvbm_target_missed == 1",
        5,
        "warning",
        "Engine {{ $labels.engine }} misses its target {{ $labels.target }}",
        "available_share_min, inflight_share_max: requests hold nearly all of its memory; give it "
        "more (`--engine-blocks`). allocation_s_max: requests wait for space, for example because "
        "the pool is slower than the rate of offloads. release_s_max: the engine's host is "
        "overloaded.",
    ),
)


def selected(expr: str) -> str:
    """Restrict the metrics of a query to the dashboard's instances."""
    return re.sub(r"\b((?:beluga|process)_[a-z_]+)", r'\1{instance=~"$instance"}', expr)


def dashboard() -> str:
    """Return Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in (ROWS | {"Other figures": others()}).items():
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        panels.append({"type": "row", "title": row, "gridPos": place, "id": len(panels) + 1})
        y += 1
        small = all(panel.kind == "stat" for panel in members)
        width, height = (4, 4) if small else (8, 8)
        for index, panel in enumerate(members):
            place = {
                "h": height,
                "w": width,
                "x": index * width % 24,
                "y": y + index * width // 24 * height,
            }
            panels.append(_panel(panel, place, len(panels) + 1))
        y += -(-len(members) * width // 24) * height
    source = {"type": "prometheus", "uid": "${datasource}"}
    instance = {
        "name": "instance",
        "type": "query",
        "datasource": source,
        "query": "label_values(beluga_server_info, instance)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    made = {
        "uid": "beluga",
        "title": "Beluga",
        "tags": ["beluga"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}, instance]
        },
        "panels": panels,
    }
    return written(made) + "\n"


def _panel(panel: Panel, place: dict[str, int], number: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "gridPos": place,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": selected(expr), "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }


def alerts() -> str:
    """Return the rules for Prometheus. A JSON string is also a YAML string."""
    lines = [
        "# Generated by scripts/dev/gen_monitoring.py; do not edit. The job of the scrape is "
        "`beluga`.",
        "groups:",
        "  - name: beluga",
        "    rules:",
    ]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expr)}",
            f"        for: {alert.minutes}m",
            f"        labels: {{severity: {alert.severity}}}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          runbook: {json.dumps(alert.runbook)}",
        ]
    return "\n".join(lines) + "\n"


def tables() -> dict[str, list[str]]:
    """Return the tables of the page by name."""
    metrics = ["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    metrics += [
        f"| `{name}` | {metric.kind} | {' '.join(f'`{label}`' for label in metric.labels)} "
        f"| {metric.help} |"
        for name, metric in METRICS.items()
    ]
    lower = [
        (name, sample.kind, sample.help)
        for name, sample in REGISTRY.snapshot().items()
        if name.startswith(REGISTRY_PREFIXES) and not name.startswith(HANDLER_PREFIX)
    ]
    handlers = [
        (name, sample.kind, sample.help)
        for name, sample in REGISTRY.snapshot().items()
        if name.startswith(HANDLER_PREFIX)
    ]
    engines = [(f"beluga_kvbm_{name}", *declared) for name, declared in ENGINE_METRICS.items()]
    rules = ["| alert | when | what to do |", "| --- | --- | --- |"]
    for alert in ALERTS:
        held = f", for {alert.minutes} min" if alert.minutes else ""
        when = alert.expr.replace("|", "\\|")
        rules.append(f"| `{alert.name}` ({alert.severity}) | `{when}`{held} | {alert.runbook} |")
    return {
        "metrics": metrics,
        "tiers": _named(lower),
        "handlers": _named(handlers),
        "engines": _named(engines),
        "alerts": rules,
    }


def _named(found: list[tuple[str, str, str]]) -> list[str]:
    """Return a table of names, kinds and meanings."""
    rows = (f"| `{name}` | {kind} | {text} |" for name, kind, text in found)
    return ["| metric | kind | meaning |", "| --- | --- | --- |", *rows]


def page() -> str:
    """Return the page with regenerated tables."""
    text = PAGE.read_text()
    for name, lines in tables().items():
        begin, end = f"<!-- {name}: generated -->\n", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        text = before + begin + "\n".join(["", *lines, "", ""]) + end + rest.partition(end)[2]
    return text


def written(value: Any, indent: int = 0) -> str:
    """Return JSON in which what fits into a line is one."""
    text = json.dumps(value)
    if indent + len(text) <= 100 or not isinstance(value, dict | list):
        return text
    inner, outer = " " * (indent + 1), " " * indent
    if isinstance(value, list):
        return (
            "[\n" + ",\n".join(inner + written(each, indent + 1) for each in value) + f"\n{outer}]"
        )
    fields = (f"{inner}{json.dumps(key)}: {written(of, indent + 1)}" for key, of in value.items())
    return "{\n" + ",\n".join(fields) + f"\n{outer}}}"


def main() -> int:
    """Write the files, or with ``--check`` compare them."""
    check = is_check(__doc__)
    made = {PAGE: page(), DASHBOARD: dashboard(), ALERTS_FILE: alerts()}
    if check:
        stale = [path for path, text in made.items() if path.read_text() != text]
        for path in stale:
            sys.stderr.write(f"{path} is out of date: run scripts/dev/gen_monitoring.py\n")
        return 1 if stale else 0
    for path, text in made.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
