/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The index of one file of the disk tier (api/disk.h): pure memory, with no I/O and no clock.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/lazy.h"
#include "base/minmax.h"
#include "disk/slots.h"

/* ---- Creation and destruction */

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
    bl_pages_destroy(store->pages);
    bl_victims_destroy(store->victims);
    bl_evict_destroy(store->order);
    bl_keys_destroy(&store->keys);
    bl_lazy_unmap(store->recovery.by_sequence,
                  (store->recovery.mask + 1) * sizeof *store->recovery.by_sequence);
    bl_lazy_unmap(store->bits, bl_store_bits_size(store));
    bl_lazy_unmap(store->stripe_slots, (store->stripe_count + 1) * sizeof *store->stripe_slots);
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
    store->stripe_slots = bl_lazy_map((stripe_count + 1) * sizeof *store->stripe_slots);
    store->bits = bl_lazy_map(bl_store_bits_size(store));
    int rc = !store->entry || !store->slot || !store->stripe_slots || !store->bits ? -ENOMEM : 0;
    if (!rc)
        rc = bl_keys_create(&store->keys, store->entry, slot_count);
    if (!rc)
        rc = bl_pages_create(&store->pages, data_offset, stripe_count);
    if (!rc)
        rc = bl_victims_create(&store->victims, slot_count);
    if (!rc)
        rc = bl_evict_create(&store->order, slot_count, policy);
    if (rc) {
        bl_store_destroy(store);
        return rc;
    }
    bl_pages_defer(store->pages); /* until bl_store_recover() */
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

void bl_sector_spoil(bl_store *store, uint32_t slot)
{
    bl_bitset_add(&store->dirty, slot / BL_STORE_SECTOR_SLOTS);
}

void bl_slot_free(bl_store *store, uint32_t number)
{
    bl_slot *slot = &store->slot[number];
    uint64_t offset = bl_slot_offset(store, number);
    if (slot->previous)
        store->slot[slot->previous - 1].next = slot->next;
    else
        store->stripe_slots[(offset - store->data_offset) / BL_STRIPE_SIZE] = slot->next;
    if (slot->next)
        store->slot[slot->next - 1].previous = slot->previous;
    bl_pages_give(store->pages, offset, bl_block_size(store->entry[number].length));
    slot->state = BL_SLOT_FREE;
    slot->pins = 0;
    bl_bitset_add(&store->free, number);
}

/* Hide a live block from readers. */
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

/* Queue an evicted key for bl_store_take_evicted(); dropped if there is no memory. */
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

/* ---- Space */

/* Return 1 if a block can be evicted now. */
static int bl_slot_may_go(const bl_store *store, uint32_t number)
{
    return store->slot[number].state == BL_SLOT_LIVE && store->slot[number].pins == 0;
}

static int64_t bl_slot_coldest(void *store)
{
    return bl_evict_coldest(((bl_store *)store)->order);
}

static int64_t bl_slot_warmer(void *store, uint32_t number)
{
    return bl_evict_warmer(((bl_store *)store)->order, number);
}

static int64_t bl_slot_first(void *store, uint64_t stripe)
{
    return (int64_t)((bl_store *)store)->stripe_slots[stripe] - 1;
}

static int64_t bl_slot_next(void *store, uint32_t number)
{
    return (int64_t)((bl_store *)store)->slot[number].next - 1;
}

static bl_resident bl_slot_look(void *context, uint32_t number)
{
    const bl_store *store = context;
    return (bl_resident){bl_slot_offset(store, number), bl_block_size(store->entry[number].length),
                         (uint32_t)bl_slot_may_go(store, number)};
}

/* Find space for a block; if there is none, evict the coldest blocks that make room. Returns 0,
 * with nothing evicted, if that is impossible. */
static int bl_space_find(bl_store *store, uint32_t size, uint64_t *offset)
{
    bl_residents residents = {store,         store->data_offset, bl_slot_coldest, bl_slot_warmer,
                              bl_slot_first, bl_slot_next,       bl_slot_look};
    const uint32_t *slots;
    if (bl_pages_find(store->pages, size, offset) == 0)
        return 1;
    uint32_t count =
        bl_victims_choose(store->victims, store->pages, &residents, size, &slots, offset);
    for (uint32_t i = 0; i < count; i++)
        bl_slot_evict(store, slots[i]);
    return count > 0;
}

/* Take the lowest free slot, so that the used part of the index stays short. Returns -1 if there is
 * none. */
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

/* Allocate a slot and space for a new block. Returns the slot, or -1. Space comes first: an
 * eviction for space also frees a slot. */
static int64_t bl_slot_reserve(bl_store *store, const bl_store_record *record)
{
    uint32_t size = bl_block_size(record->length);
    uint64_t offset;
    if (!size || !bl_space_find(store, size, &offset))
        return -1;
    int64_t number = bl_slot_take(store);
    if (number < 0)
        return -1;
    bl_pages_take(store->pages, offset, size);
    uint64_t inside = offset - store->data_offset;
    store->entry[number] = (bl_store_entry){
        .key = {record->key[0], record->key[1]},
        .fingerprint = record->fingerprint,
        .length = record->length,
        .chunk_size = record->chunk_size,
        .stripe = (uint32_t)(inside / BL_STRIPE_SIZE),
        .place = (uint16_t)(inside % BL_STRIPE_SIZE / BL_PAGE_SIZE),
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
    uint32_t count = (uint32_t)bl_min(store->evicted_count, room);
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
    for (uint32_t i = count; i-- > 0;) {        /* recovery orders by sequence: a parent is newer */
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

/* Free a slot that was never visible to readers. */
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

void bl_store_mark_dirty(bl_store *store, const uint32_t *sectors, uint32_t count)
{
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < count; i++)
        if (sectors[i] < store->slot_count / BL_STORE_SECTOR_SLOTS)
            bl_bitset_add(&store->dirty, sectors[i]);
    pthread_mutex_unlock(&store->lock);
}

void bl_store_stat_read(bl_store *store, bl_store_stat *out)
{
    bl_pages_stat space;
    pthread_mutex_lock(&store->lock);
    *out = store->stat;
    bl_pages_count(store->pages, &space);
    out->used_bytes = space.used_bytes;
    for (uint64_t sector = 0; (sector = bl_bitset_next(&store->dirty, sector)) != BL_BITSET_NONE;
         sector++)
        out->dirty_count++;
    pthread_mutex_unlock(&store->lock);
}
