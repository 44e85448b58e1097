/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The server's block index: where each block lies, and which sessions write and read it.
 *
 *                     reserve                 commit
 *   (no number) ---------------> GRANTED ---------------> COMMITTED --evict, remove--> (no number)
 *                                  |  |                       |
 *             abort, session gone  |  | session suspect      | removed while pinned
 *   (no number) <------------------+  v                       v
 *                                    HELD --gone-->         DOOMED --last pin released-->
 *
 * A block number is a line of the block table. DRAM has everything that calls need often; the pool
 * has what a successor needs: an entry for every committed block, and a mark for every extent that
 * may have grants (index/table.c). The server's loop fences what the handlers stream before it
 * sends any reply.
 */
#ifndef BL_INDEX_STATE_H
#define BL_INDEX_STATE_H

#include "api/index.h"
#include "format/payload.h"
#include "index/evict.h"
#include "space/extent.h"
#include "space/victims.h"
#include "index/hash.h"
#include "index/pins.h"
#include "rpc/server_state.h"
#include "index/tasks.h"

enum {
    BL_PINS_PER_SESSION = 16384,
    BL_QUARANTINE_PERCENT = 5,  /* of the data stripes, the most for one host's suspect writers */
    BL_NO_NUMBER = 0x7fffffff,
    BL_GENERATION_SHIFT = 40,   /* epoch above, a counter below */
    BL_TENANT_WAYS = 8,         /* slots that a tenant may use */
    BL_REFUSAL_COUNT = 32       /* errors with a counter: bl_error, from BL_ERROR_FORKED on */
};

enum bl_number_state {
    BL_NUMBER_FREE = 0,
    BL_NUMBER_GRANTED,
    BL_NUMBER_COMMITTED,
    BL_NUMBER_HELD,
    BL_NUMBER_DOOMED,
    BL_NUMBER_REMOVED,          /* a tombstone, no block (index/tombstones.c) */
    BL_NUMBER_TIER              /* a lower tier of this pool, no block (index/tombstones.c) */
};

/* A block is in the list of the stripe that it begins in; while it is granted or held, in its
 * lane's list; and until it was offered to a lower tier, in a list of index/lower.c. */
enum bl_list { BL_LIST_STRIPE = 0, BL_LIST_LANE = 1, BL_LIST_LOWER = 2, BL_LIST_COUNT = 3 };

/* Whether a block waits to be offered to a lower tier. */
enum bl_offload { BL_OFFLOAD_NONE = 0, BL_OFFLOAD_WAITING = 1, BL_OFFLOAD_TAKEN = 2 };

/* Whether a granted block comes from a lower tier. */
enum bl_onboard_state { BL_ONBOARD_NONE = 0, BL_ONBOARD_WANTED = 1, BL_ONBOARD_REMOVED = 2 };

typedef struct bl_lower bl_lower;
typedef struct bl_tombstones bl_tombstones;
typedef struct bl_journal bl_journal;
typedef struct bl_hints bl_hints;

typedef struct bl_link {
    uint32_t next, previous;    /* block numbers or BL_NO_NUMBER */
} bl_link;

typedef struct bl_block {
    uint64_t generation;
    uint64_t offset;
    uint32_t length;
    uint32_t pin_count;
    uint32_t task;              /* 1 + its slot among the tasks; 0: it may be evicted */
    uint16_t tenant;            /* of a committed block: index in bl_index.tenants */
    uint8_t state : 4;          /* bl_number_state */
    uint8_t offload : 2;        /* bl_offload */
    uint8_t again : 1;          /* offered again since the last hit */
    uint8_t order;              /* in bl_index.orders; in that order while it may be evicted */
    uint64_t key[2];            /* lookups read none of the fields from here on */
    uint64_t fingerprint;
    uint32_t chunk_size;
    uint32_t lane;              /* the lane that has the grant */
    uint32_t named;             /* its line of the name table has its name */
    uint16_t onboard_state;     /* bl_onboard_state */
    bl_link links[BL_LIST_COUNT]; /* bl_list */
} bl_block;

_Static_assert(offsetof(bl_block, key) == BL_LINE_SIZE / 2 &&
                   sizeof(bl_block) % (BL_LINE_SIZE / 2) == 0,
               "half a line, which never straddles two: a hit costs one cache miss here");

