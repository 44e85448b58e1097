/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The server's side of the lower tiers: which keys they have, which committed blocks they were not
 * offered yet, and which keys are wanted back. All of it is DRAM, written by the server's thread
 * alone. The service (beluga/tiers/service.py) runs in the server's process, outside of the poll
 * loop: it takes work, moves the blocks as any client does, and tells what became of them.
 *
 *   committed --> WAITING --take--> TAKEN --tell--> NONE         a block of the pool: offload
 *   absent --onboard--> wanted --take--> taken --tell--> absent  a key: onboard, prefetch
 *
 * Removals are the work of tombs.c. A tier that has not executed one is left out for that key,
 * except by saves, which replace what it has. A key that was removed while the service had taken
 * it is recalled: what the service brings is refused, and nobody asks again before it has told.
 *
 * Offload is best effort: a block may leave the pool before it was offered. If puts wait for it, it
 * may not: it enters the eviction order only when it was offered. A block that the tiers evict
 * while the pool has it is offered again, once after each hit. A lookup of a wanted key says
 * PENDING, and the block itself comes by a put of the service, like any other.
 *
 * The keys of one call are a chain, in their order. The service takes a few keys of each chain in
 * turn, so that no chain waits for all of another one. Keys that a disk has are work of their own,
 * done before and beside those for which a remote store must be asked. A chain ends at its first
 * miss: nobody reads the keys behind it. Of a chain that only a remote store may have, few keys are
 * asked for until some have come.
 *
 * A tier that knows its blocks, a disk, has a bounded number of them, and there is a name for each.
 * A remote store is not bounded. Names of what only such a tier has are remembered as long as there
 * is room; it is asked for keys without a name, too.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "base/host_atomic.h"
#include "base/lazy.h"
#include "base/minmax.h"
#include "index/call.h"
#include "index/tombs.h"
#include "index/work_list.h"

enum {
    BL_NO_NAME = 0x7fffffff,
    BL_WANTED_MAX = 65536,      /* keys that are wanted at a time (D12) */
    BL_ABSENT_MAX = 16384,      /* keys that were asked for in vain and are remembered */
    BL_CHAINS_MAX = 4096,       /* calls whose keys are wanted */
    BL_CHAIN_KEYS_MAX = 16384,  /* keys of one call */
    BL_CHAIN_TURN = 8,          /* keys of a chain that are taken before those of the next one */
    BL_CHAIN_FIRST = 16,        /* cold keys of a chain that are taken before the first has come */
    BL_CHAIN_TAKEN_MAX = 256,   /* keys of a chain that are taken at a time */
    BL_LOWER_TAKEN,             /* the list of names that the service works on */
    BL_LOWER_ABSENT,            /* those that no tier had, or could load, a moment ago */
    BL_LOWER_REMOTE,            /* those that only unknown tiers have, the oldest first */
    BL_LOWER_LISTS
};

#define BL_CHAIN_NS 60000000000ull  /* for how long the keys of a call are wanted */
#define BL_ABSENT_NS 1000000000ull  /* for how long they are: others may write to a remote store */

/* A key that a lower tier has, or that is wanted. */
typedef struct bl_lower_name {
    uint64_t key[2];
    bl_link link;               /* in its chain, or the list of those taken; free names by next */
    uint32_t chain;             /* while it is wanted */
    uint8_t tiers;              /* that have it, as bits */
    uint8_t wanted;             /* bl_lower_kind; BL_LOWER_OFFLOAD: it is not wanted */
    uint8_t taken;
    uint8_t remote;             /* it is in the list BL_LOWER_REMOTE */
    uint8_t recalled;           /* it was removed after it was taken */
    uint64_t absent_ns;         /* when no tier had it, or could load it; 0: it was not so */
} bl_lower_name;

/* Where the chains wait whose next key is warm (a disk has it) or cold. */
enum bl_chain_ring {
    BL_RING_ONBOARD,
    BL_RING_PREFETCH,
    BL_RING_COLD_ONBOARD,
    BL_RING_COLD_PREFETCH,
    BL_RING_NONE                /* too many of its keys are taken, or all */
};

/* The keys of one call. */
typedef struct bl_chain {
    bl_work_list names;         /* those that are not taken */
    bl_link link;               /* in its ring; free chains by next */
    uint32_t count;             /* wanted, those taken included */
    uint32_t taken;
    uint32_t window;            /* cold keys that may be taken at a time */
    uint32_t lane;              /* whose call it is */
    uint32_t kind;              /* BL_LOWER_ONBOARD or _PREFETCH */
    uint32_t ring;
    uint64_t asked_ns;
} bl_chain;

enum { BL_CHAIN_NONE = BL_NO_NUMBER, BL_CHAIN_CUT = BL_NO_NUMBER - 1 };

struct bl_lower {
    bl_index *index;            /* key -> name */
    bl_lower_name *names;
    uint32_t name_max;
    uint32_t free_name;
    uint32_t fresh_name;        /* names from here on were never used */
    uint32_t count_max;         /* blocks that the known tiers have at most */
    uint8_t tiers;              /* that there are, as bits */
    uint8_t unknown;            /* tiers that may have keys without a name, as bits */
    uint64_t told;              /* 1: the others have none; written by the service */
    uint32_t lane;              /* the service's */
    uint64_t token;
    bl_work_list waiting;      /* blocks that were not offered */
    bl_work_list taken;        /* blocks that are being offered */
    bl_work_list lists[BL_LOWER_LISTS];    /* names */
    bl_chain chains[BL_CHAINS_MAX];
    bl_work_list rings[BL_RING_NONE];      /* chains */
    bl_work_list free_chains;
    uint32_t *lane_chain;       /* per lane: the chain of its last call, BL_CHAIN_NONE or _CUT */
    uint32_t absent_count;
    bl_lower_stat stat;
    uint64_t work[BL_LOWER_KINDS];  /* 1: there is some; written by the server's thread */
    pthread_mutex_t lock;       /* of those who wait for work */
    pthread_cond_t worked;
};

