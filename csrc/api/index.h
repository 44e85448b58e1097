/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The block index: the server's side, and the calls of its clients (beluga/index).
 */
#ifndef BL_API_INDEX_H
#define BL_API_INDEX_H

#include "api/rpc.h"

typedef struct bl_index bl_index;

/* Create the block index of a server that does not serve yet. eviction is a bl_evict_policy. */
int bl_index_create(bl_server *server, uint32_t eviction, bl_index **out);
void bl_index_destroy(bl_index *index);

/* Become the pool's server, with all committed blocks of the predecessor in the index. */
int bl_index_serve(bl_index *index);
void bl_index_describe(const bl_index *index, bl_index_stat *out);

/* The first tenant is the sum of the tenants that found no slot in the table; its length is 0. */
enum bl_tenant_limit { BL_TENANT_COUNT = 513 };

/* Copy the tenants, at most count, and return their number. The server's thread runs meanwhile, so
 * the figures are not from one instant. */
uint32_t bl_index_tenants(const bl_index *index, bl_tenant *out, uint32_t count);

/* Parts of the pool for tenants. A rule assigns the namespaces whose fingerprints, under its mask,
 * equal its value to a share; namespaces without a rule belong to the first share. */
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

/* Assign these parts to the shares 1 to count, and the rest to share 0. Call it before the server
 * serves. Returns 0, -EEXIST, -EINVAL or -ENOMEM. A block is evicted for a block of another tenant
 * only if its own tenant exceeds its part, or if no tenant does. */
int bl_index_share(bl_index *index, const uint32_t *parts, uint32_t count,
                  const bl_share_rule *rules, uint32_t rule_count);

/* Copy the shares, at most count, and return their number: 1 if there are no rules. The server's
 * thread runs meanwhile, so the figures are not from one instant. */
uint32_t bl_index_shares(const bl_index *index, bl_share_view *out, uint32_t count);

/* The eviction priority that a hint gives a block (index/hints.h). Within its share, LOW blocks are
 * evicted before the others and HIGH blocks after them; PINNED blocks only if nothing else makes
 * room. */
enum bl_level {
    BL_LEVEL_NORMAL = 0,
    BL_LEVEL_LOW = 1,
    BL_LEVEL_HIGH = 2,
    BL_LEVEL_PINNED = 3,
    BL_LEVEL_COUNT = 4
};
enum bl_hint_limit { BL_HINT_PART = 250000 }; /* of each share: the default budget of HIGH and
                                               * PINNED */

/* bl_block_request (flags: bl_level; length: lifetime in milliseconds after the last use, 0 for no
 * limit), keys -> bl_block_reply (count: hints given; state: hints refused). */
enum bl_hint_method { BL_METHOD_HINT = 21 };

void bl_index_hints(const bl_index *index, bl_hint_stat *out);

/* Set the budget of HIGH and PINNED blocks, as a part of each share, before the server serves.
 * Returns 0 or -EINVAL. */
int bl_index_hint_part(bl_index *index, uint32_t part);

/* A cell of the map of a device: a range of its stripes, without the superblock's. */
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

/* Fill in the map: cell_count cells of each device, device after device. A device with fewer
 * stripes has a cell for each of them, and its other cells are zero. Any thread may call this; the
 * server's thread runs meanwhile, so the cells are not from one instant. */
void bl_index_map(const bl_index *index, uint32_t cell_count, bl_map_cell *out);

/* Return how many grants were refused with this (positive) bl_error. */
uint64_t bl_index_refused(const bl_index *index, uint32_t error);

/* A session, for display. */
enum bl_session_trust {
    BL_SESSION_WATCHED = 0,     /* its process is on the server's host, where its death is
                                 * provable */
    BL_SESSION_HEARTBEAT = 1,   /* on another host: only its heartbeat is visible */
    BL_SESSION_BROKEN = 2       /* the memory of its lane has failed */
};

typedef struct bl_session_view {
    uint64_t nonce;
    uint64_t epoch;             /* whose server attached it */
    uint64_t since_ns;          /* time in its current state */
    uint64_t heartbeat_ns;      /* time since the last heartbeat */
    uint64_t call_count;        /* calls answered by this server */
    uint64_t bytes;             /* payload of its grants and of the blocks it has pinned */
    uint64_t held_bytes;        /* quarantined: it may still write them */
    uint32_t lane;
    uint32_t host;
    uint32_t pid;               /* in the server's pid namespace; 0: unknown */
    uint32_t kind;              /* kind of client in its last report; 0: other, or no report */
    uint32_t state;             /* a bl_session_state of format/pool_format.h */
    uint32_t trust;             /* bl_session_trust */
    uint32_t grant_count;
    uint32_t pin_count;         /* different blocks */
} bl_session_view;

/* Copy the sessions of lanes from first on, at most count, and return their number. The server's
 * thread runs meanwhile, so the figures are not from one instant. */
uint32_t bl_index_sessions(const bl_index *index, uint32_t first, bl_session_view *out,
                          uint32_t count);