/* There is one order for each level of each share; those of level NORMAL come first. */
enum { BL_ORDER_COUNT = BL_LEVEL_COUNT * BL_SHARE_COUNT };
_Static_assert(BL_ORDER_COUNT <= 1 << 8, "a block stores the number of its order in a byte");

/* What a session holds, besides its pins: it counts against the session's quota. */
typedef struct bl_hold {
    uint64_t bytes;             /* payload of its grants and of the blocks it has pinned */
    uint64_t held_bytes;        /* payload of the grants that it may still write while suspect */
    uint32_t grant_count;
} bl_hold;

/* Return a part of a whole, in millionths. */
static inline uint64_t bl_part_of(uint64_t whole, uint32_t part)
{
    return whole / BL_SHARE_WHOLE * part + whole % BL_SHARE_WHOLE * part / BL_SHARE_WHOLE;
}

/* The part of the pool that a tenant may fill while other tenants need theirs (index/shares.c). */
typedef struct bl_share {
    uint64_t bytes;             /* of the data stripes */
    uint64_t count;             /* of the block table's lines */
    uint64_t used_bytes;        /* space of its blocks, granted, held and doomed ones included */
    uint64_t used_count;
    uint64_t evict_count;
} bl_share;

/* The state of the current search for room (index/order.c). */
typedef struct bl_eviction {
    uint8_t shares[BL_SHARE_COUNT]; /* in the order in which their blocks are evicted */
    uint8_t place[BL_SHARE_COUNT];  /* index of each share in that order */
    uint32_t count;             /* shares whose blocks may be evicted */
    uint32_t pinned;            /* 1: also blocks that a hint pins */
    uint32_t requester;         /* the share that needs space */
} bl_eviction;

/* A key that has left the index. */
typedef struct bl_removal_record {
    uint64_t first;             /* first word of the key */
    uint32_t second;            /* low bits of the second word */
    uint32_t why;               /* bl_removal_reason */
} bl_removal_record;

struct bl_index {
    bl_server *server;
    const bl_pool *pool;
    bl_block *blocks;
    bl_hash *hash;
    bl_evict *orders[BL_ORDER_COUNT]; /* of the blocks that may be evicted */
    bl_eviction turn;
    uint32_t eviction;          /* bl_evict_policy */
    bl_pages *pages;
    bl_extents *extents;
    bl_victims *victims;
    bl_pins **pins;             /* per lane */
    bl_hold *holds;             /* per lane */
    uint32_t *lane_blocks;      /* per lane: the first of its granted and held blocks */
    bl_tasks *tasks;
    bl_lower *lower;            /* NULL: the pool has no lower tiers */
    bl_tombstones *tombstones;
    bl_journal *journal;        /* NULL: there is no subscriber */
    uint32_t lower_waits;       /* a block is evicted only after it was offered to them */
    uint32_t *retained;         /* per stripe: retained blocks that reach into it */
    uint64_t retained_bytes;    /* space of retained blocks */
    uint32_t *stripe_blocks;    /* per stripe: first of the blocks that begin in it */
    uint32_t free_number;       /* first of the freed numbers */
    uint32_t rest_first, rest_last; /* list of numbers whose lines are traces */
    uint32_t rest_count;
    uint32_t fresh_number;      /* numbers from here on were never used */
    uint64_t entry_limit;       /* the next milestone (index/table.c) of the entries, */
    uint64_t mark_limit;        /* and of the marks */
    uint64_t generation;        /* counter of this epoch */
    uint32_t reused;            /* space of committed blocks was freed since the epoch was read */
    uint64_t held_bytes[BL_HOST_COUNT]; /* by suspect sessions of this epoch */
    bl_index_stat stat;
    uint64_t refusals[BL_REFUSAL_COUNT];
    bl_removal_record *removal_log;         /* removed keys, by hash */
    uint64_t removal_mask;
    bl_tenant tenants[BL_TENANT_COUNT];
    bl_hints *hints;            /* NULL: there was no hint yet */
    uint32_t hint_part;         /* the part of each share that hints may favor */
    uint32_t tenant;            /* index of the last tenant that was looked up */
    struct {
        const uint8_t *records; /* of the blocks that the last lookup found, in its reply */
        uint32_t count;
    } hits;                     /* not recorded yet: see bl_lookup_deferred() */
    bl_share shares[BL_SHARE_COUNT]; /* the first is for all tenants without a share of their own */
    uint32_t share_count;
    uint32_t rule_count;
    bl_share_rule rules[BL_SHARE_RULES];
};

