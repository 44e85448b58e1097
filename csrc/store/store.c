/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The index of one file of the disk tier (api/store.h): pure memory, with no I/O and no clock.
 *
 * Invariants: a slot that is not free owns one block of an extent; a key is in the hash index from
 * reserve to the end; the eviction order has the live blocks, and eviction passes over those that
 * are read now. A sector is dirty while its bytes in the file may differ from bl_store_take's.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/bitset.h"
#include "base/lazy.h"
#include "base/minmax.h"
#include "index/evict.h"
#include "index/hash.h"
#include "index/recover_sort.h"
#include "space/extent.h"
#include "space/fit.h"
#include "store/entry.h"

enum bl_slot_state {
    BL_SLOT_FREE,
    BL_SLOT_WRITING,            /* reserved */
    BL_SLOT_FILLED,             /* its entry may be in the file, and readers do not find it yet */
    BL_SLOT_LIVE,
    BL_SLOT_DOOMED,             /* removed, and read now */
    BL_SLOT_FOUND               /* recovery: its entry is whole */
};

enum {
    BL_STORE_LOOK_MAX = 1024,   /* cold blocks looked at to make room for one block */
    BL_STORE_AHEAD = 32,        /* blocks whose tables recovery prefetches */
    BL_STORE_SPARSE = 8         /* sequences for each block, above which recovery sorts */
};

typedef struct bl_slot {
    uint32_t pins;
    uint32_t next;              /* in the list of its extent, as slot + 1; 0: none */
    uint32_t previous;
    uint32_t state;
} bl_slot;

struct bl_store {
    pthread_mutex_t lock;
    uint64_t id;
    uint32_t slot_count;
    uint64_t data_offset;
    uint64_t stripe_count;
    uint64_t sequence;          /* the greatest in use */
    uint32_t found_count;       /* recovery: entries that are whole */
    uint64_t oldest, newest;    /* recovery: their sequences */
    int space_disputed;         /* recovery: two of them claim one space */
    int key_disputed;           /* recovery: or one key */
    bl_store_entry *entry;      /* by slot; what the index in the file has, at the same offsets */
    bl_slot *slot;
    uint32_t *extent_slots;     /* by first stripe: slot + 1 of one of its blocks */
    uint64_t *bits;             /* the memory of the two sets */
    bl_bitset free;             /* slots */
    bl_bitset dirty;            /* sectors */
    bl_index *index;
    bl_evict *order;
    bl_extents *extents;
    uint64_t (*evicted)[2];     /* keys that nobody has taken yet */
    uint32_t evicted_count;
    uint32_t evicted_room;
    bl_store_stat stat;
};

/* ---- Life */

static size_t bl_store_bits_size(const bl_store *store)
{
    uint64_t sectors = store->slot_count / BL_STORE_SECTOR_SLOTS;
    return (bl_bitset_words(store->slot_count) + bl_bitset_words(sectors)) * sizeof(uint64_t);
}

void bl_store_destroy(bl_store *store)
{
    if (!store)
        return;
    free(store->evicted);
    bl_extents_destroy(store->extents);
    bl_evict_destroy(store->order);
    bl_index_destroy(store->index);
    bl_lazy_unmap(store->bits, bl_store_bits_size(store));
    bl_lazy_unmap(store->extent_slots, (store->stripe_count + 1) * sizeof *store->extent_slots);
    bl_lazy_unmap(store->slot, store->slot_count * sizeof *store->slot);
    bl_lazy_unmap(store->entry, store->slot_count * sizeof *store->entry);
    pthread_mutex_destroy(&store->lock);
    free(store);
}

/* Make the tables of the space and the keys, empty: 0 or -ENOMEM. */
static int bl_store_tables_make(bl_store *store)
{
    bl_index_destroy(store->index);
    bl_extents_destroy(store->extents);
    store->index = NULL;
    store->extents = NULL;
    int rc = bl_index_create(&store->index, store->slot_count);
    return rc ? rc : bl_extents_create(&store->extents, store->data_offset, store->stripe_count);
}

