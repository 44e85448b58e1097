/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The figures of a server: every counter that C counts is declared here, once. A comment of the
 * form "name: meaning" makes a field the Prometheus metric beluga_NAME, a counter if its name ends
 * in _total, else a gauge. The exporter, GET /live, the dashboard and docs/operate/monitoring.md
 * are made from these comments (beluga/figures.py). Nanoseconds are exported as seconds.
 *
 * To add a figure, add its line here and count it. Then run scripts/dev/gen_monitoring.py.
 */
#ifndef BL_API_FIGURES_H
#define BL_API_FIGURES_H

#include <stdint.h>

/* Why a server took its pool over. */
enum bl_reason {
    BL_REASON_NONE,             /* no takeover */
    BL_REASON_FIRST,            /* the pool never had a server */
    BL_REASON_STOPPED,          /* its predecessor stopped in order */
    BL_REASON_DECLARED,         /* an operator declared its predecessor gone */
    BL_REASON_GONE,             /* its process, or the boot of its host, has provably ended */
    BL_REASON_STUCK,            /* its process lives on this host, but its heartbeat stopped */
    BL_REASON_SILENT            /* another host's heartbeat stopped */
};

/* The predecessor of a server, and the reason of the takeover. */
typedef struct bl_takeover_cause {
    uint64_t epoch;
    uint64_t silent_ns;         /* how long its heartbeat had stopped for a standby */
    uint32_t host;
    uint32_t reason;            /* enum bl_reason */
} bl_takeover_cause;

/* Calls and sessions (bl_server_describe). */
typedef struct bl_server_stat {
    uint64_t epoch;             /* server_epoch: Epoch of this server. */
    uint64_t call_count;
    uint64_t error_count;       /* calls answered with an error */
    uint64_t key_count;         /* rpc_keys_total: Keys in the calls, a measure of the server's
                                 * work. */
    uint64_t torn_count;        /* rpc_torn_lines_total: Request lines that were torn when read,
                                 * and were read again. */
    uint64_t quota_call_count;  /* rpc_quota_refusals_total{kind="calls"}: Calls, grants and pins
                                 * that a session's quota refused. */
    uint64_t quota_grant_count; /* rpc_quota_refusals_total{kind="grants"}: - */
    uint64_t quota_pin_count;   /* rpc_quota_refusals_total{kind="pins"}: - */
    uint64_t quantum_request_max;  /* the most requests of a lane in one quantum */
    uint64_t quantum_key_max;
    uint64_t wait_request_max;  /* rpc_longest_wait_requests: The most requests of other sessions
                                 * that were handled while a session's oldest request waited. */
    uint64_t wait_key_max;
    uint64_t attach_count;      /* sessions_attached_total: Sessions that attached. */
    uint64_t end_count;         /* sessions_ended_total: Sessions that ended, for any reason. */
    uint32_t live_count;        /* sessions: Current sessions. */
    uint32_t inherited_count;   /* sessions_suspect: Sessions of earlier servers that are not
                                 * proven dead; their space is quarantined. */
    uint32_t watched_count;     /* sessions_watched: Sessions whose process the kernel watches. */
    uint32_t housekeeping_count; /* changes while the poll loop runs; wraps */
    uint32_t draining;          /* 1: no grant is made, and no earlier request for one is in
                                 * progress */
    int32_t trace_status;       /* 0, or -errno: the reason that there is no trace */
    bl_takeover_cause takeover;
} bl_server_stat;

/* The calls of one method (bl_server_calls). */
typedef struct bl_calls {
    uint64_t call_count;        /* rpc_calls_total: Calls that were handled. */
    uint64_t error_count;       /* rpc_errors_total: Calls that returned an error. */
} bl_calls;

/* The block index and its space (bl_index_describe, and the call STAT). */
typedef struct bl_index_stat {
    uint64_t block_count;       /* blocks: Committed blocks. */
    uint64_t block_count_max;   /* blocks_limit: Capacity of the block table. */
    uint64_t block_bytes;       /* pool_payload_bytes: Payload of the committed blocks. */
    uint64_t grant_count;       /* grants: Blocks that are being written. */
    uint64_t pinned_count;      /* blocks_pinned: Blocks that cannot be evicted because a session
                                 * has pinned them. */
    uint64_t lookup_count;      /* lookup_keys_total: Keys that were looked up. */
    uint64_t hit_count;         /* lookup_hits_total: Looked-up keys that hit. */
    uint64_t commit_count;      /* commits_total: Blocks that were committed. */
    uint64_t abort_count;       /* aborts_total: Grants that ended without a block. */
    uint64_t evict_count;       /* evictions_total: Blocks that were evicted to make room. */
    uint64_t table_evict_count; /* table_evictions_total: Blocks that were evicted because the block
                                 * table was full, but not the space. */
    uint64_t remove_count;      /* removals_total: Blocks that a client removed. */
    uint64_t refuse_count;      /* grants refused */
    uint64_t damaged_count;     /* damaged_entries_total: Entries of the block table that takeover
                                 * dropped because they were damaged. */
    uint64_t stripe_count;
    uint64_t free_stripe_count; /* entirely free stripes */
    uint64_t retired_stripe_count; /* stripes retired because their memory failed */
    uint64_t extent_count;      /* pool_extents: Open extents (groups of stripes). */
    uint64_t data_bytes;        /* pool_bytes: Space for blocks. */
    uint64_t used_bytes;        /* pool_used_bytes: Space of committed and granted blocks. */
    uint64_t free_bytes;        /* pool_free_bytes: Space that is free. */
    uint64_t held_bytes;        /* pool_quarantined_bytes: Quarantined space: a writer may be
                                 * alive. */
    uint64_t retired_bytes;     /* pool_retired_bytes: Space on failed memory, which is never used
                                 * again. */
    uint64_t free_run_bytes;    /* pool_free_run_bytes: The longest free run: the largest block that
                                 * needs no eviction, up to 1 GiB. */
} bl_index_stat;