/* Return 1 if length more bytes would exceed the quota of the session. */
static inline int bl_hold_full(const bl_index *index, uint32_t lane, uint32_t length)
{
    uint64_t most = index->server->quota.bytes;
    return most && index->holds[lane].bytes + length > most;
}

/* Return a number that no block or extent of this pool ever had. */
static inline uint64_t bl_generation_new(bl_index *index)
{
    return index->server->epoch << BL_GENERATION_SHIFT | ++index->generation;
}

/* Return 1 unless the block must be offered to a lower tier before it is evicted. */
static inline int bl_lower_frees(const bl_index *index, const bl_block *block)
{
    return !index->lower_waits || block->offload == BL_OFFLOAD_NONE;
}

/* Pass a new block to the eviction policy. */
static inline void bl_block_assign(bl_index *index, uint32_t number)
{
    const bl_block *block = &index->blocks[number];
    bl_evict_assign(index->orders[block->order], number, block->key[0] ^ block->key[1]);
}

static inline uint32_t bl_block_share(const bl_block *block)
{
    return block->order % BL_SHARE_COUNT;
}

/* Return the level of the block's hint (bl_level). */
static inline uint32_t bl_block_level(const bl_block *block)
{
    return block->order / BL_SHARE_COUNT;
}

static inline uint32_t bl_order_number(uint32_t share, uint32_t level)
{
    return level * BL_SHARE_COUNT + share;
}

/* Return the eviction order that a block is in while it may be evicted. */
static inline bl_evict *bl_order_of(const bl_index *index, uint32_t number)
{
    return index->orders[index->blocks[number].order];
}

/* Count a hit: the block becomes the newest that may be evicted. */
static inline void bl_block_touch(bl_index *index, uint32_t number)
{
    if (index->blocks[number].task == 0 && bl_lower_frees(index, &index->blocks[number]))
        bl_evict_touch(bl_order_of(index, number), number);
}

/* Prefetch both cache lines of a block. */
static inline void bl_block_prefetch(const bl_index *index, uint32_t number)
{
    const bl_block *block = &index->blocks[number];
    bl_prefetch(block);
    bl_prefetch((const uint8_t *)(block + 1) - 1);
}

/* Return the block's size in the pool, in bytes. */
static inline uint32_t bl_space_size(const bl_block *block)
{
    return bl_block_size(bl_stored_size(block->length, block->chunk_size));
}

/* Return the data stripe of an offset. */
static inline uint64_t bl_stripe_of(const bl_index *index, uint64_t offset)
{
    return (offset - index->pool->geometry.data_offset) / BL_STRIPE_SIZE;
}

/* Decode a mark. It is foreign input: only bl_extents_adopt() may use the result. */
static inline bl_extent_view bl_extent_of(const bl_extent_line *line)
{
    return (bl_extent_view){
        .generation = line->generation,
        .first_stripe = line->first_stripe,
        .stripe_count = line->stripe_count,
        .retired = line->state == BL_EXTENT_RETIRED,
    };
}

/* Return the block count of a mark. Servers of earlier releases cut extents into blocks of one
 * size, 512 at most, and accept a mark only if its count is what they would have computed. */
static inline uint32_t bl_mark_blocks(uint32_t block_size, uint32_t stripe_count)
{
    uint64_t blocks = block_size ? (uint64_t)stripe_count * BL_STRIPE_SIZE / block_size : 0;
    return (uint32_t)(blocks < BL_STRIPE_PAGES ? blocks : BL_STRIPE_PAGES);
}

/* Add to, or remove from, the list with this head; numbers are linked through
 * bl_block.links[kind]. */
static inline void bl_list_add(bl_index *index, uint32_t *head, enum bl_list kind, uint32_t number)
{
    index->blocks[number].links[kind] = (bl_link){*head, BL_NO_NUMBER};
    if (*head != BL_NO_NUMBER)
        index->blocks[*head].links[kind].previous = number;
    *head = number;
}

static inline void bl_list_remove(bl_index *index, uint32_t *head, enum bl_list kind,
                                  uint32_t number)
{
    bl_link link = index->blocks[number].links[kind];
    if (link.next != BL_NO_NUMBER)
        index->blocks[link.next].links[kind].previous = link.previous;
    if (link.previous != BL_NO_NUMBER)
        index->blocks[link.previous].links[kind].next = link.next;
    else
        *head = link.next;
}

#endif