int bl_store_create(bl_store **out, uint64_t id, uint32_t slot_count, uint64_t data_offset,
                    uint64_t stripe_count, uint32_t policy)
{
    if (slot_count == 0 || slot_count % BL_STORE_SECTOR_SLOTS || stripe_count >= UINT32_MAX)
        return -EINVAL;
    bl_store *store = calloc(1, sizeof *store);
    if (!store)
        return -ENOMEM;
    *store = (bl_store){.id = id, .slot_count = slot_count, .data_offset = data_offset,
                        .stripe_count = stripe_count};
    pthread_mutex_init(&store->lock, NULL);
    store->entry = bl_lazy_map_dense(slot_count * sizeof *store->entry);
    store->slot = bl_lazy_map_dense(slot_count * sizeof *store->slot);
    store->extent_slots = bl_lazy_map((stripe_count + 1) * sizeof *store->extent_slots);
    store->bits = bl_lazy_map(bl_store_bits_size(store));
    int rc = !store->entry || !store->slot || !store->extent_slots || !store->bits ? -ENOMEM : 0;
    if (!rc)
        rc = bl_store_tables_make(store);
    if (!rc)
        rc = bl_evict_create(&store->order, slot_count, policy);
    if (rc) {
        bl_store_destroy(store);
        return rc;
    }
    bl_bitset_make(&store->free, store->bits, slot_count);
    bl_bitset_make(&store->dirty, store->bits + bl_bitset_words(slot_count),
                   slot_count / BL_STORE_SECTOR_SLOTS);
    bl_bitset_fill(&store->free, slot_count);
    store->stat.slot_count = slot_count;
    store->stat.data_bytes = stripe_count * BL_STRIPE_SIZE;
    *out = store;
    return 0;
}

/* ---- Slots and their space */

static uint64_t bl_slot_offset(const bl_store *store, uint32_t number)
{
    const bl_store_entry *entry = &store->entry[number];
    return store->data_offset + (uint64_t)entry->first_stripe * BL_STRIPE_SIZE +
           (uint64_t)entry->block_index * bl_block_size(entry->length);
}

static void bl_sector_spoil(bl_store *store, uint32_t slot)
{
    bl_bitset_add(&store->dirty, slot / BL_STORE_SECTOR_SLOTS);
}

/* Link a slot into the list of its extent. */
static void bl_slot_link(bl_store *store, uint32_t number)
{
    bl_slot *slot = &store->slot[number];
    uint32_t *head = &store->extent_slots[store->entry[number].first_stripe];
    slot->previous = 0;
    slot->next = *head;
    if (slot->next)
        store->slot[slot->next - 1].previous = number + 1;
    *head = number + 1;
}

/* Give back a slot with its space, and the stripes of an extent that becomes empty. */
static void bl_slot_free(bl_store *store, uint32_t number)
{
    bl_slot *slot = &store->slot[number];
    uint32_t first = store->entry[number].first_stripe;
    if (slot->previous)
        store->slot[slot->previous - 1].next = slot->next;
    else
        store->extent_slots[first] = slot->next;
    if (slot->next)
        store->slot[slot->next - 1].previous = slot->previous;
    bl_extents_give(store->extents, bl_slot_offset(store, number));
    if (!store->extent_slots[first])
        bl_extents_close(store->extents, first);
    slot->state = BL_SLOT_FREE;
    slot->pins = 0;
    bl_bitset_add(&store->free, number);
}

/* Let nobody find a live block any more. */
static void bl_slot_drop(bl_store *store, uint32_t number)
{
    bl_slot *slot = &store->slot[number];
    bl_index_remove(store->index, store->entry[number].key);
    bl_evict_forget(store->order, number);
    bl_sector_spoil(store, number);
    store->stat.block_count--;
    store->stat.block_bytes -= store->entry[number].length;
    slot->state = BL_SLOT_DOOMED;
    if (slot->pins == 0)
        bl_slot_free(store, number);
}