static bl_link *bl_lower_name_link(bl_meta *meta, uint32_t number)
{
    return &meta->lower->names[number].link;
}

static bl_link *bl_lower_chain_link(bl_meta *meta, uint32_t number)
{
    return &meta->lower->chains[number].link;
}

/* ---- Waking the service. */

/* Note whether there is work of a kind, and wake those who wait for it. */
static void bl_lower_rouse(bl_lower *lower, uint32_t kind, int work)
{
    if (bl_host_load(&lower->work[kind]) == (uint64_t)work)
        return;
    pthread_mutex_lock(&lower->lock);
    bl_host_store(&lower->work[kind], (uint64_t)work);
    if (work)
        pthread_cond_broadcast(&lower->worked);
    pthread_mutex_unlock(&lower->lock);
}

static uint32_t bl_lower_work(const bl_lower *lower, uint32_t kinds)
{
    uint32_t found = 0;
    for (uint32_t kind = 0; kind < BL_LOWER_KINDS; kind++)
        if (kinds >> kind & 1 && bl_host_load(&lower->work[kind]))
            found |= 1u << kind;
    return found;
}

uint32_t bl_lower_wait(bl_meta *meta, uint32_t kinds, uint64_t timeout_ns)
{
    bl_lower *lower = meta->lower;
    struct timespec until;
    uint32_t found;
    if (lower == NULL)
        return 0;
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t nanoseconds = (uint64_t)until.tv_nsec + timeout_ns % 1000000000;
    until.tv_sec += (time_t)(timeout_ns / 1000000000 + nanoseconds / 1000000000);
    until.tv_nsec = (long)(nanoseconds % 1000000000);
    pthread_mutex_lock(&lower->lock);
    while ((found = bl_lower_work(lower, kinds)) == 0)
        if (pthread_cond_timedwait(&lower->worked, &lower->lock, &until) != 0)
            break;
    pthread_mutex_unlock(&lower->lock);
    return found;
}

/* ---- Names. */

/* Take a name from the list of those that only unknown tiers have. */
static void bl_lower_stir(bl_meta *meta, bl_lower_name *name)
{
    bl_lower *lower = meta->lower;
    if (!name->remote)
        return;
    bl_work_unlink(meta, &lower->lists[BL_LOWER_REMOTE], bl_lower_name_link,
                    (uint32_t)(name - lower->names));
    name->remote = 0;
}

/* Forget a name. */
static void bl_lower_name_end(bl_meta *meta, bl_lower_name *name)
{
    bl_lower *lower = meta->lower;
    bl_lower_stir(meta, name);
    bl_index_remove(lower->index, name->key);
    name->link.next = lower->free_name;
    lower->free_name = (uint32_t)(name - lower->names);
    lower->stat.name_count--;
}

/* Add a name, without tiers and not wanted: return it, or NULL if there is no room. */
static bl_lower_name *bl_lower_name_new(bl_meta *meta, const uint64_t key[2])
{
    bl_lower *lower = meta->lower;
    uint32_t oldest = lower->lists[BL_LOWER_REMOTE].first;
    if (lower->free_name == BL_NO_NAME && lower->fresh_name == lower->name_max &&
        oldest != BL_NO_NUMBER)
        bl_lower_name_end(meta, &lower->names[oldest]);
    uint32_t number = lower->free_name;
    if (number == BL_NO_NAME && lower->fresh_name == lower->name_max)
        return NULL;
    if (number == BL_NO_NAME)
        number = lower->fresh_name;
    if (bl_index_add(lower->index, key, number) < 0)
        return NULL;
    if (number == lower->fresh_name)
        lower->fresh_name++;
    else
        lower->free_name = lower->names[number].link.next;
    lower->names[number] = (bl_lower_name){.key = {key[0], key[1]}};
    lower->stat.name_count++;
    return &lower->names[number];
}

static bl_lower_name *bl_lower_name_of(const bl_lower *lower, const uint64_t key[2])
{
    int64_t number = bl_index_find(lower->index, key);
    return number < 0 ? NULL : &lower->names[number];
}

/* Let a name be what its tiers make of it, unless it is wanted, or missed a moment ago: forget one
 * that no tier has, and keep one that only unknown tiers have as long as there is room. */
static void bl_lower_rest(bl_meta *meta, bl_lower_name *name)
{
    bl_lower *lower = meta->lower;
    if (name->wanted != BL_LOWER_OFFLOAD || name->absent_ns != 0)
        return;
    if (name->tiers == 0) {
        bl_lower_name_end(meta, name);
    } else if ((name->tiers & ~lower->unknown) == 0 && !name->remote) {
        name->remote = 1;
        bl_work_append(meta, &lower->lists[BL_LOWER_REMOTE], bl_lower_name_link,
                        (uint32_t)(name - lower->names));
    }
}

/* ---- Chains. */