/* A tenant: the committed blocks of one namespace and one length (bl_index_tenants). */
typedef struct bl_tenant {
    uint64_t fingerprint;       /* of the namespace */
    uint64_t length;            /* payload bytes of each block; 0: no such tenant */
    uint64_t block_count;       /* tenant_blocks: Committed blocks of a namespace and a block
                                 * size. */
    uint64_t block_bytes;       /* tenant_bytes: Payload of these blocks. */
    uint64_t commit_count;      /* tenant_commits_total: Blocks that a tenant committed. */
    uint64_t hit_count;         /* tenant_hits_total: Hits in a tenant's blocks. */
    uint64_t evict_count;       /* tenant_evictions_total: Blocks of a tenant that were evicted. */
} bl_tenant;

/* A tenant's part of the pool (bl_index_shares). */
typedef struct bl_share_view {
    uint64_t bytes;             /* share_bytes: Guaranteed share of a tenant. */
    uint64_t used_bytes;        /* share_used_bytes: Space of a share's blocks, including blocks
                                 * being written. */
    uint64_t blocks;            /* share_blocks: Blocks of a share. */
    uint64_t evictions;         /* share_evictions_total: Blocks of a share that were evicted. */
    uint64_t hint_bytes;        /* share_hint_bytes: Space of a share's blocks that hints may favor
                                 * or pin. */
    uint64_t hinted_bytes;      /* share_hinted_bytes: What they favor or pin. */
} bl_share_view;

/* Hints (bl_index_hints). */
typedef struct bl_hint_stat {
    uint64_t hint_count;        /* hinted_blocks: Blocks that have a hint. */
    uint64_t favored_bytes;     /* hinted_bytes: Space of the blocks that hints favor or pin. */
    uint64_t given_count;       /* hints_total: Hints that blocks were given. */
    uint64_t absent_count;      /* hints_absent_total: Hints of keys that the pool did not have. */
    uint64_t refuse_count;      /* hints_refused_total: Hints that a budget refused. */
    uint64_t expire_count;      /* hints_expired_total: Hints that expired. */
} bl_hint_stat;

/* The work of lower tiers for the index (bl_lower_describe). */
typedef struct bl_lower_stat {
    uint64_t name_count;        /* lower_known_keys: Keys that lower tiers have, or that are being
                                 * fetched. */
    uint64_t dirty_count;       /* lower_dirty_blocks: Blocks that were not yet offered to lower
                                 * tiers. */
    uint64_t wanted_count;      /* lower_wanted_keys: Keys that are being fetched from lower
                                 * tiers. */
    uint64_t onboard_count;     /* lower_requested_keys_total: Keys that were requested from lower
                                 * tiers. */
    uint64_t unsaved_count;     /* lower_unsaved_blocks_total: Blocks that were evicted before they
                                 * were offered to lower tiers. */
    uint64_t removal_count;     /* lower_removals: Removals that a lower tier has not executed
                                 * yet. */
    uint64_t removal_failed;    /* lower_failed_removals: Of these, removals that have failed so
                                 * far. */
    uint64_t removal_parked;    /* lower_removals_parked: Of these, removals for tiers that this
                                 * server does not have. */
    uint64_t removal_max;       /* lower_removals_max: Limit of pending removals, above which remove
                                 * is refused. */
    uint64_t tier_count;        /* tiers whose removals are stored, including those of former
                                 * servers */
} bl_lower_stat;

/* What clients count and report, by kind of client (bl_server_reported). The order is that of the
 * report's numbers: append only. Histograms of their calls follow (beluga/rpc/report.py). */
typedef struct bl_client_figures {
    uint64_t requested_blocks;  /* client_requested_blocks_total: Blocks requested by gets. */
    uint64_t hit_blocks;        /* client_hit_blocks_total: Blocks copied by gets. */
    uint64_t stored_blocks;     /* client_stored_blocks_total: Blocks stored by puts. */
    uint64_t present_blocks;    /* client_present_blocks_total: Blocks of puts that the pool already
                                 * had. */
    uint64_t refused_blocks;    /* client_refused_blocks_total: Blocks of puts for which there was
                                 * no room. */
    uint64_t read_bytes;        /* client_read_bytes_total: Payload copied by gets. */
    uint64_t written_bytes;     /* client_written_bytes_total: Payload copied by puts. */
    uint64_t flushed_bytes;     /* client_flushed_bytes_total: Payload that was flushed from caches
                                 * before it was read: 0 with hardware coherence. */
    uint64_t mismatches;        /* client_stale_reads_total: Blocks whose entry or bytes were not
                                 * the expected ones; none of them was returned. */
    uint64_t checksum_failures; /* client_checksum_failures_total: Stale reads that a checksum
                                 * detected. */
    uint64_t saved_tokens;      /* saved_tokens_total: Prompt tokens that engines loaded instead of
                                 * computing them. */
    uint64_t saved_ns;          /* saved_prefill_seconds_total: Time that computing them would have
                                 * taken, from the configured prefill times. */
} bl_client_figures;

#endif