/* Note an evicted key for bl_store_take_evicted; without memory, nobody is told. */
static void bl_evicted_add(bl_store *store, const uint64_t key[2])
{
    if (store->evicted_count == store->evicted_room) {
        uint32_t room = store->evicted_room ? 2 * store->evicted_room : 256;
        void *larger = realloc(store->evicted, room * sizeof *store->evicted);
        if (!larger)
            return;
        store->evicted = larger;
        store->evicted_room = room;
    }
    memcpy(store->evicted[store->evicted_count++], key, sizeof *store->evicted);
}

static void bl_slot_evict(bl_store *store, uint32_t number)
{
    bl_evicted_add(store, store->entry[number].key);
    bl_slot_drop(store, number);
    store->stat.evicted_count++;
}

/* ---- Room */

/* Can a block be evicted now? */
static int bl_slot_may_go(const bl_store *store, uint32_t number)
{
    return store->slot[number].state == BL_SLOT_LIVE && store->slot[number].pins == 0;
}

static int bl_extent_may_empty(const bl_store *store, uint32_t first)
{
    for (uint32_t next = store->extent_slots[first]; next; next = store->slot[next - 1].next)
        if (!bl_slot_may_go(store, next - 1))
            return 0;
    return 1;
}

/* Find the next extent that reaches into the stripes [first, end), at or after from. */
static int bl_cell_walk(const bl_store *store, uint64_t first, uint64_t end, uint64_t from,
                        bl_extent_view *view)
{
    if (from + BL_EXTENT_STRIPES_MAX <= first)
        from = first + 1 - BL_EXTENT_STRIPES_MAX;
    while (bl_extents_next(store->extents, from, view) == 0 && view->first_stripe < end) {
        if ((uint64_t)view->first_stripe + view->stripe_count > first)
            return 1;
        from = (uint64_t)view->first_stripe + 1;
    }
    return 0;
}

/* Empty all extents that reach into the cell of a class at this offset, so that an extent of the
 * class fits there: 1; or 0, with nothing done, because a block must stay or no block fits. */
static int bl_cell_clear(bl_store *store, uint32_t size, uint64_t offset)
{
    uint32_t first, count;
    bl_extent_view view;
    if (bl_extents_cell(store->extents, size, offset, &first, &count) < 0 ||
        bl_fit_of(size / BL_PAGE_SIZE, count).block_count == 0)
        return 0;
    uint64_t end = (uint64_t)first + count;
    for (uint64_t at = 0; bl_cell_walk(store, first, end, at, &view); at = view.first_stripe + 1ull)
        if (view.block_size == size || !bl_extent_may_empty(store, view.first_stripe))
            return 0;
    for (uint64_t at = 0; bl_cell_walk(store, first, end, at, &view); at = view.first_stripe + 1ull)
        while (store->extent_slots[view.first_stripe])
            bl_slot_evict(store, store->extent_slots[view.first_stripe] - 1);
    return 1;
}

/* Evict the coldest block of this class, or empty a cell for it at the coldest block of another:
 * 1, or 0 if nothing can go. */
static int bl_room_make(bl_store *store, uint32_t size)
{
    int64_t number = bl_evict_coldest(store->order);
    for (int looks = 0; number >= 0 && looks < BL_STORE_LOOK_MAX; looks++) {
        if (bl_slot_may_go(store, (uint32_t)number)) {
            if (bl_block_size(store->entry[number].length) == size) {
                bl_slot_evict(store, (uint32_t)number);
                return 1;
            }
            if (bl_cell_clear(store, size, bl_slot_offset(store, (uint32_t)number)))
                return 1;
        }
        number = bl_evict_warmer(store->order, (uint32_t)number);
    }
    return 0;
}