/* Calls for tools. SESSIONS: uint32_t first -> bl_sessions_reply, views. REMOVAL_REASONS:
 * bl_block_request, keys -> bl_block_reply, a byte per key (bl_removal_reason). */
enum bl_operate_method { BL_METHOD_SESSIONS = 17, BL_METHOD_REMOVAL_REASONS = 18 };

/* bl_block_request, keys -> bl_block_reply, a byte per key: the lower tiers that may have the
 * removed block, as bits; state is 1 while a disk has not tried to remove one of them. */
enum bl_removing_method { BL_METHOD_REMOVING = 19 };

/* Why a key was removed from the index, as far as the server has records (index/removal_log.c):
 * SPACE: evicted for space; ENTRY: evicted for an entry of the full block table; CLIENT: removed by
 * a client, or for its age; RETIRED: lost with failed memory. */
enum bl_removal_reason {
    BL_REMOVED_UNKNOWN = 0,
    BL_REMOVED_SPACE = 1,
    BL_REMOVED_ENTRY = 2,
    BL_REMOVED_CLIENT = 3,
    BL_REMOVED_RETIRED = 4
};

typedef struct bl_sessions_reply {
    uint32_t count;             /* views that follow */
    uint32_t more;              /* 1: further lanes may have sessions */
    uint32_t draining;
    uint32_t pid;               /* pid of the server in its own namespace */
    bl_quota quota;             /* of each session */
} bl_sessions_reply;

/* Attach lower tiers (index/lower.c), before the server serves. Returns 0, -EEXIST or -ENOMEM. With
 * waits, a block is evicted only after it was offered to them; otherwise possibly before. unknown:
 * the tiers, as bits, that do not report all their keys; the others have at most count_max blocks.
 * The token authenticates their service. Until bl_lower_reported(), any tier may have any key. */
int bl_lower_attach(bl_index *index, uint32_t count_max, int waits, uint8_t unknown,
                    uint64_t token);

/* Identify the lower tiers, after bl_lower_attach() and before the server serves. id[n] identifies
 * tier n permanently: pending removals belong to the id, even if a later server gives the tier
 * another number. 0: there is no tier n. */
void bl_lower_name_tiers(bl_index *index, const uint64_t id[8]);

/* Abandon a tier that this server does not have, before it serves. An operator does this for a tier
 * whose blocks were deleted or will never be read again. Returns 0, or -ENOSPC: too many tiers were
 * abandoned. */
int bl_lower_give_up(bl_index *index, uint64_t id);

/* Declare that the tiers have reported all their keys. Any thread may call this. */
void bl_lower_reported(bl_index *index);

/* Wait until there is work of one of these kinds (bits 1 << bl_lower_kind), at most timeout_ns.
 * Returns the kinds, as bits. Any thread may call this while the index exists. */
uint32_t bl_lower_wait(bl_index *index, uint32_t kinds, uint64_t timeout_ns);

void bl_lower_describe(const bl_index *index, bl_lower_stat *out);

/* A change of the block index (index/journal.c). */
enum bl_change_kind { BL_CHANGE_REMOVED = 0, BL_CHANGE_STORED = 1 };

typedef struct bl_change {
    uint64_t generation;        /* of the block; never reused */
    uint32_t block;             /* its line of the block table */
    uint32_t kind;              /* bl_change_kind */
    bl_name name;               /* stored */
} bl_change;

/* Attach a journal with room for this many changes, before the server serves. Returns 0, -EEXIST,
 * -EINVAL or -ENOMEM. */
int bl_journal_attach(bl_index *index, uint32_t room);

/* Take the oldest changes of named blocks, at most count, and return their number. *lost is the
 * number of changes dropped so far because the journal was full; after a loss the reader must read
 * all names again. One thread at a time may call this while the index exists. */
int64_t bl_journal_take(bl_index *index, bl_change *changes, uint32_t count, uint64_t *lost);

/* Store and remove events for routers, made from changes (index/events.c). */
typedef struct bl_events bl_events;

typedef struct bl_event {
    bl_name name;               /* rank is unused: the event covers the whole block */
    uint32_t kind;              /* bl_change_kind */
    uint32_t joins;             /* 1: this event can be merged with the previous one */
} bl_event;

/* Create the events of a block table with this many lines. Returns 0, -EINVAL, -ENOMEM. */
int bl_events_create(bl_events **out, uint32_t line_count);
void bl_events_destroy(bl_events *events);

/* Apply changes in order, and return the number of events. A change that was applied before has no
 * effect. rows has room for two events per change; NULL: only count the events. */
uint32_t bl_events_apply(bl_events *events, const bl_change *changes, uint32_t count,
                         bl_event *rows);

/* Return how many blocks have names from at least one rank. */
uint32_t bl_events_count(const bl_events *events);

/* Write store events for all complete blocks, parents before their children. rows has room for
 * bl_events_count(). Returns the number of events, or -ENOMEM. */
int64_t bl_events_all(const bl_events *events, bl_event *rows);

