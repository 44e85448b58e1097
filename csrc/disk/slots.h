/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The slots of a store, shared by disk/store.c and disk/recover.c.
 *
 * Invariants: a slot that is not free owns a run of pages; its key is in the key table from reserve
 * to the end; the eviction order has the live blocks, and eviction skips those with readers. A
 * sector is dirty while its bytes in the file may differ from the entries in memory.
 */
#ifndef BL_STORE_SLOTS_H
#define BL_STORE_SLOTS_H

#include <pthread.h>
#include <stdint.h>

#include "base/bitset.h"
#include "index/evict.h"
#include "space/victims.h"
#include "disk/entry.h"
#include "disk/keys.h"

enum bl_slot_state {
    BL_SLOT_FREE,
    BL_SLOT_WRITING,            /* reserved */
    BL_SLOT_FILLED,             /* its entry may be in the file, but readers cannot find it yet */
    BL_SLOT_REVOKED,            /* removed while it was being saved: freed at its commit */
    BL_SLOT_LIVE,
    BL_SLOT_DOOMED              /* removed, but it still has readers */
};

typedef struct bl_slot {
    uint32_t pins;
    uint32_t next;              /* in the list of its stripe, as slot + 1; 0: none */
    uint32_t previous;
    uint32_t state;
} bl_slot;

/* The state of a recovery. */
typedef struct bl_recovery {
    uint32_t *by_sequence;      /* by the low bits of a block's sequence: its slot + 1 */
    uint64_t mask;              /* those bits */
    uint32_t found_count;       /* valid entries */
    uint64_t oldest, newest;    /* their sequences */
    int disputed;               /* 1: two of them claim the same key or space */
} bl_recovery;

struct bl_store {
    pthread_mutex_t lock;
    uint64_t id;
    uint32_t slot_count;
    uint64_t data_offset;
    uint64_t stripe_count;
    uint64_t sequence;          /* the greatest sequence in use */
    bl_recovery recovery;
    bl_store_entry *entry;      /* by slot; the image of the index in the file */
    bl_slot *slot;
    uint32_t *stripe_slots;     /* by stripe: slot + 1 of a block that begins in it */
    uint64_t *bits;             /* memory of the sets below */
    bl_bitset free;             /* slots */
    bl_bitset dirty;            /* sectors */
    uint64_t *whole;            /* recovery, by sector: a bit for each whole entry */
    bl_keys keys;
    bl_evict *order;
    bl_pages *pages;
    bl_victims *victims;
    uint64_t (*evicted)[2];     /* evicted keys for bl_store_take_evicted() */
    uint32_t evicted_count;
    uint32_t evicted_room;
    bl_store_stat stat;
};

/* Return where a slot's block lies in the file. */
static inline uint64_t bl_slot_offset(const bl_store *store, uint32_t number)
{
    const bl_store_entry *entry = &store->entry[number];
    uint64_t unit = entry->extent_stripes ? bl_block_size(entry->length) : BL_PAGE_SIZE;
    return store->data_offset + (uint64_t)entry->stripe * BL_STRIPE_SIZE + entry->place * unit;
}

/* Mark the sector of a slot dirty. */
void bl_sector_spoil(bl_store *store, uint32_t slot);

/* Free a slot and its space. */
void bl_slot_free(bl_store *store, uint32_t number);

/* Link a slot into the list of its stripe. */
static inline void bl_slot_link(bl_store *store, uint32_t number)
{
    bl_slot *slot = &store->slot[number];
    uint64_t inside = bl_slot_offset(store, number) - store->data_offset;
    uint32_t *head = &store->stripe_slots[inside / BL_STRIPE_SIZE];
    slot->previous = 0;
    slot->next = *head;
    if (slot->next)
        store->slot[slot->next - 1].previous = number + 1;
    *head = number + 1;
}

/* Make a block visible to readers. Its first touch adds it to the eviction order. */
static inline void bl_slot_live(bl_store *store, uint32_t number)
{
    const bl_store_entry *entry = &store->entry[number];
    store->slot[number].state = BL_SLOT_LIVE;
    if (bl_evict_assigns(store->order))
        bl_evict_assign(store->order, number, entry->key[0] ^ entry->key[1]);
    store->stat.block_count++;
    store->stat.block_bytes += entry->length;
}

#endif