/* Open an extent anywhere, if it wastes at most a quarter of its stripes: 1 or 0. */
static int bl_extent_open_fair(bl_store *store, uint32_t size)
{
    bl_extent_view view;
    if (bl_extents_open(store->extents, size, BL_FIT_ANY, 0, &view) < 0)
        return 0;
    uint64_t used = (uint64_t)view.block_count * size;
    if (used * 4 >= (uint64_t)view.stripe_count * BL_STRIPE_SIZE * 3)
        return 1;
    bl_extents_close(store->extents, view.first_stripe);
    return 0;
}

/* Take a block of space: 1 or 0. Nothing is evicted while free stripes serve well enough: a small
 * store has few cells of a class, and all of them may have a block of another one. */
static int bl_space_find(bl_store *store, uint32_t size, uint64_t *offset)
{
    bl_extent_view view;
    for (;;) {
        if (bl_extents_take(store->extents, size, offset) == 0)
            return 1;
        if (bl_extents_open(store->extents, size, BL_FIT_GOOD, 0, &view) == 0)
            continue;
        if (bl_extent_open_fair(store, size))
            continue;
        if (!bl_room_make(store, size) &&
            bl_extents_open(store->extents, size, BL_FIT_ANY, 0, &view) < 0)
            return 0;
    }
}

/* Take a free slot, the lowest, so that the index in the file stays short; or -1. */
static int64_t bl_slot_take(bl_store *store)
{
    uint64_t number = bl_bitset_next(&store->free, 0);
    if (number == BL_BITSET_NONE) {
        int64_t coldest = bl_evict_coldest(store->order);
        while (coldest >= 0 && !bl_slot_may_go(store, (uint32_t)coldest))
            coldest = bl_evict_warmer(store->order, (uint32_t)coldest);
        if (coldest < 0)
            return -1;
        bl_slot_evict(store, (uint32_t)coldest);
        number = (uint64_t)coldest;
    }
    bl_bitset_remove(&store->free, number);
    return (int64_t)number;
}

/* Give a new block a slot and space: the slot, or -1. */
static int64_t bl_slot_reserve(bl_store *store, const bl_store_record *record)
{
    uint32_t size = bl_block_size(record->length);
    uint64_t offset;
    bl_extent_view view;
    int64_t number = size ? bl_slot_take(store) : -1;
    if (number < 0)
        return -1;
    if (!bl_space_find(store, size, &offset) ||
        bl_extents_at(store->extents, offset, &view) < 0) {
        bl_bitset_add(&store->free, (uint64_t)number);
        return -1;
    }
    uint64_t start = store->data_offset + (uint64_t)view.first_stripe * BL_STRIPE_SIZE;
    store->entry[number] = (bl_store_entry){
        .key = {record->key[0], record->key[1]},
        .fingerprint = record->fingerprint,
        .length = record->length,
        .chunk_size = record->chunk_size,
        .first_stripe = view.first_stripe,
        .stripe_count = (uint16_t)view.stripe_count,
        .block_index = (uint16_t)((offset - start) / size),
    };
    store->slot[number] = (bl_slot){.state = BL_SLOT_WRITING};
    bl_slot_link(store, (uint32_t)number);
    bl_index_add(store->index, record->key, (uint32_t)number);
    return number;
}

/* ---- Calls of readers */

static void bl_place_of(const bl_store *store, uint32_t number, uint32_t state,
                        bl_store_place *place)
{
    const bl_store_entry *entry = &store->entry[number];
    *place = (bl_store_place){
        .offset = bl_slot_offset(store, number),
        .slot = number,
        .size = bl_block_size(entry->length),
        .seed = bl_store_key_crc(entry->key),
        .crc = entry->payload_crc,
        .state = state,
        .length = entry->length,
    };
}

/* Return the slot of a live block, or -1. */
static int64_t bl_store_live(const bl_store *store, const uint64_t key[2])
{
    int64_t number = bl_index_find(store->index, key);
    return number >= 0 && store->slot[number].state == BL_SLOT_LIVE ? number : -1;
}