/* Read the names of committed blocks from a half of the name table: those of at most count lines
 * from *first on. *first is set to the line after the last one read. Returns the number of names,
 * or an error. A line that is being written may be skipped. */
int64_t bl_names_read(const bl_pool *pool, uint32_t half, uint32_t *first, uint32_t count,
                      bl_change *names);

/* The client's calls. A key is two words. Errors are negative; a long batch that fails may have
 * been executed in part. */

/* Look up the leading keys that are committed. Returns their number, with a record each; *state is
 * the bl_block_state of the first key that is not a hit. With BL_LOOKUP_PIN the hits are pinned
 * until released; with BL_LOOKUP_PEEK the call counts in no figure, and not as a use of the
 * blocks. */
int64_t bl_lookup(bl_session *session, const uint64_t *keys, uint32_t count, uint32_t flags,
                  bl_block_record *records, uint32_t *state, uint64_t timeout_ns);

/* Reserve blocks. Each key gets a record: HIT (it is stored already), GRANTED, PENDING or
 * REFUSED. */
int bl_reserve(bl_session *session, const uint64_t *keys, uint32_t count,
               const bl_block_request *what, bl_block_record *records, uint64_t timeout_ns);

/* Commit written blocks. Each gets a status: 0 or -BL_ERROR_NO_GRANT. */
int bl_commit_blocks(bl_session *session, const bl_commit *commits, uint32_t count,
                     int32_t *statuses, uint64_t timeout_ns);

/* These return the number of aborted grants, released pins, or removed blocks. A removal is durable
 * in the pool when the call returns; bl_remove_blocks() also waits, at most a second, until the
 * disk tier has tried to execute it. */
int64_t bl_abort_blocks(bl_session *session, const bl_commit *commits, uint32_t count,
                        uint64_t timeout_ns);
int64_t bl_release_blocks(bl_session *session, const bl_block_record *records, uint32_t count,
                          uint64_t timeout_ns);
int64_t bl_remove_blocks(bl_session *session, const uint64_t *keys, uint32_t count,
                         uint64_t timeout_ns);

/* Give blocks a hint: a level, and its lifetime after the block's last use. Returns how many of the
 * blocks are in the pool; *refused is how many of them got no hint because of a budget. */
int64_t bl_hint_blocks(bl_session *session, const uint64_t *keys, uint32_t count, uint32_t level,
                       uint32_t ttl_ms, uint32_t *refused, uint64_t timeout_ns);
int bl_index_get_stat(bl_session *session, bl_index_stat *out, uint64_t timeout_ns);

/* Request leading keys from lower tiers; kind is BL_LOWER_ONBOARD or _PREFETCH. Returns how many of
 * them the pool has or requests: a lookup returns PENDING until they arrive or fail. */
int64_t bl_onboard(bl_session *session, const uint64_t *keys, uint32_t count, uint32_t kind,
                   uint64_t timeout_ns);

/* Set tiers[i] to the lower tiers that may have the removed block of key i, as bits. Returns 0 or
 * an error. */
int bl_removing(bl_session *session, const uint64_t *keys, uint32_t count, uint8_t *tiers,
                uint64_t timeout_ns);

/* Set tiers[i] to the tiers that have key i (bl_tier_bit). Returns 0 or an error. */
int bl_tiers(bl_session *session, const uint64_t *keys, uint32_t count, uint8_t *tiers,
             uint64_t timeout_ns);

/* The calls of the tiers' service: take work (at most count records; returns their number), and
 * report results. */
int64_t bl_lower_take(bl_session *session, uint64_t token, uint32_t kind, uint32_t tier,
                      bl_lower_record *records, uint32_t count, uint64_t timeout_ns);
int64_t bl_lower_report(bl_session *session, uint64_t token, const bl_lower_note *notes,
                      uint32_t count, uint64_t timeout_ns);

/* Task queues (index/task_call.c). bl_kv_put with BL_RESERVE_KEPT enqueues a task; it is read like
 * any block, and removing it completes it. */

/* Claim a queue's oldest waiting task for visible_ms. Returns 0 or an error; out->deliveries is 0
 * if there is no task. */
int bl_task_claim(bl_session *session, uint64_t queue, uint32_t visible_ms, bl_task *out,
                  uint64_t timeout_ns);

/* Extend a claim to visible_ms from now; 0 returns the task to the queue. Returns 0, or
 * -BL_ERROR_NO_GRANT: the claim has expired, or another server has taken over. */
int bl_task_extend(bl_session *session, const bl_task *task, uint32_t visible_ms,
                   uint64_t timeout_ns);

/* Remove a task unless a worker has claimed it. Returns 1; 0 if it is claimed or done; or an error.
 * After a takeover no task is claimed. */
int64_t bl_task_withdraw(bl_session *session, const uint64_t *key, uint64_t timeout_ns);

int bl_task_count(bl_session *session, uint64_t queue, bl_task_counts *out, uint64_t timeout_ns);

#endif
