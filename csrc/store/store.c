/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The index of one file of the disk tier (api/store.h): pure memory, with no I/O and no clock.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/lazy.h"
#include "base/minmax.h"
#include "space/fit.h"
#include "store/slots.h"

enum { BL_STORE_LOOK_MAX = 1024 };  /* cold blocks looked at to make room for one block */

/* ---- Life */

static size_t bl_store_bits_size(const bl_store *store)
{
    uint64_t sectors = store->slot_count / BL_STORE_SECTOR_SLOTS;
    uint64_t words = bl_bitset_words(store->slot_count) + bl_bitset_words(sectors) + sectors;
    return words * sizeof(uint64_t);
}

void bl_store_destroy(bl_store *store)
{
    if (!store)
        return;
    free(store->evicted);
    bl_extents_destroy(store->extents);
    bl_evict_destroy(store->order);
    bl_keys_destroy(&store->keys);
    bl_lazy_unmap(store->recovery.by_sequence,
                  (store->recovery.mask + 1) * sizeof *store->recovery.by_sequence);
    bl_lazy_unmap(store->bits, bl_store_bits_size(store));
    bl_lazy_unmap(store->extent_slots, (store->stripe_count + 1) * sizeof *store->extent_slots);
    bl_lazy_unmap(store->slot, store->slot_count * sizeof *store->slot);
    bl_lazy_unmap(store->entry, store->slot_count * sizeof *store->entry);
    pthread_mutex_destroy(&store->lock);
    free(store);
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
        rc = bl_keys_create(&store->keys, store->entry, slot_count);
    if (!rc)
        rc = bl_extents_create(&store->extents, data_offset, stripe_count);
    if (!rc)
        rc = bl_evict_create(&store->order, slot_count, policy);
    if (rc) {
        bl_store_destroy(store);
        return rc;
    }
    bl_bitset_make(&store->free, store->bits, slot_count);
    bl_bitset_make(&store->dirty, store->bits + bl_bitset_words(slot_count),
                   slot_count / BL_STORE_SECTOR_SLOTS);
    store->whole = store->bits + bl_bitset_words(slot_count) +
                   bl_bitset_words(slot_count / BL_STORE_SECTOR_SLOTS);
    bl_bitset_fill(&store->free, slot_count);
    store->stat.slot_count = slot_count;
    store->stat.data_bytes = stripe_count * BL_STRIPE_SIZE;
    *out = store;
    return 0;
}

/* ---- Slots and their space */

uint64_t bl_slot_offset(const bl_store *store, uint32_t number)
{
    const bl_store_entry *entry = &store->entry[number];
    return store->data_offset + (uint64_t)entry->first_stripe * BL_STRIPE_SIZE +
           (uint64_t)entry->block_index * bl_block_size(entry->length);
}

void bl_sector_spoil(bl_store *store, uint32_t slot)
{
    bl_bitset_add(&store->dirty, slot / BL_STORE_SECTOR_SLOTS);
}

void bl_slot_free(bl_store *store, uint32_t number)
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
    bl_keys_remove(&store->keys, number);
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
    bl_keys_add(&store->keys, (uint32_t)number);
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
    int64_t number = bl_keys_find(&store->keys, key);
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
        int64_t number = bl_keys_find(&store->keys, &keys[2 * i]);
        uint32_t state = number < 0 ? (uint32_t)BL_SLOT_FREE : store->slot[number].state;
        if (state == BL_SLOT_LIVE) {
            bl_slot_drop(store, (uint32_t)number);
            removed++;
        } else if (state == BL_SLOT_WRITING || state == BL_SLOT_FILLED) {
            store->slot[number].state = BL_SLOT_REVOKED;
            bl_sector_spoil(store, (uint32_t)number);
        }
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
        int64_t number = bl_keys_find(&store->keys, records[i].key);
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

/* Give back a slot that no reader has found. */
static void bl_slot_give_up(bl_store *store, uint32_t number)
{
    bl_keys_remove(&store->keys, number);
    bl_slot_free(store, number);
}

void bl_store_commit(bl_store *store, const bl_store_place *places, uint32_t count)
{
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = count; i-- > 0;) {
        uint32_t number = places[i].slot;
        if (places[i].state == BL_STORE_GRANTED && store->slot[number].state == BL_SLOT_REVOKED)
            bl_slot_give_up(store, number);
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
        else if (slot->state != BL_SLOT_WRITING && slot->state != BL_SLOT_REVOKED)
            continue;
        bl_slot_give_up(store, places[i].slot);
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