/* Is there a disk, or another tier that knows its keys, that has a key, or may have it? */
static int bl_lower_warm(const bl_meta *meta, const bl_lower_name *name)
{
    const bl_lower *lower = meta->lower;
    uint8_t tiers = bl_host_load(&lower->told) ? name->tiers : lower->tiers;
    return (tiers & ~lower->unknown & ~bl_tombs_of(meta, name->key)) != 0;
}

/* Note in which rings there is work. */
static void bl_chains_rouse(bl_lower *lower)
{
    int there[BL_RING_NONE];
    for (uint32_t ring = 0; ring < BL_RING_NONE; ring++)
        there[ring] = lower->rings[ring].first != BL_NO_NUMBER;
    bl_lower_rouse(lower, BL_LOWER_ONBOARD, there[BL_RING_ONBOARD]);
    bl_lower_rouse(lower, BL_LOWER_PREFETCH, there[BL_RING_PREFETCH]);
    bl_lower_rouse(lower, BL_LOWER_COLD,
                   there[BL_RING_COLD_ONBOARD] || there[BL_RING_COLD_PREFETCH]);
}

/* Put a chain at the end of the ring that it belongs to, or take it out of all. */
static void bl_chain_place(bl_meta *meta, uint32_t number)
{
    bl_lower *lower = meta->lower;
    bl_chain *chain = &lower->chains[number];
    uint32_t ring = BL_RING_NONE;
    if (chain->ring != BL_RING_NONE)
        bl_work_unlink(meta, &lower->rings[chain->ring], bl_lower_chain_link, number);
    if (chain->names.first != BL_NO_NUMBER) {
        int warm = bl_lower_warm(meta, &lower->names[chain->names.first]);
        uint32_t kind = chain->kind == BL_LOWER_ONBOARD ? BL_RING_ONBOARD : BL_RING_PREFETCH;
        if (chain->taken < (warm ? (uint32_t)BL_CHAIN_TAKEN_MAX : chain->window))
            ring = warm ? kind : kind + BL_RING_COLD_ONBOARD;
    }
    chain->ring = ring;
    if (ring != BL_RING_NONE)
        bl_work_append(meta, &lower->rings[ring], bl_lower_chain_link, number);
    bl_chains_rouse(lower);
}

/* Return a new chain, or BL_CHAIN_NONE if there are too many. */
static uint32_t bl_chain_new(bl_meta *meta, uint32_t lane, uint32_t kind)
{
    bl_lower *lower = meta->lower;
    uint32_t number = lower->free_chains.first;
    if (number == BL_NO_NUMBER)
        return BL_CHAIN_NONE;
    bl_work_unlink(meta, &lower->free_chains, bl_lower_chain_link, number);
    lower->chains[number] = (bl_chain){
        .window = BL_CHAIN_FIRST,
        .lane = lane,
        .kind = kind,
        .ring = BL_RING_NONE,
        .asked_ns = bl_now_ns(&meta->pool->memory),
    };
    bl_work_clear(&lower->chains[number].names);
    return number;
}

/* Let a name be wanted no more. */
static void bl_lower_unwant(bl_meta *meta, bl_lower_name *name)
{
    bl_lower *lower = meta->lower;
    bl_chain *chain = &lower->chains[name->chain];
    bl_work_unlink(meta, name->taken ? &lower->lists[BL_LOWER_TAKEN] : &chain->names,
                   bl_lower_name_link, (uint32_t)(name - lower->names));
    chain->count--;
    chain->taken -= name->taken;
    name->wanted = BL_LOWER_OFFLOAD, name->taken = name->recalled = 0;
    lower->stat.wanted_count--;
    bl_chain_place(meta, name->chain);
    if (chain->count > 0)
        return;
    if (lower->lane_chain[chain->lane] == name->chain)
        lower->lane_chain[chain->lane] = BL_CHAIN_NONE;
    bl_work_append(meta, &lower->free_chains, bl_lower_chain_link, name->chain);
}

/* Forget that no tier had a name, or could load it. */
static void bl_lower_unmiss(bl_meta *meta, bl_lower_name *name)
{
    if (name->absent_ns == 0)
        return;
    bl_work_unlink(meta, &meta->lower->lists[BL_LOWER_ABSENT], bl_lower_name_link,
                    (uint32_t)(name - meta->lower->names));
    name->absent_ns = 0;
    meta->lower->absent_count--;
}

/* Remember for a moment that no tier has a name, or can load it. Without this, whoever waits for it
 * would ask again and again. */
static void bl_lower_miss(bl_meta *meta, bl_lower_name *name)
{
    bl_lower *lower = meta->lower;
    uint64_t now_ns = bl_now_ns(&meta->pool->memory);
    bl_work_list *list = &lower->lists[BL_LOWER_ABSENT];
    name->absent_ns = now_ns;
    bl_work_append(meta, list, bl_lower_name_link, (uint32_t)(name - lower->names));
    lower->absent_count++;
    for (;;) {
        bl_lower_name *oldest = &lower->names[list->first];
        if (lower->absent_count <= BL_ABSENT_MAX && now_ns - oldest->absent_ns < BL_ABSENT_NS)
            return;
        bl_lower_unmiss(meta, oldest);
        bl_lower_rest(meta, oldest);
    }
}

