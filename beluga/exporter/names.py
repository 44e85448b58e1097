# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""All metrics of a server by name, with kind and description.

``docs/operate/monitoring.md`` has this table (``scripts/dev/gen_monitoring.py``). The metrics of
handlers, lower tiers and emulated engines are those of the registry (:mod:`beluga.metrics`) that
begin with one of :data:`REGISTRY_PREFIXES`.
"""

from __future__ import annotations

from typing import NamedTuple

HANDLER_PREFIX = "beluga_handler_"
REGISTRY_PREFIXES = (
    *("beluga_tier_", "beluga_onboard_", "beluga_offload_", "beluga_kvbm_"),
    HANDLER_PREFIX,
)


class Metric(NamedTuple):
    """The description of a metric. ``labels`` are the names of its labels."""

    kind: str
    help: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, Metric] = {
    # The server.
    "beluga_server_info": Metric(
        "gauge", "Always 1; the labels name the program and its pool.", ("version", "pool")
    ),
    "beluga_server_serving": Metric("gauge", "1 if this server serves; 0 if it is a standby."),
    "beluga_server_epoch": Metric("gauge", "Epoch of this server."),
    "beluga_takeovers_total": Metric(
        "counter",
        "Takeovers by this process, by reason: first (the pool had no server before), stopped "
        "(the previous server stopped cleanly), declared (an operator declared it gone), gone (it "
        "ended otherwise), stuck (its process lives, but its heartbeat has stopped), silent (the "
        "heartbeat of another host has stopped).",
        ("reason",),
    ),
    "beluga_demotions_total": Metric(
        "counter",
        "Pools that this process lost, by reason: deposed (another server took over).",
        ("reason",),
    ),
    "process_cpu_seconds_total": Metric("counter", "Processor time of the server's process."),
    "process_resident_memory_bytes": Metric("gauge", "Memory of the server's process."),
    "process_start_time_seconds": Metric("gauge", "When the process started, in Unix time."),
    "process_open_fds": Metric("gauge", "Open file descriptors of the process."),
    # Calls.
    "beluga_rpc_calls_total": Metric("counter", "Calls that were handled.", ("method",)),
    "beluga_rpc_errors_total": Metric("counter", "Calls that returned an error.", ("method",)),
    "beluga_rpc_keys_total": Metric(
        "counter", "Keys in the calls, a measure of the server's work."
    ),
    "beluga_rpc_torn_lines_total": Metric(
        "counter", "Request lines that were torn when read, and were read again"
    ),
    "beluga_rpc_quota_refusals_total": Metric(
        "counter", "Calls, grants and pins that a session's quota refused.", ("kind",)
    ),
    "beluga_rpc_longest_wait_requests": Metric(
        "gauge",
        "The most requests of other sessions that were handled while a session's oldest request "
        "waited.",
    ),
    # Sessions.
    "beluga_sessions": Metric("gauge", "Current sessions."),
    "beluga_sessions_suspect": Metric(
        "gauge", "Sessions of earlier servers that are not proven dead; their space is quarantined."
    ),
    "beluga_sessions_watched": Metric("gauge", "Sessions whose process the kernel watches."),
    "beluga_sessions_attached_total": Metric("counter", "Sessions that attached."),
    "beluga_sessions_ended_total": Metric("counter", "Sessions that ended, for any reason."),
    "beluga_lanes": Metric("gauge", "Sessions that the pool has room for."),
    # The block index.
    "beluga_blocks": Metric("gauge", "Committed blocks."),
    "beluga_blocks_limit": Metric("gauge", "Capacity of the block table."),
    "beluga_blocks_pinned": Metric(
        "gauge", "Blocks that cannot be evicted because a session has pinned them."
    ),
    "beluga_grants": Metric("gauge", "Blocks that are being written."),
    "beluga_lookup_keys_total": Metric("counter", "Keys that were looked up."),
    "beluga_lookup_hits_total": Metric("counter", "Looked-up keys that hit."),
    "beluga_commits_total": Metric("counter", "Blocks that were committed."),
    "beluga_aborts_total": Metric("counter", "Grants that ended without a block."),
    "beluga_evictions_total": Metric("counter", "Blocks that were evicted to make room."),
    "beluga_table_evictions_total": Metric(
        "counter", "Blocks that were evicted because the block table was full, but not the space"
    ),
    "beluga_removals_total": Metric("counter", "Blocks that a client removed."),
    "beluga_refusals_total": Metric("counter", "Grants that were refused.", ("reason",)),
    "beluga_damaged_entries_total": Metric(
        "counter", "Entries of the block table that takeover dropped because they were damaged."
    ),
    # Space.
    "beluga_pool_bytes": Metric("gauge", "Space for blocks."),
    "beluga_pool_used_bytes": Metric("gauge", "Space of committed and granted blocks."),
    "beluga_pool_payload_bytes": Metric("gauge", "Payload of the committed blocks."),
    "beluga_pool_free_bytes": Metric("gauge", "Space that is free."),
    "beluga_pool_quarantined_bytes": Metric("gauge", "Quarantined space: a writer may be alive."),
    "beluga_pool_retired_bytes": Metric(
        "gauge", "Space on failed memory, which is never used again."
    ),
    "beluga_pool_extents": Metric("gauge", "Open extents (groups of stripes)."),
    "beluga_pool_free_run_bytes": Metric(
        "gauge", "The longest free run: the largest block that needs no eviction, up to 1 GiB."
    ),
    "beluga_device_bytes": Metric("gauge", "Size of each device.", ("device",)),
    # Tenants and layouts.
    "beluga_tenant_blocks": Metric(
        "gauge", "Committed blocks of a namespace and a block size.", ("tenant", "block_bytes")
    ),
    "beluga_tenant_bytes": Metric("gauge", "Payload of these blocks.", ("tenant", "block_bytes")),
    "beluga_tenant_commits_total": Metric(
        "counter", "Blocks that a tenant committed.", ("tenant", "block_bytes")
    ),
    "beluga_tenant_hits_total": Metric(
        "counter", "Hits in a tenant's blocks.", ("tenant", "block_bytes")
    ),
    "beluga_tenant_evictions_total": Metric(
        "counter", "Blocks of a tenant that were evicted.", ("tenant", "block_bytes")
    ),
    "beluga_share_bytes": Metric("gauge", "Guaranteed share of a tenant.", ("share",)),
    "beluga_share_used_bytes": Metric(
        "gauge", "Space of a share's blocks, including blocks being written.", ("share",)
    ),
    "beluga_share_blocks": Metric("gauge", "Blocks of a share.", ("share",)),
    "beluga_share_evictions_total": Metric(
        "counter", "Blocks of a share that were evicted.", ("share",)
    ),
    "beluga_share_hint_bytes": Metric(
        "gauge", "Space of a share's blocks that hints may favor or pin.", ("share",)
    ),
    "beluga_share_hinted_bytes": Metric("gauge", "What they favor or pin.", ("share",)),
    "beluga_hinted_blocks": Metric("gauge", "Blocks that have a hint."),
    "beluga_hinted_bytes": Metric("gauge", "Space of the blocks that hints favor or pin."),
    "beluga_hints_total": Metric("counter", "Hints that blocks were given."),
    "beluga_hints_absent_total": Metric("counter", "Hints of keys that the pool did not have."),
    "beluga_hints_refused_total": Metric("counter", "Hints that a budget refused."),
    "beluga_hints_expired_total": Metric("counter", "Hints that expired."),
    # What clients report.
    "beluga_client_requested_blocks_total": Metric(
        "counter", "Blocks requested by gets.", ("client",)
    ),
    "beluga_client_hit_blocks_total": Metric("counter", "Blocks copied by gets.", ("client",)),
    "beluga_client_stored_blocks_total": Metric("counter", "Blocks stored by puts.", ("client",)),
    "beluga_client_present_blocks_total": Metric(
        "counter", "Blocks of puts that the pool already had.", ("client",)
    ),
    "beluga_client_refused_blocks_total": Metric(
        "counter", "Blocks of puts for which there was no room.", ("client",)
    ),
    "beluga_client_read_bytes_total": Metric("counter", "Payload copied by gets.", ("client",)),
    "beluga_client_written_bytes_total": Metric("counter", "Payload copied by puts.", ("client",)),
    "beluga_client_flushed_bytes_total": Metric(
        "counter",
        "Payload that was flushed from caches before it was read: 0 with hardware coherence.",
        ("client",),
    ),
    "beluga_client_stale_reads_total": Metric(
        "counter",
        "Blocks whose entry or bytes were not the expected ones; none of them was returned.",
        ("client",),
    ),
    "beluga_client_checksum_failures_total": Metric(
        "counter", "Stale reads that a checksum detected.", ("client",)
    ),
    "beluga_client_get_seconds": Metric("histogram", "Time of a get of a batch.", ("client",)),
    "beluga_client_put_seconds": Metric("histogram", "Time of a put of a batch.", ("client",)),
    "beluga_client_lookup_seconds": Metric(
        "histogram", "Time of a lookup of a batch: one call to the server.", ("client",)
    ),
    "beluga_saved_tokens_total": Metric(
        "counter", "Prompt tokens that engines loaded instead of computing them.", ("client",)
    ),
    "beluga_saved_prefill_seconds_total": Metric(
        "counter",
        "Time that computing them would have taken, from the configured prefill times.",
        ("client",),
    ),
    # This host's link to the pool.
    "beluga_link_bytes_total": Metric(
        "counter", "Bytes that the link scheduler admitted.", ("direction", "class")
    ),
    "beluga_link_pieces_total": Metric(
        "counter", "Pieces that the link scheduler admitted.", ("direction", "class")
    ),
    "beluga_link_busy_seconds_total": Metric(
        "counter",
        "Admitted time of the link; its rate is the utilization.",
        ("direction",),
    ),
    "beluga_link_reaped_total": Metric(
        "counter", "Processes that died while holding tokens of the link.", ("direction",)
    ),
    "beluga_link_device_busy_seconds_total": Metric(
        "counter", "Admitted time of each memory device.", ("device",)
    ),
    "beluga_link_device_bytes_per_second": Metric(
        "gauge",
        "Speed of each memory device, as configured; multiplied by the busy rate it is the used "
        "bandwidth.",
    ),
    # The lower tiers' work for the index.
    "beluga_lower_known_keys": Metric(
        "gauge", "Keys that lower tiers have, or that are being fetched."
    ),
    "beluga_lower_dirty_blocks": Metric(
        "gauge", "Blocks that were not yet offered to lower tiers."
    ),
    "beluga_lower_wanted_keys": Metric("gauge", "Keys that are being fetched from lower tiers."),
    "beluga_lower_requested_keys_total": Metric(
        "counter", "Keys that were requested from lower tiers."
    ),
    "beluga_lower_unsaved_blocks_total": Metric(
        "counter", "Blocks that were evicted before they were offered to lower tiers."
    ),
    "beluga_lower_removals": Metric("gauge", "Removals that a lower tier has not executed yet."),
    "beluga_lower_failed_removals": Metric("gauge", "Of these, removals that have failed so far."),
    "beluga_lower_removals_parked": Metric(
        "gauge", "Of these, removals for tiers that this server does not have."
    ),
    "beluga_lower_removals_max": Metric(
        "gauge", "Limit of pending removals, above which remove is refused."
    ),
    # The exporter.
    "beluga_exporter_scrapes_total": Metric("counter", "Scrapes that were served."),
    "beluga_exporter_seconds_total": Metric("counter", "Processor time that scrapes took."),
}
