/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The server's side of the lower tiers: a directory of the keys that they have, the committed
 * blocks that were not offered to them yet, and the keys that clients request from them. All of it
 * is in DRAM and written by the server's thread alone. The service (beluga/tiers/service.py) runs
 * in the server's process, outside of the poll loop: it takes work, moves blocks as any client
 * does, and reports the results.
 *
 *   committed --> WAITING --take--> TAKEN --report--> NONE            a block of the pool: offload
 *   absent --onboard--> requested --take--> taken --report--> absent  a key: onboard, prefetch
 *
 * Removals are in tombstones.c. A tier that has not executed a removal is not read for that key;
 * only a save, which replaces its block, may use it. A key that is removed while the service has it
 * is recalled: the server refuses the block that the service brings, and does not hand out the key
 * again before the service has reported.
 *
 * Offload is best effort: a block may be evicted before it was offered. With waits set, a block
 * enters the eviction order only after it was offered, and puts wait for that. A block that the
 * tiers evict while the pool has it is offered again, once after each hit. A lookup of a requested
 * key returns PENDING; the block arrives by a put of the service, like any other block.
 *
 * The keys of one call are a chain, in their order. The sessions take turns, and each session's
 * chains do: the service takes a few keys at each turn, so that no chain waits for the whole of
 * another one, and no session for all chains of another one. Keys that a disk has (warm) are
 * separate work, done before and in parallel to keys that need a remote store (cold). A chain ends
 * at its first miss, because a prefix cache cannot use the keys behind it. A chain of cold keys
 * starts with a small window, which grows when a key arrives.
 *
 * A disk lists its blocks: their number is bounded, and each key has an entry. A remote store does
 * not (an unknown tier): entries for keys that only it has are kept while there is room, and the
 * service also requests keys from it without an entry.
 */
#include "index/lower.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "base/host_atomic.h"
#include "base/lazy.h"
#include "base/minmax.h"
#include "index/call.h"
#include "index/removal_log.h"
#include "index/tombstones.h"
#include "index/work_list.h"

enum {
    BL_NO_ENTRY = 0x7fffffff,
    BL_REQUESTED_MAX = 65536,   /* requested keys at a time (D12) */
    BL_ABSENT_MAX = 16384,      /* remembered misses */
    BL_CHAIN_KEYS_MAX = 16384,  /* keys of one call */
    BL_CHAIN_TURN = 8,          /* keys taken from a chain before the next chain has its turn */
    BL_CHAIN_FIRST = 16,        /* cold keys of a chain in flight before the first arrives */
    BL_CHAIN_TAKEN_MAX = 256,   /* keys of a chain in flight */
    BL_LOWER_TAKEN,             /* entries that the service works on */
    BL_LOWER_ABSENT,            /* entries whose last load missed or failed */
    BL_LOWER_REMOTE,            /* entries that only unknown tiers have, the oldest first */
    BL_LOWER_LISTS
};

#define BL_CHAIN_NS 60000000000ull /* a request expires after this time */
#define BL_ABSENT_NS 1000000000ull /* how long a miss is cached: other pools may write, too */

/* The directory entry of a key that a lower tier has, or that is requested. */
typedef struct bl_lower_entry {
    uint64_t key[2];
    bl_link link;               /* in its chain, or the list of those taken; free entries by next */
    uint32_t chain;             /* while it is requested */
    uint8_t tiers;              /* the tiers that have it, as bits */
    uint8_t requested;          /* bl_lower_kind; BL_LOWER_OFFLOAD: not requested */
    uint8_t taken;
    uint8_t remote;             /* in the list BL_LOWER_REMOTE */
    uint8_t recalled;           /* removed after it was taken */
    uint64_t absent_ns;         /* time of the last miss; 0: none is remembered */
} bl_lower_entry;

/* The rings of chains, by whether the next key is warm (a disk has it) or cold. */
enum bl_chain_ring {
    BL_RING_ONBOARD,
    BL_RING_PREFETCH,
    BL_RING_COLD_ONBOARD,
    BL_RING_COLD_PREFETCH,
    BL_RING_NONE                /* all of its keys are taken, or as many as may be */
};

/* The keys of one call. */
typedef struct bl_chain {
    bl_work_list entries;       /* not taken yet */
    bl_link link;               /* in its ring; free chains by next */
    uint32_t count;             /* requested keys, taken ones included */
    uint32_t taken;
    uint32_t window;            /* cold keys that may be in flight */
    uint32_t lane;              /* of the caller */
    uint32_t kind;              /* BL_LOWER_ONBOARD or _PREFETCH */
    uint32_t ring;
    uint64_t requested_ns;
} bl_chain;

enum { BL_CHAIN_NONE = BL_NO_NUMBER, BL_CHAIN_CANCELLED = BL_NO_NUMBER - 1 };

/* What a session requests. One that has as many requests as are still free gets no more. */
typedef struct bl_lane_requests {
    uint32_t chain;             /* of its last call, or BL_CHAIN_NONE, _CANCELLED */
    uint32_t count;             /* requested keys */
    bl_work_list rings[BL_RING_NONE]; /* chains */
} bl_lane_requests;