/* Want the keys of a chain no more that are not taken. */
static void bl_chain_cut(bl_meta *meta, uint32_t number)
{
    bl_lower *lower = meta->lower;
    bl_chain *chain = &lower->chains[number];
    uint32_t lane = chain->lane;
    int last = lower->lane_chain[lane] == number;
    for (uint32_t left = chain->count - chain->taken; left > 0; left--) {
        bl_lower_name *name = &lower->names[chain->names.first];
        bl_lower_unwant(meta, name);
        bl_lower_rest(meta, name);
    }
    if (last)
        lower->lane_chain[lane] = BL_CHAIN_CUT;
}

/* Let a name be wanted by a chain, unless it is for something more urgent. */
static void bl_lower_want(bl_meta *meta, bl_lower_name *name, uint32_t number)
{
    bl_lower *lower = meta->lower;
    bl_chain *chain = &lower->chains[number];
    uint32_t kind = chain->kind;
    int more = name->wanted == BL_LOWER_OFFLOAD ||
               (name->wanted == BL_LOWER_PREFETCH && kind == BL_LOWER_ONBOARD && !name->taken);
    if (!more || name->wanted == kind)
        return;
    if (name->wanted != BL_LOWER_OFFLOAD)
        bl_lower_unwant(meta, name);
    bl_lower_unmiss(meta, name);
    bl_lower_stir(meta, name);
    name->wanted = (uint8_t)kind;
    name->chain = number;
    bl_work_append(meta, &chain->names, bl_lower_name_link, (uint32_t)(name - lower->names));
    chain->count++;
    lower->stat.wanted_count++;
    if (chain->ring == BL_RING_NONE)
        bl_chain_place(meta, number);
}

/* ---- What the index tells (index/blocks.h). */

void bl_lower_removed(bl_meta *meta)
{
    if (meta->lower != NULL)
        bl_lower_rouse(meta->lower, BL_LOWER_REMOVE, bl_tombs_has(meta, BL_TOMB_WAITING));
}

/* Let a block wait to be offered; it comes last, or first. */
static void bl_lower_add(bl_meta *meta, uint32_t number, int first)
{
    bl_lower *lower = meta->lower;
    bl_block *block = &meta->blocks[number];
    if (lower == NULL || block->task != 0)
        return;
    const bl_lower_name *name = bl_lower_name_of(lower, block->key);
    uint8_t nearer = lower->count_max ? (uint8_t)~lower->unknown : UINT8_MAX;
    if (name != NULL && (name->tiers & nearer & ~bl_tombs_of(meta, block->key)) != 0)
        return; /* it came from there; but a disk also saves what came from a remote store */
    block->offload = BL_OFFLOAD_WAITING;
    if (first)
        bl_work_prepend(meta, &lower->waiting, bl_work_block_link, number);
    else
        bl_work_append(meta, &lower->waiting, bl_work_block_link, number);
    lower->stat.dirty_count++;
    bl_lower_rouse(lower, BL_LOWER_OFFLOAD, 1);
}

void bl_lower_committed(bl_meta *meta, uint32_t number) { bl_lower_add(meta, number, 0); }

void bl_lower_recovered(bl_meta *meta, uint32_t number)
{
    bl_lower_add(meta, number, 1); /* the newest block is recovered first */
}

/* End the offload of a block, whether it was offered or not. */
static void bl_lower_settle(bl_meta *meta, uint32_t number)
{
    bl_lower *lower = meta->lower;
    bl_block *block = &meta->blocks[number];
    bl_work_list *list = block->offload == BL_OFFLOAD_TAKEN ? &lower->taken : &lower->waiting;
    bl_work_unlink(meta, list, bl_work_block_link, number);
    block->offload = BL_OFFLOAD_NONE;
    lower->stat.dirty_count--;
}

void bl_lower_forget(bl_meta *meta, uint32_t number)
{
    if (meta->blocks[number].offload == BL_OFFLOAD_NONE)
        return;
    bl_lower_settle(meta, number);
    meta->lower->stat.unsaved_count++;
}

void bl_lower_lane_gone(bl_meta *meta, uint32_t lane)
{
    bl_lower *lower = meta->lower;
    if (lower == NULL)
        return;
    for (uint32_t number = 0; number < BL_CHAINS_MAX; number++)
        if (lower->chains[number].count > 0 && lower->chains[number].lane == lane)
            bl_chain_cut(meta, number);
    lower->lane_chain[lane] = BL_CHAIN_NONE;
    if (lower->lane != lane)
        return;
    while (lower->taken.last != BL_NO_NUMBER) {
        uint32_t number = lower->taken.last;
        bl_work_unlink(meta, &lower->taken, bl_work_block_link, number);
        bl_work_prepend(meta, &lower->waiting, bl_work_block_link, number);
        meta->blocks[number].offload = BL_OFFLOAD_WAITING;
        bl_lower_rouse(lower, BL_LOWER_OFFLOAD, 1);
    }
    while (lower->lists[BL_LOWER_TAKEN].first != BL_NO_NUMBER) {
        bl_lower_name *name = &lower->names[lower->lists[BL_LOWER_TAKEN].first];
        bl_lower_unwant(meta, name);
        bl_lower_rest(meta, name);
    }
    bl_tombs_untake(meta);
    bl_lower_removed(meta);
}

/* Return the tiers that have a key, or may have it, as bits. */
static uint8_t bl_lower_reach(const bl_meta *meta, const bl_lower_name *name,
                              const uint64_t key[2])
{
    const bl_lower *lower = meta->lower;
    uint8_t unnamed = bl_host_load(&lower->told) ? lower->unknown : lower->tiers;
    if (name != NULL && name->recalled)
        return 0;
    return (uint8_t)((unnamed | (name ? name->tiers : 0)) & ~bl_tombs_of(meta, key));
}