int bl_store_find(bl_store *store, const uint64_t *keys, uint32_t count, bl_store_record *records,
                  bl_store_place *places)
{
    int found = 0;
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = count; i-- > 0;) {        /* deepest first: a parent is newer */
        int64_t number = bl_store_live(store, &keys[2 * i]);
        places[i] = (bl_store_place){.state = BL_STORE_ABSENT};
        if (number < 0)
            continue;
        const bl_store_entry *entry = &store->entry[number];
        store->slot[number].pins++;
        bl_evict_touch(store->order, (uint32_t)number);
        bl_place_of(store, (uint32_t)number, BL_STORE_PRESENT, &places[i]);
        memcpy(records[i].key, entry->key, sizeof records[i].key);
        records[i].fingerprint = entry->fingerprint;
        records[i].length = entry->length;
        records[i].chunk_size = entry->chunk_size;
        found++;
    }
    pthread_mutex_unlock(&store->lock);
    return found;
}

void bl_store_unpin(bl_store *store, const bl_store_place *places, uint32_t count)
{
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < count; i++) {
        bl_slot *slot = &store->slot[places[i].slot];
        if (places[i].state != BL_STORE_PRESENT)
            continue;
        if (--slot->pins == 0 && slot->state == BL_SLOT_DOOMED)
            bl_slot_free(store, places[i].slot);
    }
    pthread_mutex_unlock(&store->lock);
}

void bl_store_has(bl_store *store, const uint64_t *keys, uint32_t count, uint8_t *found)
{
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < count; i++)
        found[i] = bl_store_live(store, &keys[2 * i]) >= 0;
    pthread_mutex_unlock(&store->lock);
}

int bl_store_remove(bl_store *store, const uint64_t *keys, uint32_t count)
{
    int removed = 0;
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < count; i++) {
        int64_t number = bl_store_live(store, &keys[2 * i]);
        if (number < 0)
            continue;
        bl_slot_drop(store, (uint32_t)number);
        removed++;
    }
    pthread_mutex_unlock(&store->lock);
    return removed;
}

uint32_t bl_store_keys(bl_store *store, uint64_t *keys, uint32_t room)
{
    uint32_t count = 0;
    pthread_mutex_lock(&store->lock);
    for (uint32_t number = 0; count < store->stat.block_count && number < store->slot_count;
         number++) {
        if (store->slot[number].state != BL_SLOT_LIVE)
            continue;
        if (count < room)
            memcpy(&keys[2 * count], store->entry[number].key, 2 * sizeof *keys);
        count++;
    }
    pthread_mutex_unlock(&store->lock);
    return count;
}

uint32_t bl_store_take_evicted(bl_store *store, uint64_t *keys, uint32_t room)
{
    pthread_mutex_lock(&store->lock);
    uint32_t count = (uint32_t)bl_least(store->evicted_count, room);
    store->evicted_count -= count;
    if (count)
        memcpy(keys, store->evicted[store->evicted_count], count * sizeof *store->evicted);
    pthread_mutex_unlock(&store->lock);
    return count;
}

/* ---- Calls of writers */

int bl_store_reserve(bl_store *store, const bl_store_record *records, uint32_t count,
                     bl_store_place *places)
{
    int granted = 0;
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < count; i++) {
        int64_t number = bl_index_find(store->index, records[i].key);
        places[i] = (bl_store_place){.state = BL_STORE_ABSENT};
        if (number >= 0) {
            int live = store->slot[number].state == BL_SLOT_LIVE;
            places[i].state = live ? BL_STORE_PRESENT : BL_STORE_PENDING;
            if (live)
                bl_evict_touch(store->order, (uint32_t)number);
        } else if ((number = bl_slot_reserve(store, &records[i])) >= 0) {
            bl_place_of(store, (uint32_t)number, BL_STORE_GRANTED, &places[i]);
            granted++;
        }
    }
    pthread_mutex_unlock(&store->lock);
    return granted;
}

