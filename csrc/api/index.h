/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The block index: the server's side, and the calls of its clients (beluga/index).
 */
#ifndef BL_API_INDEX_H
#define BL_API_INDEX_H

#include "api/rpc.h"

typedef struct bl_meta bl_meta;

/* Create the block index of a server that does not serve yet; eviction is a bl_evict_policy. */
int bl_meta_create(bl_server *server, uint32_t eviction, bl_meta **out);
void bl_meta_destroy(bl_meta *meta);

/* Become the pool's server with the block index; all committed blocks of the predecessor are in
 * it. */
int bl_meta_serve(bl_meta *meta);
void bl_meta_describe(const bl_meta *meta, bl_meta_stat *out);

/* The committed blocks of one namespace and one length, as the exporter shows them. */
typedef struct bl_tenant {
    uint64_t fingerprint;       /* of the namespace */
    uint64_t length;            /* payload bytes of each block; 0: no such tenant */
    uint64_t block_count;       /* committed now */
    uint64_t commit_count;
    uint64_t hit_count;
    uint64_t evict_count;
} bl_tenant;

/* The first tenant is the sum of all tenants beyond the table's size; it has no length. */
enum bl_tenant_limit { BL_TENANT_COUNT = 513 };

/* Copy the tenants, at most count, and return their number. The server's thread runs meanwhile, so
 * the figures are not from one instant. */
uint32_t bl_meta_tenants(const bl_meta *meta, bl_tenant *out, uint32_t count);

/* Parts of the pool for tenants. A tenant has the namespaces whose fingerprints have a rule's value
 * under its mask; namespaces without a rule belong to the first share. */
enum bl_share_limit {
    BL_SHARE_COUNT = 32,
    BL_SHARE_RULES = 96,
    BL_SHARE_WHOLE = 1000000    /* parts are millionths of the pool */
};

typedef struct bl_share_rule {
    uint64_t value;
    uint64_t mask;
    uint32_t share;             /* from 1 on */
    uint32_t reserved;
} bl_share_rule;

/* Give shares from 1 to count these parts, and the first one the rest, before the server serves.
 * Returns 0, -EEXIST, -EINVAL, -ENOMEM. A block is evicted for another tenant's only while its own
 * tenant exceeds its part, unless no tenant does. */
int bl_meta_share(bl_meta *meta, const uint32_t *parts, uint32_t count,
                  const bl_share_rule *rules, uint32_t rule_count);

typedef struct bl_share_view {
    uint64_t bytes;             /* its part of the pool */
    uint64_t used_bytes;        /* space of its blocks, those being written included */
    uint64_t used_count;
    uint64_t evict_count;
    uint64_t hint_bytes;        /* what hints may favor of its blocks */
    uint64_t hinted_bytes;      /* what they favor */
} bl_share_view;

/* Copy the shares, at most count, and return their number: 1 if there are no rules. The server's
 * thread runs meanwhile, so the figures are not from one instant. */
uint32_t bl_meta_shares(const bl_meta *meta, bl_share_view *out, uint32_t count);

/* What a hint says of a block's worth (index/hints.h). In its tenant's share, LOW blocks are
 * evicted before the others, HIGH ones after them, and PINNED ones only where nothing else makes
 * room. */
enum bl_level {
    BL_LEVEL_NORMAL = 0,
    BL_LEVEL_LOW = 1,
    BL_LEVEL_HIGH = 2,
    BL_LEVEL_PINNED = 3,
    BL_LEVEL_COUNT = 4
};
enum bl_hint_limit { BL_HINT_PART = 250000 }; /* of each share, for blocks that hints favor */

/* bl_block_request (flags: bl_level; length: milliseconds since the last use for which it holds, 0
 * for no limit), keys -> bl_block_reply (count: hints given; state: hints refused). */
enum bl_hint_method { BL_METHOD_HINT = 21 };

typedef struct bl_hint_stat {
    uint64_t hint_count;        /* blocks with a hint now */
    uint64_t favored_bytes;     /* space of the blocks at HIGH and PINNED now */
    uint64_t given_count;
    uint64_t absent_count;      /* hints of keys that the pool did not have */
    uint64_t refuse_count;      /* hints beyond the budget, or beyond those of a session */
    uint64_t expire_count;
} bl_hint_stat;

void bl_meta_hints(const bl_meta *meta, bl_hint_stat *out);