uint32_t bl_lower_state(const bl_meta *meta, const uint64_t key[2])
{
    if (meta->lower == NULL)
        return BL_BLOCK_MISS;
    const bl_lower_name *name = bl_lower_name_of(meta->lower, key);
    if (bl_lower_reach(meta, name, key) == 0)
        return BL_BLOCK_MISS;
    if (name == NULL)
        return BL_BLOCK_BELOW;
    uint64_t now_ns = name->absent_ns ? bl_now_ns(&meta->pool->memory) : 0;
    if (name->absent_ns && now_ns - name->absent_ns < BL_ABSENT_NS)
        return BL_BLOCK_MISS;
    return name->wanted != BL_LOWER_OFFLOAD ? BL_BLOCK_PENDING : BL_BLOCK_BELOW;
}

int bl_lower_excuse(const bl_meta *meta, int status)
{
    int full = status == -BL_ERROR_NO_SPACE || status == -BL_ERROR_TABLE_FULL;
    return full && meta->lower_waits && meta->lower->stat.dirty_count > 0 ? -BL_ERROR_OFFLOADING
                                                                          : status;
}

void bl_lower_remove(bl_meta *meta, const uint64_t key[2], int64_t number)
{
    bl_lower *lower = meta->lower;
    if (lower == NULL)
        return;
    bl_lower_name *name = bl_lower_name_of(lower, key);
    bl_block *block = number < 0 ? NULL : &meta->blocks[number];
    if (name != NULL && block == NULL && !name->absent_ns) /* only a lower tier has it */
        bl_left_note(meta, key, BL_LEFT_REMOVED);
    if (block != NULL && block->brought != BL_BROUGHT_NOT)
        block->brought = BL_BROUGHT_REMOVED; /* its commit fails, if that is still to come */
    if (name != NULL && name->taken)
        name->recalled = 1;
    else if (name != NULL && name->wanted != BL_LOWER_OFFLOAD)
        bl_lower_unwant(meta, name);
    if (name != NULL)
        bl_lower_rest(meta, name);
    bl_lower_removed(meta);
}

uint8_t bl_lower_awaited(const bl_meta *meta, const uint64_t key[2])
{
    return meta->lower ? (uint8_t)(bl_tombs_untried(meta, key) & ~meta->lower->unknown) : 0;
}

int bl_lower_unwanted(const bl_meta *meta, const uint64_t key[2], uint32_t flags)
{
    if (!(flags & BL_RESERVE_BROUGHT) || meta->lower == NULL)
        return 0;
    const bl_lower_name *name = bl_lower_name_of(meta->lower, key);
    return name == NULL || !name->taken || name->recalled;
}

/* ---- The calls of clients. */

/* Let one key be onboarded by a lane's chain, unless the pool has it: 1, or 0 if no tier has it. */
static int bl_onboard_one(bl_meta *meta, const uint64_t key[2], uint32_t lane, uint32_t kind)
{
    bl_lower *lower = meta->lower;
    uint32_t *chain = &lower->lane_chain[lane];
    bl_lower_name *name = bl_lower_name_of(lower, key);
    int64_t number = bl_index_find(meta->index, key);
    if (number >= 0) /* a block that another client writes does not come from here */
        return meta->blocks[number].state == BL_NUMBER_COMMITTED ||
               (name != NULL && name->wanted != BL_LOWER_OFFLOAD);
    if (name != NULL && name->wanted != BL_LOWER_OFFLOAD && !name->recalled &&
        (name->wanted == kind || name->taken || kind == BL_LOWER_PREFETCH))
        return 1;
    if (lower->stat.wanted_count >= BL_WANTED_MAX || bl_lower_reach(meta, name, key) == 0)
        return 0;
    if (*chain == BL_CHAIN_NONE)
        *chain = bl_chain_new(meta, lane, kind);
    if (*chain == BL_CHAIN_NONE || lower->chains[*chain].count >= BL_CHAIN_KEYS_MAX)
        return 0;
    if (name == NULL)
        name = bl_lower_name_new(meta, key);
    if (name != NULL) {
        uint32_t mine = *chain; /* wanting it here may end the chain that it was in */
        bl_lower_want(meta, name, mine);
        lower->stat.onboard_count++;
    } else if (lower->chains[*chain].count == 0) {
        bl_work_append(meta, &lower->free_chains, bl_lower_chain_link, *chain);
        *chain = BL_CHAIN_NONE;
    }
    return name != NULL;
}

int bl_handle_onboard(void *context, bl_call *call)
{
    bl_meta *meta = context;
    bl_block_request head;
    uint32_t count = 0;
    const uint8_t *keys = bl_meta_items(call, 2 * sizeof(uint64_t), &head);
    uint32_t kind = head.flags & ~(uint32_t)BL_ONBOARD_MORE;
    if (keys == NULL || (kind != BL_LOWER_ONBOARD && kind != BL_LOWER_PREFETCH))
        return -BL_ERROR_BAD_REQUEST;
    int brings = meta->lower != NULL && !meta->server->stat.draining;
    if (brings && !(head.flags & BL_ONBOARD_MORE))
        meta->lower->lane_chain[call->lane] = BL_CHAIN_NONE;
    brings = brings && meta->lower->lane_chain[call->lane] != BL_CHAIN_CUT;
    for (; brings && count < head.count; count++) {
        uint64_t key[2];
        memcpy(key, keys + count * sizeof key, sizeof key);
        if (!bl_onboard_one(meta, key, call->lane, kind))
            break;
    }
    bl_meta_reply(call, count, 0, 0);
    return 0;
}