void bl_store_fill(bl_store *store, const bl_store_place *places, uint32_t count)
{
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = count; i-- > 0;) {        /* a restart orders by sequence: parents newer */
        bl_slot *slot = &store->slot[places[i].slot];
        bl_store_entry *entry = &store->entry[places[i].slot];
        if (places[i].state != BL_STORE_GRANTED || slot->state != BL_SLOT_WRITING)
            continue;
        entry->sequence = ++store->sequence;
        entry->payload_crc = places[i].crc;
        entry->entry_crc = bl_store_entry_crc(entry, store->id, places[i].slot);
        slot->state = BL_SLOT_FILLED;
        bl_sector_spoil(store, places[i].slot);
    }
    pthread_mutex_unlock(&store->lock);
}

static void bl_slot_live(bl_store *store, uint32_t number)
{
    const bl_store_entry *entry = &store->entry[number];
    store->slot[number].state = BL_SLOT_LIVE;
    bl_evict_assign(store->order, number, entry->key[0] ^ entry->key[1], 0, entry->length);
    store->stat.block_count++;
    store->stat.block_bytes += entry->length;
}

void bl_store_commit(bl_store *store, const bl_store_place *places, uint32_t count)
{
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = count; i-- > 0;) {
        uint32_t number = places[i].slot;
        if (places[i].state != BL_STORE_GRANTED || store->slot[number].state != BL_SLOT_FILLED)
            continue;
        bl_slot_live(store, number);
        bl_evict_touch(store->order, number);
    }
    pthread_mutex_unlock(&store->lock);
}

void bl_store_abort(bl_store *store, const bl_store_place *places, uint32_t count)
{
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < count; i++) {
        bl_slot *slot = &store->slot[places[i].slot];
        if (places[i].state != BL_STORE_GRANTED)
            continue;
        if (slot->state == BL_SLOT_FILLED)
            bl_sector_spoil(store, places[i].slot);
        else if (slot->state != BL_SLOT_WRITING)
            continue;
        bl_index_remove(store->index, store->entry[places[i].slot].key);
        bl_slot_free(store, places[i].slot);
    }
    pthread_mutex_unlock(&store->lock);
}

/* ---- The index in the file */

uint32_t bl_store_take(bl_store *store, uint32_t *sectors, uint8_t *bytes, uint32_t room)
{
    uint32_t count = 0;
    pthread_mutex_lock(&store->lock);
    for (uint64_t sector = 0; count < room; sector++) {
        sector = bl_bitset_next(&store->dirty, sector);
        if (sector == BL_BITSET_NONE)
            break;
        bl_store_entry *entry = (bl_store_entry *)(bytes + (size_t)count * BL_STORE_SECTOR_SIZE);
        uint64_t number = sector * BL_STORE_SECTOR_SLOTS;
        for (uint32_t i = 0; i < BL_STORE_SECTOR_SLOTS; i++, entry++, number++) {
            uint32_t state = store->slot[number].state;
            if (state == BL_SLOT_LIVE || state == BL_SLOT_FILLED)
                *entry = store->entry[number];
            else
                memset(entry, 0, sizeof *entry);
        }
        bl_bitset_remove(&store->dirty, sector);
        sectors[count++] = (uint32_t)sector;
    }
    pthread_mutex_unlock(&store->lock);
    return count;
}

void bl_store_spoil(bl_store *store, const uint32_t *sectors, uint32_t count)
{
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < count; i++)
        if (sectors[i] < store->slot_count / BL_STORE_SECTOR_SLOTS)
            bl_bitset_add(&store->dirty, sectors[i]);
    pthread_mutex_unlock(&store->lock);
}

/* ---- Recovery */

static int bl_entry_is_blank(const bl_store_entry *entry)
{
    uint64_t words[BL_STORE_ENTRY_SIZE / 8], any = 0;
    memcpy(words, entry, sizeof words);
    for (size_t i = 0; i < BL_STORE_ENTRY_SIZE / 8; i++)
        any |= words[i];
    return any == 0;
}

