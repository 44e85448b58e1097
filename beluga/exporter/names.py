# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""All metrics of a server by name, with kind and description.

``docs/operate/monitoring.md`` has this table (``scripts/dev/gen_monitoring.py``). The metrics of
the lower tiers and of emulated engines are not here: they are those of the registry
(:mod:`beluga.metrics`) that begin with one of :data:`TIER_PREFIXES`.
"""

from __future__ import annotations

from typing import NamedTuple

TIER_PREFIXES = ("beluga_tier_", "beluga_onboard_", "beluga_offload_", "beluga_kvbm_")


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
    "beluga_server_serving": Metric("gauge", "1 if this server serves; 0 if it stands by."),
    "beluga_server_epoch": Metric("gauge", "Number of this server among those of its pool."),
    "beluga_takeovers_total": Metric(
        "counter",
        "How often this process took the pool over, by why: first (nobody had served it), stopped "
        "(the server before stopped in order), declared (an operator declared it gone), gone (it "
        "ended otherwise), stuck (its process lives, but stands still), silent (the heartbeat of "
        "another host stood still).",
        ("reason",),
    ),
    "beluga_demotions_total": Metric(
        "counter",
        "How often this process lost the pool, by why: deposed (another server took over), lease "
        "(its lease was lost).",
        ("reason",),
    ),
    "process_cpu_seconds_total": Metric("counter", "Processor time of the server's process."),
    "process_resident_memory_bytes": Metric("gauge", "Memory of the server's process."),
    "process_start_time_seconds": Metric("gauge", "When the process started, in Unix time."),
    "process_open_fds": Metric("gauge", "Open file descriptors of the process."),
    # Calls.
    "beluga_rpc_calls_total": Metric("counter", "Calls that were answered.", ("method",)),
    "beluga_rpc_errors_total": Metric("counter", "Calls answered with an error.", ("method",)),
    "beluga_rpc_keys_total": Metric("counter", "Keys of the calls: the server's work."),
    "beluga_rpc_torn_lines_total": Metric(
        "counter", "Request lines that were not whole when they were looked at, and were read again"
    ),
    "beluga_rpc_quota_refusals_total": Metric(
        "counter", "Calls, grants and pins that a session's quota refused.", ("kind",)
    ),
    "beluga_rpc_longest_wait_requests": Metric(
        "gauge", "The most requests of others that were done while a session's oldest one waited."
    ),
    # Sessions.
    "beluga_sessions": Metric("gauge", "Sessions now."),
    "beluga_sessions_suspect": Metric(
        "gauge", "Sessions of earlier servers that are not proven gone; their space is quarantined."
    ),
    "beluga_sessions_watched": Metric("gauge", "Sessions whose process the kernel watches."),
    "beluga_sessions_attached_total": Metric("counter", "Sessions that attached."),
    "beluga_sessions_ended_total": Metric("counter", "Sessions that ended, for whatever reason."),
    "beluga_lanes": Metric("gauge", "Sessions that the pool has room for."),
    # The block index.
    "beluga_blocks": Metric("gauge", "Committed blocks."),
    "beluga_blocks_limit": Metric("gauge", "Blocks that the block table has room for."),
    "beluga_blocks_pinned": Metric("gauge", "Blocks that cannot be evicted: a session reads them."),
    "beluga_grants": Metric("gauge", "Blocks that are being written."),
    "beluga_lookup_keys_total": Metric("counter", "Keys that were looked up."),
    "beluga_lookup_hits_total": Metric("counter", "Keys that were looked up and found."),
    "beluga_commits_total": Metric("counter", "Blocks that were committed."),
    "beluga_aborts_total": Metric("counter", "Grants that ended without a block."),
    "beluga_evictions_total": Metric("counter", "Blocks that were evicted for other blocks."),
    "beluga_table_evictions_total": Metric(
        "counter", "Blocks that were evicted because the block table was full, though space was not"
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
    "beluga_pool_quarantined_bytes": Metric(
        "gauge", "Space that is given to nobody: a writer may be alive."
    ),
    "beluga_pool_retired_bytes": Metric("gauge", "Space never used again: its memory failed."),
    "beluga_pool_extents": Metric("gauge", "Extents: groups of stripes that are open."),
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
        "counter", "Blocks of a tenant that lookups found.", ("tenant", "block_bytes")
    ),
    "beluga_tenant_evictions_total": Metric(
        "counter", "Blocks of a tenant that were evicted.", ("tenant", "block_bytes")
    ),
    "beluga_share_bytes": Metric(
        "gauge", "The part of the pool that a tenant may fill while others want theirs.", ("share",)
    ),
    "beluga_share_used_bytes": Metric(
        "gauge", "Space of a share's blocks, those being written included.", ("share",)
    ),
    "beluga_share_blocks": Metric("gauge", "These blocks.", ("share",)),
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
    "beluga_hints_expired_total": Metric("counter", "Hints whose time was over."),
    # What clients report.
    "beluga_client_asked_blocks_total": Metric("counter", "Blocks that gets wanted.", ("client",)),
    "beluga_client_hit_blocks_total": Metric("counter", "Blocks that gets copied.", ("client",)),
    "beluga_client_stored_blocks_total": Metric("counter", "Blocks that puts stored.", ("client",)),
    "beluga_client_present_blocks_total": Metric(
        "counter", "Blocks of puts that the pool had.", ("client",)
    ),
    "beluga_client_refused_blocks_total": Metric(
        "counter", "Blocks of puts that found no room.", ("client",)
    ),
    "beluga_client_read_bytes_total": Metric("counter", "Payload that gets copied.", ("client",)),
    "beluga_client_written_bytes_total": Metric(
        "counter", "Payload that puts copied.", ("client",)
    ),
    "beluga_client_flushed_bytes_total": Metric(
        "counter",
        "Payload that was flushed from caches before it was read: 0 with hardware coherence.",
        ("client",),
    ),
    "beluga_client_stale_reads_total": Metric(
        "counter",
        "Blocks whose entry or bytes were not those expected; none of them was returned wrong.",
        ("client",),
    ),
    "beluga_client_checksum_failures_total": Metric(
        "counter", "Stale reads that a checksum caught.", ("client",)
    ),
    "beluga_client_get_seconds": Metric("histogram", "Time of a get of a batch.", ("client",)),
    "beluga_client_put_seconds": Metric("histogram", "Time of a put of a batch.", ("client",)),
    "beluga_client_lookup_seconds": Metric(
        "histogram", "Time of a lookup of a batch: one call to the server.", ("client",)
    ),
    "beluga_saved_tokens_total": Metric(
        "counter", "Prompt tokens that engines loaded and did not compute.", ("client",)
    ),
    "beluga_saved_prefill_seconds_total": Metric(
        "counter",
        "Time that computing them would have taken, by the prefill times that engines are given.",
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
        "Time of the link that was admitted; its rate is the utilization.",
        ("direction",),
    ),
    "beluga_link_reaped_total": Metric(
        "counter", "Processes that died while they held tokens of the link.", ("direction",)
    ),
    "beluga_link_device_busy_seconds_total": Metric(
        "counter", "Time of each memory device that was admitted.", ("device",)
    ),
    "beluga_link_device_bytes_per_second": Metric(
        "gauge", "Speed of each memory device, as the link was told; times busy is its bandwidth."
    ),
    # The lower tiers' work for the index.
    "beluga_lower_known_keys": Metric("gauge", "Keys that lower tiers have, or that are wanted."),
    "beluga_lower_dirty_blocks": Metric("gauge", "Blocks that were not offered to lower tiers."),
    "beluga_lower_wanted_keys": Metric("gauge", "Keys that are wanted from lower tiers now."),
    "beluga_lower_asked_keys_total": Metric("counter", "Keys that were asked for from there."),
    "beluga_lower_unsaved_blocks_total": Metric(
        "counter", "Blocks that left the pool before they were offered to lower tiers."
    ),
    "beluga_lower_removals": Metric("gauge", "Removals that a lower tier has not executed yet."),
    "beluga_lower_failed_removals": Metric("gauge", "Of these, those that were tried in vain."),
    "beluga_lower_removals_parked": Metric(
        "gauge", "Of these, those of tiers that this server does not have."
    ),
    "beluga_lower_removals_max": Metric("gauge", "So many may wait; then remove is refused."),
    # The exporter.
    "beluga_exporter_scrapes_total": Metric("counter", "Scrapes that were answered."),
    "beluga_exporter_seconds_total": Metric("counter", "Processor time that scrapes took."),
}