int bl_handle_tiers(void *context, bl_call *call)
{
    bl_meta *meta = context;
    bl_block_request head;
    const uint8_t *keys = bl_meta_items(call, 2 * sizeof(uint64_t), &head);
    if (keys == NULL || sizeof(bl_block_reply) + head.count > call->reply_capacity)
        return -BL_ERROR_BAD_REQUEST;
    uint8_t *tiers = call->reply + sizeof(bl_block_reply);
    for (uint32_t i = 0; i < head.count; i++) {
        uint64_t key[2];
        memcpy(key, keys + i * sizeof key, sizeof key);
        int64_t number = bl_index_find(meta->index, key);
        int here = number >= 0 && meta->blocks[number].state == BL_NUMBER_COMMITTED;
        const bl_lower_name *name = meta->lower ? bl_lower_name_of(meta->lower, key) : NULL;
        uint32_t below = name != NULL && !name->recalled ? name->tiers : 0;
        tiers[i] = (uint8_t)((here ? BL_TIER_POOL : 0) | (below & ~bl_tombs_of(meta, key)));
    }
    bl_meta_reply(call, head.count, 0, 0);
    call->reply_size += head.count;
    return 0;
}

/* ---- The calls of the service. */

/* Read and check a request of the service: return what follows it, or NULL. */
static const uint8_t *bl_lower_items(const bl_meta *meta, const bl_call *call, uint32_t item_size,
                                     bl_lower_request *request)
{
    if (call->request_size < sizeof *request || meta->lower == NULL)
        return NULL;
    memcpy(request, call->request, sizeof *request);
    uint64_t size = sizeof *request + (uint64_t)request->count * item_size;
    int whole = item_size == 0 || size == call->request_size;
    return request->token == meta->lower->token && request->kind < BL_LOWER_KINDS &&
                   request->count <= BL_CALL_KEYS_MAX && whole
               ? call->request + sizeof *request
               : NULL;
}

/* Take the next block that was not offered. */
static bl_lower_record bl_lower_take_block(bl_meta *meta)
{
    bl_lower *lower = meta->lower;
    uint32_t number = lower->waiting.first;
    bl_block *block = &meta->blocks[number];
    bl_work_unlink(meta, &lower->waiting, bl_work_block_link, number);
    bl_work_append(meta, &lower->taken, bl_work_block_link, number);
    block->offload = BL_OFFLOAD_TAKEN;
    const bl_lower_name *name = bl_lower_name_of(lower, block->key);
    uint8_t stale = bl_tombs_of(meta, block->key);
    return (bl_lower_record){
        .key = {block->key[0], block->key[1]},
        .fingerprint = block->fingerprint,
        .generation = block->generation,
        .offset = block->offset,
        .length = block->length,
        .chunk_size = block->chunk_size,
        .block = number,
        .tiers = (uint8_t)(name != NULL ? name->tiers & ~stale : 0),
        .stale = stale,
    };
}

/* Take the next name of a chain. */
static bl_lower_record bl_chain_take(bl_meta *meta, uint32_t number)
{
    bl_lower *lower = meta->lower;
    bl_chain *chain = &lower->chains[number];
    bl_lower_name *name = &lower->names[chain->names.first];
    bl_work_unlink(meta, &chain->names, bl_lower_name_link, chain->names.first);
    bl_work_append(meta, &lower->lists[BL_LOWER_TAKEN], bl_lower_name_link,
                   (uint32_t)(name - lower->names));
    name->taken = 1;
    chain->taken++;
    uint8_t stale = bl_tombs_of(meta, name->key);
    return (bl_lower_record){
        .key = {name->key[0], name->key[1]},
        .tiers = (uint8_t)(name->tiers & ~stale),
        .stale = stale,
    };
}

/* Take the next name of a ring: 1, or 0 if there is none. A chain has its turn, and is then the
 * last one; its next name may belong to another ring. */
static int bl_ring_take(bl_meta *meta, uint32_t ring, bl_lower_record *out)
{
    bl_lower *lower = meta->lower;
    uint64_t now_ns = bl_now_ns(&meta->pool->memory);
    uint32_t number;
    while ((number = lower->rings[ring].first) != BL_NO_NUMBER) {
        bl_chain *chain = &lower->chains[number];
        if (now_ns - chain->asked_ns > BL_CHAIN_NS) {
            bl_chain_cut(meta, number);
            continue;
        }
        int warm = bl_lower_warm(meta, &lower->names[chain->names.first]);
        if (warm != (ring < BL_RING_COLD_ONBOARD)) {
            bl_chain_place(meta, number);
            continue;
        }
        *out = bl_chain_take(meta, number);
        uint32_t most = warm ? (uint32_t)BL_CHAIN_TAKEN_MAX : chain->window;
        if (chain->names.first == BL_NO_NUMBER || chain->taken >= most ||
            chain->taken % BL_CHAIN_TURN == 0)
            bl_chain_place(meta, number);
        return 1;
    }
    return 0;
}