struct bl_lower {
    bl_hash *hash;            /* key -> entry */
    bl_lower_entry *entries;
    uint32_t entry_max;
    uint32_t free_entry;
    uint32_t fresh_entry;       /* entries from here on were never used */
    uint32_t count_max;         /* the most blocks that the listed tiers have */
    uint8_t tiers;              /* the attached tiers, as bits */
    uint8_t unknown;            /* tiers that may have keys without an entry, as bits */
    uint64_t reported;          /* 1: the other tiers have reported all their keys */
    uint32_t lane;              /* of the service */
    uint64_t token;
    bl_work_list waiting;       /* blocks not offered yet */
    bl_work_list taken;         /* blocks that are being offered */
    bl_work_list lists[BL_LOWER_LISTS]; /* entries */
    bl_chain chains[BL_REQUESTED_MAX]; /* each has a requested key */
    uint32_t ring_count[BL_RING_NONE]; /* chains in the rings of all lanes */
    uint32_t ring_lane[BL_RING_NONE]; /* whose turn it is */
    bl_work_list free_chains;
    uint32_t fresh_chain;       /* chains from here on were never used */
    bl_lane_requests *lanes;    /* per lane */
    uint32_t absent_count;
    bl_lower_stat stat;
    uint64_t work[BL_LOWER_KINDS]; /* 1: there is work; written by the server's thread */
    pthread_mutex_t lock;       /* of the threads that wait for work */
    pthread_cond_t worked;
};

static bl_link *bl_lower_entry_link(bl_index *index, uint32_t number)
{
    return &index->lower->entries[number].link;
}

static bl_link *bl_lower_chain_link(bl_index *index, uint32_t number)
{
    return &index->lower->chains[number].link;
}

/* ---- Waking the service. */

/* Set whether there is work of a kind, and wake the threads that wait for it. */
static void bl_lower_wake(bl_lower *lower, uint32_t kind, int work)
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