/* Let blocks at HIGH and PINNED have this part of each share, before the server serves: 0 or
 * -EINVAL. */
int bl_meta_hint_part(bl_meta *meta, uint32_t part);

/* A cell of the map of a device: some of its stripes, without the superblock's. */
typedef struct bl_map_cell {
    uint64_t used_bytes;        /* of committed and granted blocks */
    uint64_t held_bytes;        /* quarantined */
    uint32_t stripe_count;
    uint32_t free_count;        /* stripes without blocks */
    uint32_t table_count;       /* stripes of the pool's tables and lanes */
    uint32_t retired_count;     /* stripes of extents that failed */
    uint32_t kept_count;        /* stripes with blocks that are never evicted */
    uint32_t reserved;
} bl_map_cell;

/* Draw the map: cell_count cells of each device, device after device. Any thread may call this; the
 * server's thread runs meanwhile, so the cells are not from one instant. */
void bl_meta_map(const bl_meta *meta, uint32_t cell_count, bl_map_cell *out);

/* Return how many grants were refused for this error, which is a positive bl_error. */
uint64_t bl_meta_refused(const bl_meta *meta, uint32_t error);

/* A session, for display. */
enum bl_session_trust {
    BL_SESSION_WATCHED = 0,     /* its process is of the server's host, which proves its end */
    BL_SESSION_HEARD = 1,       /* only its heartbeat is visible, which proves nothing */
    BL_SESSION_BROKEN = 2       /* the memory of its lane fails */
};

typedef struct bl_session_view {
    uint64_t nonce;
    uint64_t epoch;             /* whose server attached it */
    uint64_t since_ns;          /* time in its current state */
    uint64_t heartbeat_ns;      /* time since its heartbeat last moved */
    uint64_t call_count;        /* calls answered by this server */
    uint64_t bytes;             /* payload of its grants and of the blocks it has pinned */
    uint64_t held_bytes;        /* quarantined, since it may still write them */
    uint32_t lane;
    uint32_t host;
    uint32_t pid;               /* as the server sees it; 0: unknown */
    uint32_t kind;              /* of its last report; 0: other, or no report */
    uint32_t state;             /* a bl_session_state of format/pool_format.h */
    uint32_t trust;             /* bl_session_trust */
    uint32_t grant_count;
    uint32_t pin_count;         /* different blocks */
} bl_session_view;

/* Copy the sessions of lanes from first on, at most count, and return their number. The server's
 * thread runs meanwhile, so the figures are not from one instant. */
uint32_t bl_meta_sessions(const bl_meta *meta, uint32_t first, bl_session_view *out,
                          uint32_t count);

/* Calls of tools: uint32_t first -> bl_sessions_reply, views; and bl_block_request, keys ->
 * bl_block_reply, a byte per key (bl_left). */
enum bl_operate_method { BL_METHOD_SESSIONS = 17, BL_METHOD_LEFT = 18 };

/* bl_block_request, keys -> bl_block_reply, a byte per key: the lower tiers that may have the
 * removed block, as bits; state is 1 while a disk has not tried to remove one of them. */
enum bl_removing_method { BL_METHOD_REMOVING = 19 };

/* Why a key has left the index, as far as the server remembers (index/left.c): evicted because a
 * block needed space, or because one needed an entry of the full block table; removed by a client
 * or for its age; lost with memory that failed. */
enum bl_left {
    BL_LEFT_UNKNOWN = 0,
    BL_LEFT_SPACE = 1,
    BL_LEFT_ENTRY = 2,
    BL_LEFT_REMOVED = 3,
    BL_LEFT_RETIRED = 4
};

typedef struct bl_sessions_reply {
    uint32_t count;             /* views that follow */
    uint32_t more;              /* 1: further lanes may have sessions */
    uint32_t draining;
    uint32_t pid;               /* of the server, as itself sees it */
    bl_quota quota;             /* of each session */
} bl_sessions_reply;

/* Attach lower tiers (index/lower.c), before the server serves. Returns 0, -EEXIST, -ENOMEM. With
 * waits, a block is evicted only after it was offered to them; otherwise possibly before. unknown
 * is the set of tiers, as bits, whose keys are not all reported to the server; the others have at
 * most count_max blocks. The token authenticates their service. Until bl_lower_told(), any tier may
 * have any key. */