/* Take the next piece of work of a kind: 1, or 0 if there is none. */
static int bl_lower_take_one(bl_meta *meta, const bl_lower_request *request, bl_lower_record *out)
{
    bl_lower *lower = meta->lower;
    if (request->kind == BL_LOWER_REMOVE)
        return bl_tombs_take(meta, BL_TOMB_WAITING, 0, out);
    if (request->kind == BL_LOWER_RETRY)
        return bl_tombs_take(meta, BL_TOMB_FAILED, request->tier, out);
    if (request->kind == BL_LOWER_ONBOARD)
        return bl_ring_take(meta, BL_RING_ONBOARD, out);
    if (request->kind == BL_LOWER_PREFETCH)
        return bl_ring_take(meta, BL_RING_PREFETCH, out);
    if (request->kind == BL_LOWER_COLD)
        return bl_ring_take(meta, BL_RING_COLD_ONBOARD, out) ||
               bl_ring_take(meta, BL_RING_COLD_PREFETCH, out);
    if (lower->waiting.first == BL_NO_NUMBER)
        return 0;
    *out = bl_lower_take_block(meta);
    return 1;
}

int bl_handle_lower_take(void *context, bl_call *call)
{
    bl_meta *meta = context;
    bl_lower_request request;
    if (bl_lower_items(meta, call, 0, &request) == NULL ||
        (request.kind == BL_LOWER_RETRY) != (request.tier != 0) ||
        request.tier >= BL_TOMB_TIERS ||
        sizeof(bl_block_reply) + request.count * sizeof(bl_lower_record) > call->reply_capacity)
        return -BL_ERROR_BAD_REQUEST;
    bl_lower *lower = meta->lower;
    bl_lower_record record;
    uint32_t count = 0;
    lower->lane = call->lane;
    for (; count < request.count && bl_lower_take_one(meta, &request, &record); count++)
        memcpy(call->reply + sizeof(bl_block_reply) + count * sizeof record, &record,
               sizeof record);
    bl_lower_rouse(lower, BL_LOWER_OFFLOAD, lower->waiting.first != BL_NO_NUMBER);
    bl_lower_rouse(lower, BL_LOWER_RETRY, bl_tombs_has(meta, BL_TOMB_FAILED));
    bl_lower_removed(meta);
    bl_chains_rouse(lower);
    bl_block_reply head = {count, 0};
    memcpy(call->reply, &head, sizeof head);
    call->reply_size = (uint32_t)(sizeof head + count * sizeof(bl_lower_record));
    return 0;
}

/* Note that a block was offered: it may be evicted. */
static void bl_lower_offered(bl_meta *meta, const bl_lower_note *note)
{
    if (note->block >= meta->pool->geometry.block_count_max)
        return;
    const bl_block *block = &meta->blocks[note->block];
    if (block->offload != BL_OFFLOAD_TAKEN || block->generation != note->generation)
        return; /* it has left the pool meanwhile */
    bl_lower_settle(meta, note->block);
    if (meta->lower_waits && block->pin_count == 0)
        bl_block_touch(meta, note->block);
}

/* Offer a block again that the tiers had and have lost, if they may have room for all of the
 * pool's blocks, and only once after each hit: where there is less room than that, for blocks of
 * several pages, one would drive out the next for ever. */
static void bl_lower_offer_again(bl_meta *meta, const uint64_t key[2])
{
    int64_t number = bl_index_find(meta->index, key);
    bl_block *block = number < 0 ? NULL : &meta->blocks[number];
    if (block == NULL || block->state != BL_NUMBER_COMMITTED || block->again ||
        block->offload != BL_OFFLOAD_NONE || meta->stat.block_count >= meta->lower->count_max)
        return;
    block->again = 1;
    bl_lower_add(meta, (uint32_t)number, 0);
    if (!bl_lower_frees(meta, block))
        bl_evict_remove(bl_order_of(meta, (uint32_t)number), (uint32_t)number);
}

/* Let more cold keys of a chain be taken at a time, since one has come. */
static void bl_chain_widen(bl_chain *chain)
{
    chain->window = (uint32_t)bl_least(2 * (uint64_t)chain->window, BL_CHAIN_TAKEN_MAX);
}

/* Note the result of a removal; the tier does not have the key any more. */
static void bl_lower_removal(bl_meta *meta, bl_lower_note *note)
{
    if (note->removal == BL_REMOVAL_REPLACED) {
        bl_tombs_replaced(meta, note->key, note->stored, note->generation);
        return;
    }
    uint8_t tier = bl_tombs_tried(meta, note);
    note->lost = note->removal == BL_REMOVAL_DONE ? tier : 0;
    note->generation = note->stored = note->ended = 0;
    bl_lower_rouse(meta->lower, BL_LOWER_RETRY, bl_tombs_has(meta, BL_TOMB_FAILED));
}