static int bl_entry_is_whole(const bl_store *store, const bl_store_entry *entry, uint32_t slot)
{
    return entry->entry_crc == bl_store_entry_crc(entry, store->id, slot) && entry->sequence &&
           bl_block_size(entry->length) && entry->stripe_count &&
           (uint64_t)entry->first_stripe + entry->stripe_count <= store->stripe_count;
}

uint8_t *bl_store_entries(bl_store *store) { return (uint8_t *)store->entry; }

void bl_store_check(bl_store *store, uint32_t slot, uint32_t count)
{
    uint32_t found = 0;
    uint64_t oldest = UINT64_MAX, newest = 0;
    uint32_t end = (uint32_t)bl_least((uint64_t)slot + count, store->slot_count);
    for (; slot < end; slot++) {
        const bl_store_entry *entry = &store->entry[slot];
        if (bl_entry_is_blank(entry))
            continue;
        if (bl_entry_is_whole(store, entry, slot)) {
            store->slot[slot].state = BL_SLOT_FOUND;
            oldest = bl_least(oldest, entry->sequence);
            newest = entry->sequence > newest ? entry->sequence : newest;
            found++;
        } else {
            pthread_mutex_lock(&store->lock);
            store->stat.damaged_count++;
            bl_sector_spoil(store, slot);
            pthread_mutex_unlock(&store->lock);
        }
    }
    pthread_mutex_lock(&store->lock);
    store->oldest = store->found_count ? bl_least(store->oldest, oldest) : oldest;
    store->newest = newest > store->newest ? newest : store->newest;
    store->found_count += found;
    pthread_mutex_unlock(&store->lock);
}

/* Claim a recovered block's space: 1, or 0 if another block has some of it. */
static int bl_slot_claim_space(bl_store *store, uint32_t number)
{
    const bl_store_entry *entry = &store->entry[number];
    uint32_t size = bl_block_size(entry->length);
    uint64_t offset = bl_slot_offset(store, number);
    int64_t first = bl_extents_first_at(store->extents, offset);
    if (first < 0) {
        bl_extent_view view = {
            .first_stripe = entry->first_stripe,
            .stripe_count = entry->stripe_count,
            .block_size = size,
            .block_count = bl_fit_of(size / BL_PAGE_SIZE, entry->stripe_count).block_count,
        };
        if (entry->block_index >= view.block_count || bl_extents_adopt(store->extents, &view) < 0)
            return 0;
    } else if (first != entry->first_stripe) {
        return 0;
    }
    if (bl_extents_claim(store->extents, offset, size) < 0)
        return 0;
    bl_bitset_remove(&store->free, number);
    bl_slot_link(store, number);
    return 1;
}

void bl_store_claim_space(bl_store *store, uint32_t slot, uint32_t count)
{
    uint32_t end = (uint32_t)bl_least((uint64_t)slot + count, store->slot_count);
    for (; slot < end && !store->space_disputed; slot++)
        if (store->slot[slot].state == BL_SLOT_FOUND && !bl_slot_claim_space(store, slot))
            store->space_disputed = 1;
}

void bl_store_claim_keys(bl_store *store, uint32_t slot, uint32_t count)
{
    uint32_t end = (uint32_t)bl_least((uint64_t)slot + count, store->slot_count), ahead = slot;
    for (; slot < end && !store->key_disputed; slot++) {
        for (; ahead < end && ahead < slot + BL_STORE_AHEAD; ahead++)
            bl_index_prefetch(store->index, store->entry[ahead].key);
        if (store->slot[slot].state == BL_SLOT_FOUND &&
            bl_index_add(store->index, store->entry[slot].key, slot) < 0)
            store->key_disputed = 1;
    }
}

/* Undo all claims: 0 or -ENOMEM. */
static int bl_store_claim_none(bl_store *store)
{
    memset(store->extent_slots, 0, (store->stripe_count + 1) * sizeof *store->extent_slots);
    bl_bitset_fill(&store->free, store->slot_count);
    return bl_store_tables_make(store);
}