int bl_lower_attach(bl_meta *meta, uint32_t count_max, int waits, uint8_t unknown,
                    uint64_t token);

/* Identify the lower tiers, after bl_lower_attach() and before the server serves. id[n] identifies
 * tier n permanently: its pending removals belong to the tier with this id, even under another
 * number and another server. 0: there is no such tier. */
void bl_lower_name_tiers(bl_meta *meta, const uint64_t id[8]);

/* Abandon a tier that this server does not have, before it serves: its blocks are never read again,
 * or were deleted. Returns 0, or -ENOSPC: too many were abandoned. */
int bl_lower_give_up(bl_meta *meta, uint64_t id);

/* Note that all keys of the tiers have been reported to the server. Any thread may call this. */
void bl_lower_told(bl_meta *meta);

/* Wait until there is work of one of these kinds (bits 1 << bl_lower_kind), at most timeout_ns.
 * Returns the kinds, as bits. Any thread may call this while the index exists. */
uint32_t bl_lower_wait(bl_meta *meta, uint32_t kinds, uint64_t timeout_ns);

typedef struct bl_lower_stat {
    uint64_t name_count;        /* keys that lower tiers have, or that are requested */
    uint64_t dirty_count;       /* blocks that were not offered yet, including those being
                                 * written */
    uint64_t wanted_count;      /* keys that are requested or being onboarded, and removals that a
                                 * tier has not tried yet */
    uint64_t onboard_count;     /* keys requested in total */
    uint64_t unsaved_count;     /* blocks that left the pool before they were offered */
    uint64_t removal_count;     /* removals that a lower tier has not executed yet */
    uint64_t removal_failed;    /* of these, those that failed */
    uint64_t removal_parked;    /* of these, those of tiers that this server does not have */
    uint64_t removal_max;       /* the limit of removal_count */
    uint64_t tier_count;        /* tiers whose removals are stored, including those of former
                                 * servers */
} bl_lower_stat;

void bl_lower_describe(const bl_meta *meta, bl_lower_stat *out);

/* A change of the block index, for subscribers (index/journal.c). */
enum bl_change_kind { BL_CHANGE_REMOVED = 0, BL_CHANGE_STORED = 1 };

typedef struct bl_change {
    uint64_t generation;        /* of the block; never reused */
    uint32_t block;             /* its line of the block table */
    uint32_t kind;              /* bl_change_kind */
    bl_name name;               /* stored */
} bl_change;

/* Attach a journal with room for this many changes, before the server serves: 0, -EEXIST,
 * -EINVAL, -ENOMEM. */
int bl_journal_attach(bl_meta *meta, uint32_t room);

/* Take the oldest changes of named blocks, at most count, and return their number. lost is how many
 * changes were dropped for lack of room so far; after a loss the reader reads all names again. One
 * thread at a time may call this while the index exists. */
int64_t bl_journal_take(bl_meta *meta, bl_change *changes, uint32_t count, uint64_t *lost);

/* The store and remove events for routers, by the names of the changes (index/events.c). */
typedef struct bl_events bl_events;

typedef struct bl_event {
    bl_name name;               /* rank is unused: the event covers the whole block */
    uint32_t kind;              /* bl_change_kind */
    uint32_t joins;             /* 1: this event can be merged with the one before */
} bl_event;

/* Create the events of a block table with this many lines. Returns 0, -EINVAL, -ENOMEM. */
int bl_events_create(bl_events **out, uint32_t line_count);
void bl_events_destroy(bl_events *events);

/* Apply changes in their order, and return how many events they make. A change that was applied
 * before has no effect. rows has room for two events per change; NULL: only count them. */
uint32_t bl_events_apply(bl_events *events, const bl_change *changes, uint32_t count,
                         bl_event *rows);

/* Return how many blocks have names from at least one rank. */
uint32_t bl_events_count(const bl_events *events);

/* Write store events of all complete blocks, parents before their children. Returns the number of
 * events, or -ENOMEM. There is room for bl_events_count(). */
int64_t bl_events_all(const bl_events *events, bl_event *rows);

/* Read the names of committed blocks from a half of the name table: those of at most count lines
 * from *first on, which moves behind the last line that was read. Return their number, or an error.
 * A line that is being written may be left out. */
int64_t bl_names_read(const bl_pool *pool, uint32_t half, uint32_t *first, uint32_t count,
                      bl_change *names);