static void bl_lower_note_one(bl_meta *meta, bl_lower_note *note)
{
    bl_lower *lower = meta->lower;
    if (note->removal != BL_REMOVAL_NONE)
        bl_lower_removal(meta, note);
    bl_lower_name *name = bl_lower_name_of(lower, note->key);
    if (note->generation != 0)
        bl_lower_offered(meta, note);
    if (name == NULL && note->stored != 0)
        name = bl_lower_name_new(meta, note->key);
    if (name == NULL)
        return;
    int ended = note->ended && name->taken, had = name->tiers != 0;
    int sought = ended && !name->recalled;
    bl_lower_stir(meta, name);
    name->tiers = (uint8_t)((name->tiers | note->stored) & ~note->lost);
    if (name->tiers != 0)
        bl_lower_unmiss(meta, name);
    if (sought && !note->stored)
        bl_chain_cut(meta, name->chain);
    else if (sought)
        bl_chain_widen(&lower->chains[name->chain]);
    if (ended)
        bl_lower_unwant(meta, name);
    if (sought && !note->stored && bl_lower_reach(meta, name, note->key) != 0)
        bl_lower_miss(meta, name); /* no tier has it, or one that has it could not load it */
    if (had && name->tiers == 0)
        bl_lower_offer_again(meta, note->key);
    bl_lower_rest(meta, name);
}

int bl_handle_lower_tell(void *context, bl_call *call)
{
    bl_meta *meta = context;
    bl_lower_request request;
    const uint8_t *items = bl_lower_items(meta, call, sizeof(bl_lower_note), &request);
    if (items == NULL)
        return -BL_ERROR_BAD_REQUEST;
    for (uint32_t i = request.count; i-- > 0;) { /* last first: a parent is newer than its child */
        bl_lower_note note;
        memcpy(&note, items + i * sizeof note, sizeof note);
        bl_lower_note_one(meta, &note);
    }
    bl_meta_reply(call, request.count, 0, 0);
    return 0;
}

/* ---- Life. */

int bl_lower_attach(bl_meta *meta, uint32_t count_max, int waits, uint8_t unknown, uint64_t token)
{
    pthread_condattr_t clock;
    if (meta->lower != NULL)
        return -EEXIST;
    bl_lower *lower = calloc(1, sizeof *lower);
    if (lower == NULL)
        return -ENOMEM;
    uint32_t others = BL_WANTED_MAX + BL_ABSENT_MAX;
    uint32_t room = BL_NO_NAME - others;
    lower->count_max = count_max;
    lower->name_max = (count_max < room ? count_max : room) + others;
    lower->free_name = BL_NO_NAME;
    lower->tiers = UINT8_MAX;
    lower->unknown = unknown;
    lower->token = token;
    lower->lane = UINT32_MAX;
    bl_work_clear(&lower->waiting);
    bl_work_clear(&lower->taken);
    for (uint32_t list = 0; list < BL_LOWER_LISTS; list++)
        bl_work_clear(&lower->lists[list]);
    for (uint32_t ring = 0; ring < BL_RING_NONE; ring++)
        bl_work_clear(&lower->rings[ring]);
    bl_work_clear(&lower->free_chains);
    uint32_t lane_count = meta->pool->geometry.lane_count;
    lower->lane_chain = malloc(lane_count * sizeof *lower->lane_chain);
    for (uint32_t lane = 0; lower->lane_chain && lane < lane_count; lane++)
        lower->lane_chain[lane] = BL_CHAIN_NONE;
    lower->names = bl_lazy_map(lower->name_max * sizeof *lower->names);
    if (lower->lane_chain == NULL || lower->names == NULL ||
        bl_index_create(&lower->index, lower->name_max) < 0) {
        bl_lazy_unmap(lower->names, lower->name_max * sizeof *lower->names);
        free(lower->lane_chain);
        free(lower);
        return -ENOMEM;
    }
    pthread_mutex_init(&lower->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&lower->worked, &clock);
    pthread_condattr_destroy(&clock);
    meta->lower = lower;
    for (uint32_t number = 0; number < BL_CHAINS_MAX; number++)
        bl_work_append(meta, &lower->free_chains, bl_lower_chain_link, number);
    meta->lower_waits = waits != 0;
    return 0;
}

void bl_lower_name_tiers(bl_meta *meta, const uint64_t id[8])
{
    if (meta->lower == NULL)
        return;
    meta->lower->tiers = 0;
    for (uint32_t tier = 1; tier < BL_TOMB_TIERS; tier++)
        meta->lower->tiers |= (uint8_t)((id[tier] != 0) << tier);
    bl_tombs_attach(meta, id);
}

int bl_lower_give_up(bl_meta *meta, uint64_t id) { return bl_tombs_give_up(meta, id); }

void bl_lower_told(bl_meta *meta)
{
    if (meta->lower != NULL)
        bl_host_store(&meta->lower->told, 1);
}

void bl_lower_describe(const bl_meta *meta, bl_lower_stat *out)
{
    uint64_t untried = bl_tombs_count_in(meta, BL_TOMB_WAITING) +
                       bl_tombs_count_in(meta, BL_TOMB_TAKEN);
    *out = meta->lower ? meta->lower->stat : (bl_lower_stat){0};
    out->wanted_count += untried;
    out->removal_count = bl_tombs_count(meta);
    out->removal_failed = bl_tombs_count_in(meta, BL_TOMB_FAILED);
    out->removal_parked = bl_tombs_count_in(meta, BL_TOMB_PARKED);
    out->removal_max = bl_tombs_max(meta);
    out->tier_count = bl_tombs_tier_count(meta);
}

void bl_lower_destroy(bl_meta *meta)
{
    bl_lower *lower = meta->lower;
    if (lower == NULL)
        return;
    bl_index_destroy(lower->index);
    bl_lazy_unmap(lower->names, lower->name_max * sizeof *lower->names);
    free(lower->lane_chain);
    pthread_cond_destroy(&lower->worked);
    pthread_mutex_destroy(&lower->lock);
    free(lower);
    meta->lower = NULL;
}