uint32_t bl_lower_wait(bl_index *index, uint32_t kinds, uint64_t timeout_ns)
{
    bl_lower *lower = index->lower;
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

/* ---- Directory entries. */

/* Unlink an entry from BL_LOWER_REMOTE, so that it is not reused. */
static void bl_lower_unpark(bl_index *index, bl_lower_entry *entry)
{
    bl_lower *lower = index->lower;
    if (!entry->remote)
        return;
    bl_work_unlink(index, &lower->lists[BL_LOWER_REMOTE], bl_lower_entry_link,
                    (uint32_t)(entry - lower->entries));
    entry->remote = 0;
}

static void bl_lower_entry_free(bl_index *index, bl_lower_entry *entry)
{
    bl_lower *lower = index->lower;
    bl_lower_unpark(index, entry);
    bl_hash_remove(lower->hash, entry->key);
    entry->link.next = lower->free_entry;
    lower->free_entry = (uint32_t)(entry - lower->entries);
    lower->stat.name_count--;
}

/* Add an entry without tiers or a request. A parked entry is reused if there is no other. Returns
 * NULL if there is no room. */
static bl_lower_entry *bl_lower_entry_new(bl_index *index, const uint64_t key[2])
{
    bl_lower *lower = index->lower;
    uint32_t oldest = lower->lists[BL_LOWER_REMOTE].first;
    if (lower->free_entry == BL_NO_ENTRY && lower->fresh_entry == lower->entry_max &&
        oldest != BL_NO_NUMBER)
        bl_lower_entry_free(index, &lower->entries[oldest]);
    uint32_t number = lower->free_entry;
    if (number == BL_NO_ENTRY && lower->fresh_entry == lower->entry_max)
        return NULL;
    if (number == BL_NO_ENTRY)
        number = lower->fresh_entry;
    if (bl_hash_add(lower->hash, key, number) < 0)
        return NULL;
    if (number == lower->fresh_entry)
        lower->fresh_entry++;
    else
        lower->free_entry = lower->entries[number].link.next;
    lower->entries[number] = (bl_lower_entry){.key = {key[0], key[1]}};
    lower->stat.name_count++;
    return &lower->entries[number];
}

static bl_lower_entry *bl_lower_entry_of(const bl_lower *lower, const uint64_t key[2])
{
    int64_t number = bl_hash_find(lower->hash, key);
    return number < 0 ? NULL : &lower->entries[number];
}

/* Free the entry if no tier holds the key; park it if only unknown tiers do. A requested key and a
 * remembered miss keep their entries. */
static void bl_lower_park(bl_index *index, bl_lower_entry *entry)
{
    bl_lower *lower = index->lower;
    if (entry->requested != BL_LOWER_OFFLOAD || entry->absent_ns != 0)
        return;
    if (entry->tiers == 0) {
        bl_lower_entry_free(index, entry);
    } else if ((entry->tiers & ~lower->unknown) == 0 && !entry->remote) {
        entry->remote = 1;
        bl_work_append(index, &lower->lists[BL_LOWER_REMOTE], bl_lower_entry_link,
                        (uint32_t)(entry - lower->entries));
    }
}

/* ---- Chains. */

/* Return 1 if a tier that lists its keys (a disk) has the key, or may have it. */
static int bl_lower_warm(const bl_index *index, const bl_lower_entry *entry)
{
    const bl_lower *lower = index->lower;
    uint8_t tiers = bl_host_load(&lower->reported) ? entry->tiers : lower->tiers;
    return (tiers & ~lower->unknown & ~bl_tombstones_of(index, entry->key)) != 0;
}

/* Set the kinds of work for the rings that have chains. */
static void bl_chains_wake(bl_lower *lower)
{
    int there[BL_RING_NONE];
    for (uint32_t ring = 0; ring < BL_RING_NONE; ring++)
        there[ring] = lower->ring_count[ring] > 0;
    bl_lower_wake(lower, BL_LOWER_ONBOARD, there[BL_RING_ONBOARD]);
    bl_lower_wake(lower, BL_LOWER_PREFETCH, there[BL_RING_PREFETCH]);
    bl_lower_wake(lower, BL_LOWER_COLD,
                   there[BL_RING_COLD_ONBOARD] || there[BL_RING_COLD_PREFETCH]);
}

/* Move a chain to the end of its session's ring, or out of all rings. */
static void bl_chain_place(bl_index *index, uint32_t number)
{
    bl_lower *lower = index->lower;
    bl_chain *chain = &lower->chains[number];
    bl_work_list *rings = lower->lanes[chain->lane].rings;
    uint32_t ring = BL_RING_NONE;
    if (chain->ring != BL_RING_NONE) {
        bl_work_unlink(index, &rings[chain->ring], bl_lower_chain_link, number);
        lower->ring_count[chain->ring]--;
    }
    if (chain->entries.first != BL_NO_NUMBER) {
        int warm = bl_lower_warm(index, &lower->entries[chain->entries.first]);
        uint32_t kind = chain->kind == BL_LOWER_ONBOARD ? BL_RING_ONBOARD : BL_RING_PREFETCH;
        if (chain->taken < (warm ? (uint32_t)BL_CHAIN_TAKEN_MAX : chain->window))
            ring = warm ? kind : kind + BL_RING_COLD_ONBOARD;
    }
    chain->ring = ring;
    if (ring != BL_RING_NONE) {
        bl_work_append(index, &rings[ring], bl_lower_chain_link, number);
        lower->ring_count[ring]++;
    }
    bl_chains_wake(lower);
}

static uint32_t bl_chain_new(bl_index *index, uint32_t lane, uint32_t kind)
{
    bl_lower *lower = index->lower;
    uint32_t number = lower->free_chains.first;
    if (number != BL_NO_NUMBER)
        bl_work_unlink(index, &lower->free_chains, bl_lower_chain_link, number);
    else
        number = lower->fresh_chain++;
    lower->chains[number] = (bl_chain){
        .window = BL_CHAIN_FIRST,
        .lane = lane,
        .kind = kind,
        .ring = BL_RING_NONE,
        .requested_ns = bl_now_ns(&index->pool->memory),
    };
    bl_work_clear(&lower->chains[number].entries);
    return number;
}

/* End the request of a key, and its chain with the last key. */
static void bl_lower_cancel(bl_index *index, bl_lower_entry *entry)
{
    bl_lower *lower = index->lower;
    bl_chain *chain = &lower->chains[entry->chain];
    bl_work_unlink(index, entry->taken ? &lower->lists[BL_LOWER_TAKEN] : &chain->entries,
                   bl_lower_entry_link, (uint32_t)(entry - lower->entries));
    chain->count--;
    chain->taken -= entry->taken;
    entry->requested = BL_LOWER_OFFLOAD, entry->taken = entry->recalled = 0;
    lower->stat.wanted_count--;
    lower->lanes[chain->lane].count--;
    bl_chain_place(index, entry->chain);
    if (chain->count > 0)
        return;
    if (lower->lanes[chain->lane].chain == entry->chain)
        lower->lanes[chain->lane].chain = BL_CHAIN_NONE;
    bl_work_append(index, &lower->free_chains, bl_lower_chain_link, entry->chain);
}

static void bl_lower_forget_miss(bl_index *index, bl_lower_entry *entry)
{
    if (entry->absent_ns == 0)
        return;
    bl_work_unlink(index, &index->lower->lists[BL_LOWER_ABSENT], bl_lower_entry_link,
                    (uint32_t)(entry - index->lower->entries));
    entry->absent_ns = 0;
    index->lower->absent_count--;
}

/* Record for a short time that no tier has the key or can load it. Otherwise a client that waits
 * for it would request it repeatedly. */
static void bl_lower_note_miss(bl_index *index, bl_lower_entry *entry)
{
    bl_lower *lower = index->lower;
    uint64_t now_ns = bl_now_ns(&index->pool->memory);
    bl_work_list *list = &lower->lists[BL_LOWER_ABSENT];
    entry->absent_ns = now_ns;
    bl_work_append(index, list, bl_lower_entry_link, (uint32_t)(entry - lower->entries));
    lower->absent_count++;
    for (;;) {
        bl_lower_entry *oldest = &lower->entries[list->first];
        if (lower->absent_count <= BL_ABSENT_MAX && now_ns - oldest->absent_ns < BL_ABSENT_NS)
            return;
        bl_lower_forget_miss(index, oldest);
        bl_lower_park(index, oldest);
    }
}

/* Cancel the keys of a chain that are not taken. */
static void bl_chain_cancel(bl_index *index, uint32_t number)
{
    bl_lower *lower = index->lower;
    bl_chain *chain = &lower->chains[number];
    uint32_t lane = chain->lane;
    int last = lower->lanes[lane].chain == number;
    for (uint32_t left = chain->count - chain->taken; left > 0; left--) {
        bl_lower_entry *entry = &lower->entries[chain->entries.first];
        bl_lower_cancel(index, entry);
        bl_lower_park(index, entry);
    }
    if (last)
        lower->lanes[lane].chain = BL_CHAIN_CANCELLED;
}

/* Add a key to a chain, unless it is requested already with the same or a higher priority. */
static void bl_chain_add(bl_index *index, bl_lower_entry *entry, uint32_t number)
{
    bl_lower *lower = index->lower;
    bl_chain *chain = &lower->chains[number];
    uint32_t kind = chain->kind;
    int more = entry->requested == BL_LOWER_OFFLOAD ||
               (entry->requested == BL_LOWER_PREFETCH && kind == BL_LOWER_ONBOARD && !entry->taken);
    if (!more || entry->requested == kind)
        return;
    if (entry->requested != BL_LOWER_OFFLOAD)
        bl_lower_cancel(index, entry);
    bl_lower_forget_miss(index, entry);
    bl_lower_unpark(index, entry);
    entry->requested = (uint8_t)kind;
    entry->chain = number;
    bl_work_append(index, &chain->entries, bl_lower_entry_link, (uint32_t)(entry - lower->entries));
    chain->count++;
    lower->stat.wanted_count++;
    lower->lanes[chain->lane].count++;
    if (chain->ring == BL_RING_NONE)
        bl_chain_place(index, number);
}

/* ---- Notifications of the index (the headers of this folder). */

void bl_lower_removed(bl_index *index)
{
    if (index->lower != NULL)
        bl_lower_wake(index->lower, BL_LOWER_REMOVE,
                      bl_tombstones_has(index, BL_TOMBSTONE_WAITING));
}

/* Append a block to the blocks to be offered, or prepend it. */
static void bl_lower_add(bl_index *index, uint32_t number, int first)
{
    bl_lower *lower = index->lower;
    bl_block *block = &index->blocks[number];
    if (lower == NULL || block->task != 0)
        return;
    const bl_lower_entry *entry = bl_lower_entry_of(lower, block->key);
    uint8_t nearer = lower->count_max ? (uint8_t)~lower->unknown : UINT8_MAX;
    if (entry != NULL && (entry->tiers & nearer & ~bl_tombstones_of(index, block->key)) != 0)
        return; /* a tier has it; but a disk also saves blocks loaded from a remote store */
    block->offload = BL_OFFLOAD_WAITING;
    if (first)
        bl_work_prepend(index, &lower->waiting, bl_work_block_link, number);
    else
        bl_work_append(index, &lower->waiting, bl_work_block_link, number);
    lower->stat.dirty_count++;
    bl_lower_wake(lower, BL_LOWER_OFFLOAD, 1);
}

void bl_lower_committed(bl_index *index, uint32_t number) { bl_lower_add(index, number, 0); }

void bl_lower_recovered(bl_index *index, uint32_t number)
{
    bl_lower_add(index, number, 1); /* the newest block is recovered first */
}

/* End the offload of a block, offered or not. */
static void bl_lower_offload_end(bl_index *index, uint32_t number)
{
    bl_lower *lower = index->lower;
    bl_block *block = &index->blocks[number];
    bl_work_list *list = block->offload == BL_OFFLOAD_TAKEN ? &lower->taken : &lower->waiting;
    bl_work_unlink(index, list, bl_work_block_link, number);
    block->offload = BL_OFFLOAD_NONE;
    lower->stat.dirty_count--;
}

void bl_lower_forget(bl_index *index, uint32_t number)
{
    if (index->blocks[number].offload == BL_OFFLOAD_NONE)
        return;
    bl_lower_offload_end(index, number);
    index->lower->stat.unsaved_count++;
}

void bl_lower_lane_gone(bl_index *index, uint32_t lane)
{
    bl_lower *lower = index->lower;
    if (lower == NULL)
        return;
    for (uint32_t number = 0; number < lower->fresh_chain; number++)
        if (lower->chains[number].count > 0 && lower->chains[number].lane == lane)
            bl_chain_cancel(index, number);
    lower->lanes[lane].chain = BL_CHAIN_NONE;
    if (lower->lane != lane)
        return;
    while (lower->taken.last != BL_NO_NUMBER) {
        uint32_t number = lower->taken.last;
        bl_work_unlink(index, &lower->taken, bl_work_block_link, number);
        bl_work_prepend(index, &lower->waiting, bl_work_block_link, number);
        index->blocks[number].offload = BL_OFFLOAD_WAITING;
        bl_lower_wake(lower, BL_LOWER_OFFLOAD, 1);
    }
    while (lower->lists[BL_LOWER_TAKEN].first != BL_NO_NUMBER) {
        bl_lower_entry *entry = &lower->entries[lower->lists[BL_LOWER_TAKEN].first];
        bl_lower_cancel(index, entry);
        bl_lower_park(index, entry);
    }
    bl_tombstones_untake(index);
    bl_lower_removed(index);
}

/* Return the tiers that have the key, or may have it, as bits. */
static uint8_t bl_lower_reach(const bl_index *index, const bl_lower_entry *entry,
                              const uint64_t key[2])
{
    const bl_lower *lower = index->lower;
    uint8_t unlisted = bl_host_load(&lower->reported) ? lower->unknown : lower->tiers;
    if (entry != NULL && entry->recalled)
        return 0;
    return (uint8_t)((unlisted | (entry ? entry->tiers : 0)) & ~bl_tombstones_of(index, key));
}

uint32_t bl_lower_state(const bl_index *index, const uint64_t key[2])
{
    if (index->lower == NULL)
        return BL_BLOCK_MISS;
    const bl_lower_entry *entry = bl_lower_entry_of(index->lower, key);
    if (bl_lower_reach(index, entry, key) == 0)
        return BL_BLOCK_MISS;
    if (entry == NULL)
        return BL_BLOCK_BELOW;
    uint64_t now_ns = entry->absent_ns ? bl_now_ns(&index->pool->memory) : 0;
    if (entry->absent_ns && now_ns - entry->absent_ns < BL_ABSENT_NS)
        return BL_BLOCK_MISS;
    return entry->requested != BL_LOWER_OFFLOAD ? BL_BLOCK_PENDING : BL_BLOCK_BELOW;
}

int bl_lower_refusal(const bl_index *index, int status)
{
    int full = status == -BL_ERROR_NO_SPACE || status == -BL_ERROR_TABLE_FULL;
    return full && index->lower_waits && index->lower->stat.dirty_count > 0 ? -BL_ERROR_OFFLOADING
                                                                          : status;
}

void bl_lower_remove(bl_index *index, const uint64_t key[2], int64_t number)
{
    bl_lower *lower = index->lower;
    if (lower == NULL)
        return;
    bl_lower_entry *entry = bl_lower_entry_of(lower, key);
    bl_block *block = number < 0 ? NULL : &index->blocks[number];
    if (entry != NULL && block == NULL && !entry->absent_ns) /* only a lower tier has it */
        bl_removal_log_add(index, key, BL_REMOVED_CLIENT);
    if (block != NULL && block->onboard_state != BL_ONBOARD_NONE)
        block->onboard_state = BL_ONBOARD_REMOVED; /* a commit that is still to come fails */
    if (entry != NULL && entry->taken)
        entry->recalled = 1;
    else if (entry != NULL && entry->requested != BL_LOWER_OFFLOAD)
        bl_lower_cancel(index, entry);
    if (entry != NULL)
        bl_lower_park(index, entry);
    bl_lower_removed(index);
}

uint8_t bl_lower_awaited(const bl_index *index, const uint64_t key[2])
{
    return index->lower ? (uint8_t)(bl_tombstones_untried(index, key) & ~index->lower->unknown) : 0;
}

int bl_lower_unwanted(const bl_index *index, const uint64_t key[2], uint32_t flags)
{
    if (!(flags & BL_RESERVE_BROUGHT) || index->lower == NULL)
        return 0;
    const bl_lower_entry *entry = bl_lower_entry_of(index->lower, key);
    return entry == NULL || !entry->taken || entry->recalled;
}

/* ---- The calls of clients. */

/* Add a key to the lane's chain, unless the pool has it. Returns 1, or 0 if no tier has it. */
static int bl_onboard_one(bl_index *index, const uint64_t key[2], uint32_t lane, uint32_t kind)
{
    bl_lower *lower = index->lower;
    uint32_t *chain = &lower->lanes[lane].chain;
    bl_lower_entry *entry = bl_lower_entry_of(lower, key);
    int64_t number = bl_hash_find(index->hash, key);
    if (number >= 0) /* a block that a client is writing does not come from a tier */
        return index->blocks[number].state == BL_NUMBER_COMMITTED ||
               (entry != NULL && entry->requested != BL_LOWER_OFFLOAD);
    if (entry != NULL && entry->requested != BL_LOWER_OFFLOAD && !entry->recalled &&
        (entry->requested == kind || entry->taken || kind == BL_LOWER_PREFETCH))
        return 1;
    if (lower->lanes[lane].count >= BL_REQUESTED_MAX - lower->stat.wanted_count ||
        bl_lower_reach(index, entry, key) == 0)
        return 0;
    if (*chain == BL_CHAIN_NONE)
        *chain = bl_chain_new(index, lane, kind);
    if (lower->chains[*chain].count >= BL_CHAIN_KEYS_MAX)
        return 0;
    if (entry == NULL)
        entry = bl_lower_entry_new(index, key);
    if (entry != NULL) {
        uint32_t mine = *chain; /* adding it may end the chain that it was in */
        bl_chain_add(index, entry, mine);
        lower->stat.onboard_count++;
    } else if (lower->chains[*chain].count == 0) {
        bl_work_append(index, &lower->free_chains, bl_lower_chain_link, *chain);
        *chain = BL_CHAIN_NONE;
    }
    return entry != NULL;
}

int bl_handle_onboard(void *context, bl_call *call)
{
    bl_index *index = context;
    bl_block_request head;
    uint32_t count = 0;
    const uint8_t *keys = bl_index_items(call, 2 * sizeof(uint64_t), &head);
    uint32_t kind = head.flags & ~(uint32_t)BL_ONBOARD_MORE;
    if (keys == NULL || (kind != BL_LOWER_ONBOARD && kind != BL_LOWER_PREFETCH))
        return -BL_ERROR_BAD_REQUEST;
    int brings = index->lower != NULL && !index->server->stat.draining;
    if (brings && !(head.flags & BL_ONBOARD_MORE))
        index->lower->lanes[call->lane].chain = BL_CHAIN_NONE;
    brings = brings && index->lower->lanes[call->lane].chain != BL_CHAIN_CANCELLED;
    for (; brings && count < head.count; count++) {
        uint64_t key[2];
        memcpy(key, keys + count * sizeof key, sizeof key);
        if (!bl_onboard_one(index, key, call->lane, kind))
            break;
    }
    bl_index_reply(call, count, 0, 0);
    return 0;
}

int bl_handle_tiers(void *context, bl_call *call)
{
    bl_index *index = context;
    bl_block_request head;
    const uint8_t *keys = bl_index_items(call, 2 * sizeof(uint64_t), &head);
    if (keys == NULL || sizeof(bl_block_reply) + head.count > call->reply_capacity)
        return -BL_ERROR_BAD_REQUEST;
    uint8_t *tiers = call->reply + sizeof(bl_block_reply);
    for (uint32_t i = 0; i < head.count; i++) {
        uint64_t key[2];
        memcpy(key, keys + i * sizeof key, sizeof key);
        int64_t number = bl_hash_find(index->hash, key);
        int here = number >= 0 && index->blocks[number].state == BL_NUMBER_COMMITTED;
        const bl_lower_entry *entry = index->lower ? bl_lower_entry_of(index->lower, key) : NULL;
        uint32_t below = entry != NULL && !entry->recalled ? entry->tiers : 0;
        tiers[i] = (uint8_t)((here ? BL_TIER_POOL : 0) | (below & ~bl_tombstones_of(index, key)));
    }
    bl_index_reply(call, head.count, 0, 0);
    call->reply_size += head.count;
    return 0;
}

/* ---- The calls of the service. */

/* Read and check a request of the service. Returns the items that follow it, or NULL. */
static const uint8_t *bl_lower_items(const bl_index *index, const bl_call *call, uint32_t item_size,
                                     bl_lower_request *request)
{
    if (call->request_size < sizeof *request || index->lower == NULL)
        return NULL;
    memcpy(request, call->request, sizeof *request);
    uint64_t size = sizeof *request + (uint64_t)request->count * item_size;
    int whole = item_size == 0 || size == call->request_size;
    return request->token == index->lower->token && request->kind < BL_LOWER_KINDS &&
                   request->count <= BL_CALL_KEYS_MAX && whole
               ? call->request + sizeof *request
               : NULL;
}

/* Take the next block to offer. */
static bl_lower_record bl_lower_take_block(bl_index *index)
{
    bl_lower *lower = index->lower;
    uint32_t number = lower->waiting.first;
    bl_block *block = &index->blocks[number];
    bl_work_unlink(index, &lower->waiting, bl_work_block_link, number);
    bl_work_append(index, &lower->taken, bl_work_block_link, number);
    block->offload = BL_OFFLOAD_TAKEN;
    const bl_lower_entry *entry = bl_lower_entry_of(lower, block->key);
    uint8_t stale = bl_tombstones_of(index, block->key);
    return (bl_lower_record){
        .key = {block->key[0], block->key[1]},
        .fingerprint = block->fingerprint,
        .generation = block->generation,
        .offset = block->offset,
        .length = block->length,
        .chunk_size = block->chunk_size,
        .block = number,
        .tiers = (uint8_t)(entry != NULL ? entry->tiers & ~stale : 0),
        .stale = stale,
    };
}

/* Take the next key of a chain. */
static bl_lower_record bl_chain_take(bl_index *index, uint32_t number)
{
    bl_lower *lower = index->lower;
    bl_chain *chain = &lower->chains[number];
    bl_lower_entry *entry = &lower->entries[chain->entries.first];
    bl_work_unlink(index, &chain->entries, bl_lower_entry_link, chain->entries.first);
    bl_work_append(index, &lower->lists[BL_LOWER_TAKEN], bl_lower_entry_link,
                   (uint32_t)(entry - lower->entries));
    entry->taken = 1;
    chain->taken++;
    uint8_t stale = bl_tombstones_of(index, entry->key);
    return (bl_lower_record){
        .key = {entry->key[0], entry->key[1]},
        .tiers = (uint8_t)(entry->tiers & ~stale),
        .stale = stale,
    };
}

/* Take the next key of a ring. Returns 0 if there is none. After its turn a chain moves to the end
 * of the ring, or to another ring if its next key belongs there; then the next session has its
 * turn. */
static int bl_ring_take(bl_index *index, uint32_t ring, bl_lower_record *out)
{
    bl_lower *lower = index->lower;
    uint64_t now_ns = bl_now_ns(&index->pool->memory);
    uint32_t *lane = &lower->ring_lane[ring], lane_count = index->pool->geometry.lane_count;
    while (lower->ring_count[ring] > 0) {
        uint32_t number = lower->lanes[*lane].rings[ring].first;
        if (number == BL_NO_NUMBER) {
            *lane = (*lane + 1) % lane_count;
            continue;
        }
        bl_chain *chain = &lower->chains[number];
        if (now_ns - chain->requested_ns > BL_CHAIN_NS) {
            bl_chain_cancel(index, number);
            continue;
        }
        int warm = bl_lower_warm(index, &lower->entries[chain->entries.first]);
        if (warm != (ring < BL_RING_COLD_ONBOARD)) {
            bl_chain_place(index, number);
            continue;
        }
        *out = bl_chain_take(index, number);
        uint32_t most = warm ? (uint32_t)BL_CHAIN_TAKEN_MAX : chain->window;
        if (chain->entries.first == BL_NO_NUMBER || chain->taken >= most ||
            chain->taken % BL_CHAIN_TURN == 0) {
            bl_chain_place(index, number);
            *lane = (*lane + 1) % lane_count;
        }
        return 1;
    }
    return 0;
}

/* Take the next piece of work of a kind. Returns 0 if there is none. */
static int bl_lower_take_one(bl_index *index, const bl_lower_request *request, bl_lower_record *out)
{
    bl_lower *lower = index->lower;
    if (request->kind == BL_LOWER_REMOVE || request->kind == BL_LOWER_RETRY)
        return bl_tombstones_take(index, request->tier, out);
    if (request->kind == BL_LOWER_ONBOARD)
        return bl_ring_take(index, BL_RING_ONBOARD, out);
    if (request->kind == BL_LOWER_PREFETCH)
        return bl_ring_take(index, BL_RING_PREFETCH, out);
    if (request->kind == BL_LOWER_COLD)
        return bl_ring_take(index, BL_RING_COLD_ONBOARD, out) ||
               bl_ring_take(index, BL_RING_COLD_PREFETCH, out);
    if (lower->waiting.first == BL_NO_NUMBER)
        return 0;
    *out = bl_lower_take_block(index);
    return 1;
}

int bl_handle_lower_take(void *context, bl_call *call)
{
    bl_index *index = context;
    bl_lower_request request;
    if (bl_lower_items(index, call, 0, &request) == NULL ||
        (request.kind == BL_LOWER_RETRY) != (request.tier != 0) ||
        request.tier >= BL_TOMBSTONE_TIERS ||
        sizeof(bl_block_reply) + request.count * sizeof(bl_lower_record) > call->reply_capacity)
        return -BL_ERROR_BAD_REQUEST;
    bl_lower *lower = index->lower;
    bl_lower_record record;
    uint32_t count = 0;
    lower->lane = call->lane;
    for (; count < request.count && bl_lower_take_one(index, &request, &record); count++)
        memcpy(call->reply + sizeof(bl_block_reply) + count * sizeof record, &record,
               sizeof record);
    bl_lower_wake(lower, BL_LOWER_OFFLOAD, lower->waiting.first != BL_NO_NUMBER);
    bl_lower_wake(lower, BL_LOWER_RETRY, bl_tombstones_has(index, BL_TOMBSTONE_FAILED));
    bl_lower_removed(index);
    bl_chains_wake(lower);
    bl_block_reply head = {count, 0};
    memcpy(call->reply, &head, sizeof head);
    call->reply_size = (uint32_t)(sizeof head + count * sizeof(bl_lower_record));
    return 0;
}

/* Handle the report that a block was offered: from now on it may be evicted. */
static void bl_lower_offered(bl_index *index, const bl_lower_note *note)
{
    if (note->block >= index->pool->geometry.block_count_max)
        return;
    const bl_block *block = &index->blocks[note->block];
    if (block->offload != BL_OFFLOAD_TAKEN || block->generation != note->generation)
        return; /* the block was evicted or removed meanwhile */
    bl_lower_offload_end(index, note->block);
    if (index->lower_waits && block->pin_count == 0)
        bl_block_touch(index, note->block);
}

/* Offer a block again that the tiers have evicted, if the tiers may have room for all blocks of the
 * pool, and only once after each hit. In smaller tiers, blocks would evict each other forever. */
static void bl_lower_offer_again(bl_index *index, const uint64_t key[2])
{
    int64_t number = bl_hash_find(index->hash, key);
    bl_block *block = number < 0 ? NULL : &index->blocks[number];
    if (block == NULL || block->state != BL_NUMBER_COMMITTED || block->again ||
        block->offload != BL_OFFLOAD_NONE || index->stat.block_count >= index->lower->count_max)
        return;
    block->again = 1;
    bl_lower_add(index, (uint32_t)number, 0);
    if (!bl_lower_frees(index, block))
        bl_evict_remove(bl_order_of(index, (uint32_t)number), (uint32_t)number);
}

/* Double the window of a chain: a cold key has arrived. */
static void bl_chain_widen(bl_chain *chain)
{
    chain->window = (uint32_t)bl_min(2 * (uint64_t)chain->window, BL_CHAIN_TAKEN_MAX);
}

/* Handle the result of a removal. */
static void bl_lower_removal(bl_index *index, bl_lower_note *note)
{
    if (note->removal == BL_REMOVAL_REPLACED) {
        bl_tombstones_replaced(index, note->key, note->stored, note->generation);
        return;
    }
    uint8_t tier = bl_tombstones_tried(index, note);
    note->lost = note->removal == BL_REMOVAL_DONE ? tier : 0;
    note->generation = note->stored = note->ended = 0;
    bl_lower_wake(index->lower, BL_LOWER_RETRY, bl_tombstones_has(index, BL_TOMBSTONE_FAILED));
}

static void bl_lower_note_one(bl_index *index, bl_lower_note *note)
{
    bl_lower *lower = index->lower;
    if (note->removal != BL_REMOVAL_NONE)
        bl_lower_removal(index, note);
    bl_lower_entry *entry = bl_lower_entry_of(lower, note->key);
    if (note->generation != 0)
        bl_lower_offered(index, note);
    if (entry == NULL && note->stored != 0)
        entry = bl_lower_entry_new(index, note->key);
    if (entry == NULL)
        return;
    int ended = note->ended && entry->taken, had = entry->tiers != 0;
    int sought = ended && !entry->recalled;
    bl_lower_unpark(index, entry);
    entry->tiers = (uint8_t)((entry->tiers | note->stored) & ~note->lost);
    if (entry->tiers != 0)
        bl_lower_forget_miss(index, entry);
    if (sought && !note->stored)
        bl_chain_cancel(index, entry->chain);
    else if (sought)
        bl_chain_widen(&lower->chains[entry->chain]);
    if (ended)
        bl_lower_cancel(index, entry);
    if (sought && !note->stored && bl_lower_reach(index, entry, note->key) != 0)
        bl_lower_note_miss(index, entry); /* no tier has it, or the load failed */
    if (had && entry->tiers == 0)
        bl_lower_offer_again(index, note->key);
    bl_lower_park(index, entry);
}

int bl_handle_lower_report(void *context, bl_call *call)
{
    bl_index *index = context;
    bl_lower_request request;
    const uint8_t *items = bl_lower_items(index, call, sizeof(bl_lower_note), &request);
    if (items == NULL)
        return -BL_ERROR_BAD_REQUEST;
    for (uint32_t i = request.count; i-- > 0;) { /* last first: a parent is newer than its child */
        bl_lower_note note;
        memcpy(&note, items + i * sizeof note, sizeof note);
        bl_lower_note_one(index, &note);
    }
    bl_index_reply(call, request.count, 0, 0);
    return 0;
}

/* ---- Creation and destruction. */

int bl_lower_attach(bl_index *index, uint32_t count_max, int waits, uint8_t unknown, uint64_t token)
{
    pthread_condattr_t clock;
    if (index->lower != NULL)
        return -EEXIST;
    bl_lower *lower = calloc(1, sizeof *lower);
    if (lower == NULL)
        return -ENOMEM;
    uint32_t others = BL_REQUESTED_MAX + BL_ABSENT_MAX;
    uint32_t room = BL_NO_ENTRY - others;
    lower->count_max = count_max;
    lower->entry_max = (count_max < room ? count_max : room) + others;
    lower->free_entry = BL_NO_ENTRY;
    lower->tiers = UINT8_MAX;
    lower->unknown = unknown;
    lower->token = token;
    lower->lane = UINT32_MAX;
    bl_work_clear(&lower->waiting);
    bl_work_clear(&lower->taken);
    for (uint32_t list = 0; list < BL_LOWER_LISTS; list++)
        bl_work_clear(&lower->lists[list]);
    bl_work_clear(&lower->free_chains);
    uint32_t lane_count = index->pool->geometry.lane_count;
    lower->lanes = calloc(lane_count, sizeof *lower->lanes);
    for (uint32_t lane = 0; lower->lanes && lane < lane_count; lane++) {
        lower->lanes[lane].chain = BL_CHAIN_NONE;
        for (uint32_t ring = 0; ring < BL_RING_NONE; ring++)
            bl_work_clear(&lower->lanes[lane].rings[ring]);
    }
    lower->entries = bl_lazy_map(lower->entry_max * sizeof *lower->entries);
    if (lower->lanes == NULL || lower->entries == NULL ||
        bl_hash_create(&lower->hash, lower->entry_max) < 0) {
        bl_lazy_unmap(lower->entries, lower->entry_max * sizeof *lower->entries);
        free(lower->lanes);
        free(lower);
        return -ENOMEM;
    }
    pthread_mutex_init(&lower->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&lower->worked, &clock);
    pthread_condattr_destroy(&clock);
    index->lower = lower;
    index->lower_waits = waits != 0;
    return 0;
}

void bl_lower_name_tiers(bl_index *index, const uint64_t id[8])
{
    if (index->lower == NULL)
        return;
    index->lower->tiers = 0;
    for (uint32_t tier = 1; tier < BL_TOMBSTONE_TIERS; tier++)
        index->lower->tiers |= (uint8_t)((id[tier] != 0) << tier);
    bl_tombstones_attach(index, id);
}

int bl_lower_give_up(bl_index *index, uint64_t id) { return bl_tombstones_give_up(index, id); }

void bl_lower_reported(bl_index *index)
{
    if (index->lower != NULL)
        bl_host_store(&index->lower->reported, 1);
}

void bl_lower_describe(const bl_index *index, bl_lower_stat *out)
{
    uint64_t untried = bl_tombstones_count_in(index, BL_TOMBSTONE_WAITING) +
                       bl_tombstones_count_in(index, BL_TOMBSTONE_TAKEN);
    *out = index->lower ? index->lower->stat : (bl_lower_stat){0};
    out->wanted_count += untried;
    out->removal_count = bl_tombstones_count(index);
    out->removal_failed = bl_tombstones_count_in(index, BL_TOMBSTONE_FAILED);
    out->removal_parked = bl_tombstones_count_in(index, BL_TOMBSTONE_PARKED);
    out->removal_max = bl_tombstones_max(index);
    out->tier_count = bl_tombstones_tier_count(index);
}

void bl_lower_destroy(bl_index *index)
{
    bl_lower *lower = index->lower;
    if (lower == NULL)
        return;
    bl_hash_destroy(lower->hash);
    bl_lazy_unmap(lower->entries, lower->entry_max * sizeof *lower->entries);
    free(lower->lanes);
    pthread_cond_destroy(&lower->worked);
    pthread_mutex_destroy(&lower->lock);
    free(lower);
    index->lower = NULL;
}