/* The client's calls. A key is two words. Errors are negative; a long batch that fails may have
 * been done in part. */

/* Look up the leading keys that are committed. Returns their number, with a record each; state is
 * that of the key after them (bl_block_state). With BL_LOOKUP_PIN they are pinned until
 * released. */
int64_t bl_lookup(bl_session *session, const uint64_t *keys, uint32_t count, uint32_t flags,
                  bl_block_record *records, uint32_t *state, uint64_t timeout_ns);

/* Reserve blocks; each key has a record: HIT (already there), GRANTED, PENDING or REFUSED. */
int bl_reserve(bl_session *session, const uint64_t *keys, uint32_t count,
               const bl_block_request *what, bl_block_record *records, uint64_t timeout_ns);

/* Commit written blocks; each has a status: 0 or -BL_ERROR_NO_GRANT. */
int bl_commit_blocks(bl_session *session, const bl_commit *commits, uint32_t count,
                     int32_t *statuses, uint64_t timeout_ns);

/* These return how many grants were aborted, pins released, or blocks removed. A removal returns
 * when the pool has recorded it; bl_remove_blocks() also waits until the disk tier has tried to
 * execute it, at most a second. */
int64_t bl_abort_blocks(bl_session *session, const bl_commit *commits, uint32_t count,
                        uint64_t timeout_ns);
int64_t bl_release_blocks(bl_session *session, const bl_block_record *records, uint32_t count,
                          uint64_t timeout_ns);
int64_t bl_remove_blocks(bl_session *session, const uint64_t *keys, uint32_t count,
                         uint64_t timeout_ns);

/* Give blocks a hint: the level, and for how long after its last use it holds. Return how many the
 * pool had; refused is how many of them beyond a budget got none. */
int64_t bl_hint_blocks(bl_session *session, const uint64_t *keys, uint32_t count, uint32_t level,
                       uint32_t ttl_ms, uint32_t *refused, uint64_t timeout_ns);
int bl_meta_ask_stat(bl_session *session, bl_meta_stat *out, uint64_t timeout_ns);

/* Request leading keys from lower tiers; kind is BL_LOWER_ONBOARD or _PREFETCH. Returns how many of
 * them the pool has or gets from there: a lookup returns PENDING until they arrive or fail. */
int64_t bl_onboard(bl_session *session, const uint64_t *keys, uint32_t count, uint32_t kind,
                   uint64_t timeout_ns);

/* Return in tiers which lower tiers may have the removed block of each key, as bits. Returns 0 or
 * an error. */
int bl_removing(bl_session *session, const uint64_t *keys, uint32_t count, uint8_t *tiers,
                uint64_t timeout_ns);

/* Return in tiers where each key is (bl_tier_bit). Returns 0 or an error. */
int bl_tiers(bl_session *session, const uint64_t *keys, uint32_t count, uint8_t *tiers,
             uint64_t timeout_ns);

/* The calls of the service: take work (at most count records, returning their number), and report
 * its results. */
int64_t bl_lower_take(bl_session *session, uint64_t token, uint32_t kind, uint32_t tier,
                      bl_lower_record *records, uint32_t count, uint64_t timeout_ns);
int64_t bl_lower_tell(bl_session *session, uint64_t token, const bl_lower_note *notes,
                      uint32_t count, uint64_t timeout_ns);

/* Queues of tasks (index/task_call.c). bl_kv_put with kept set puts a task; it is read like any
 * block, and removing it completes it. */

/* Claim a queue's oldest waiting task for visible_ms. Returns 0, or an error; deliveries is 0 if
 * there is no task. */
int bl_task_claim(bl_session *session, uint64_t queue, uint32_t visible_ms, bl_task *out,
                  uint64_t timeout_ns);

/* Extend a claim to visible_ms from now; with 0 the task waits again. Returns 0, or
 * -BL_ERROR_NO_GRANT: the claim has expired, or another server has taken over. */
int bl_task_extend(bl_session *session, const bl_task *task, uint32_t visible_ms,
                   uint64_t timeout_ns);

/* Remove a task unless a worker has claimed it. Returns 1; 0 if it is claimed or done; or an error.
 * A new server has no claims. */
int64_t bl_task_withdraw(bl_session *session, const uint64_t *key, uint64_t timeout_ns);

int bl_task_count(bl_session *session, uint64_t queue, bl_task_counts *out, uint64_t timeout_ns);

#endif