/* Claim with the newest first: blocks that claim what a newer one has are dropped. Returns how many
 * are left of the list, the oldest first. */
static uint32_t bl_store_claim_newest(bl_store *store, bl_recovered *sorted, uint32_t found)
{
    uint32_t left = found;
    for (uint32_t i = found; i-- > 0;) {
        uint32_t number = sorted[i].number;
        int space = bl_slot_claim_space(store, number);
        if (space && bl_index_add(store->index, store->entry[number].key, number) == 0) {
            sorted[--left] = sorted[i];
            continue;
        }
        if (space)
            bl_slot_free(store, number);
        store->slot[number].state = BL_SLOT_FREE;
        store->stat.damaged_count++;
        bl_sector_spoil(store, number);
    }
    memmove(sorted, sorted + left, (found - left) * sizeof *sorted);
    return found - left;
}

static void bl_slot_enter(bl_store *store, uint32_t number)
{
    bl_slot_live(store, number);
    bl_evict_touch(store->order, number);
}

/* Sort the blocks, and let those that claim nothing of a newer one live. */
static int bl_store_enter_sorted(bl_store *store)
{
    uint32_t count = 0, found = store->found_count;
    size_t size = 2 * ((size_t)found + 1) * sizeof(bl_recovered);
    bl_recovered *list = bl_lazy_map_dense(size);
    if (!list)
        return -ENOMEM;
    for (uint32_t number = 0; count < found; number++)
        if (store->slot[number].state == BL_SLOT_FOUND)
            list[count++] = (bl_recovered){store->entry[number].sequence, number};
    bl_recovered *sorted = bl_recovered_sort(list, list + found, found);
    int rc = 0;
    if (store->space_disputed || store->key_disputed) {
        rc = bl_store_claim_none(store);
        count = rc ? 0 : bl_store_claim_newest(store, sorted, found);
    }
    for (uint32_t i = 0; i < count; i++)
        bl_slot_enter(store, sorted[i].number);
    bl_lazy_unmap(list, size);
    return rc;
}

/* Let all blocks live, in order of a table by sequence: 1; or 0, with nothing done, if two have the
 * same sequence or there is no memory. */
static int bl_store_enter_direct(bl_store *store)
{
    uint64_t range = store->newest - store->oldest + 1;
    uint32_t *by_sequence = bl_lazy_map_dense(range * sizeof *by_sequence), left = 0;
    if (!by_sequence)
        return 0;
    for (uint32_t number = 0; left < store->found_count; number++) {
        if (store->slot[number].state != BL_SLOT_FOUND)
            continue;
        uint32_t *place = &by_sequence[store->entry[number].sequence - store->oldest];
        if (*place)
            break;
        *place = number + 1;
        left++;
    }
    int direct = left == store->found_count;
    for (uint64_t i = 0; direct && i < range; i++)
        if (by_sequence[i])
            bl_slot_enter(store, by_sequence[i] - 1);
    bl_lazy_unmap(by_sequence, range * sizeof *by_sequence);
    return direct;
}

int bl_store_recover(bl_store *store)
{
    if (!store->found_count)
        return 0;
    store->sequence = store->newest;
    int disputed = store->space_disputed || store->key_disputed;
    int dense = (store->newest - store->oldest) / BL_STORE_SPARSE < store->found_count;
    if (!disputed && dense && bl_store_enter_direct(store))
        return 0;
    return bl_store_enter_sorted(store);
}

void bl_store_stat_read(bl_store *store, bl_store_stat *out)
{
    bl_extents_stat space;
    pthread_mutex_lock(&store->lock);
    *out = store->stat;
    bl_extents_count(store->extents, &space);
    out->used_bytes = space.used_bytes;
    for (uint64_t sector = 0; (sector = bl_bitset_next(&store->dirty, sector)) != BL_BITSET_NONE;
         sector++)
        out->dirty_count++;
    pthread_mutex_unlock(&store->lock);
}
