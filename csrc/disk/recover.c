/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Recovery of a store's index from the entries in its file. The threads that read sectors check
 * their entries, all checksums of a sector in parallel. One thread follows, sector by sector: each
 * valid entry claims its space, its key and its position in the eviction order.
 *
 * The eviction order is by sequence number. The sequences of stored blocks are close together, so a
 * table indexed by their low bits usually has them sorted. If two blocks collide in the table, or
 * claim the same space or key, all blocks are sorted instead and claim again, the newest first.
 */
#include <errno.h>
#include <string.h>

#include "base/lazy.h"
#include "base/minmax.h"
#include "coherence/crc32c.h"
#include "coherence/instructions.h"
#include "index/recover_sort.h"
#include "disk/slots.h"

enum {
    BL_STORE_SPARSE = 4,        /* the fewest table elements per slot */
    BL_STORE_ENTERED = 256      /* blocks to add to the eviction order at a time */
};

static size_t bl_recovery_size(const bl_recovery *recovery)
{
    return (recovery->mask + 1) * sizeof *recovery->by_sequence;
}

/* Return the end of a range of sectors. */
static uint32_t bl_sectors_end(const bl_store *store, uint32_t sector, uint32_t count)
{
    return (uint32_t)bl_min((uint64_t)sector + count, store->slot_count / BL_STORE_SECTOR_SLOTS);
}

void bl_store_expect(bl_store *store, uint32_t sector_count)
{
    uint32_t slots = bl_sectors_end(store, 0, sector_count) * BL_STORE_SECTOR_SLOTS;
    bl_recovery *recovery = &store->recovery;
    uint64_t places = 1;
    while (places < (uint64_t)slots * BL_STORE_SPARSE)
        places *= 2;
    *recovery = (bl_recovery){.mask = places - 1, .oldest = UINT64_MAX};
    recovery->by_sequence = bl_lazy_map_dense(bl_recovery_size(recovery));
    bl_lazy_populate(store->slot, slots * sizeof *store->slot);
    bl_keys_expect(&store->keys, slots);
    bl_evict_expect(store->order, slots);
}

/* ---- Entries */

static int bl_entry_is_blank(const bl_store_entry *entry)
{
    uint64_t words[BL_STORE_ENTRY_SIZE / 8], any = 0;
    memcpy(words, entry, sizeof words);
    for (size_t i = 0; i < BL_STORE_ENTRY_SIZE / 8; i++)
        any |= words[i];
    return any == 0;
}

static int bl_entry_is_whole(const bl_store *store, const bl_store_entry *entry, uint32_t crc)
{
    return entry->entry_crc == crc && entry->sequence && bl_block_size(entry->length) &&
           entry->stripe < store->stripe_count;
}

/* Claim a block's space. Returns 0 if another block has some of it. */
static inline int bl_slot_claim_space(bl_store *store, uint32_t number)
{
    if (bl_pages_take(store->pages, bl_slot_offset(store, number),
                       bl_block_size(store->entry[number].length)) < 0)
        return 0;
    bl_slot_link(store, number);
    return 1;
}

/* Add a block to the table by sequence. */
static inline void bl_recovery_add(bl_recovery *recovery, uint32_t number, uint64_t sequence)
{
    recovery->oldest = bl_min(recovery->oldest, sequence);
    recovery->newest = sequence > recovery->newest ? sequence : recovery->newest;
    if (recovery->by_sequence)
        recovery->by_sequence[sequence & recovery->mask] = number + 1;
}

/* Count damaged entries of a sector, which must be rewritten. */
static void bl_sector_damaged(bl_store *store, uint32_t sector, uint32_t count)
{
    pthread_mutex_lock(&store->lock);
    store->stat.damaged_count += count;
    bl_bitset_add(&store->dirty, sector);
    pthread_mutex_unlock(&store->lock);
}

/* Check the entries of a sector. */
static void bl_sector_check(bl_store *store, uint32_t sector, uint32_t id_crc)
{
    uint32_t first = sector * BL_STORE_SECTOR_SLOTS, damaged = 0;
    const bl_store_entry *entry = &store->entry[first];
    uint64_t number[BL_STORE_SECTOR_SLOTS], whole = 0;
    uint32_t crc[BL_STORE_SECTOR_SLOTS];
    for (uint32_t i = 0; i < BL_STORE_SECTOR_SLOTS; i++) {
        bl_prefetch(&entry[BL_STORE_SECTOR_SLOTS + i]);
        number[i] = first + i;
        crc[i] = id_crc;
    }
    bl_crc32c_each(crc, number, sizeof *number, sizeof *number, BL_STORE_SECTOR_SLOTS);
    bl_crc32c_each(crc, entry, sizeof *entry, offsetof(bl_store_entry, entry_crc),
                   BL_STORE_SECTOR_SLOTS);
    for (uint32_t i = 0; i < BL_STORE_SECTOR_SLOTS; i++) {
        if (bl_entry_is_whole(store, &entry[i], crc[i]))
            whole |= 1ull << i;
        else
            damaged += !bl_entry_is_blank(&entry[i]);
    }
    store->whole[sector] = whole;
    if (damaged)
        bl_sector_damaged(store, sector, damaged);
}

/* Make the blocks of a sector's valid entries live, and claim their space and keys. */
static void bl_sector_claim(bl_store *store, uint32_t sector)
{
    uint32_t first = sector * BL_STORE_SECTOR_SLOTS;
    const bl_store_entry *entry = &store->entry[first];
    bl_recovery *recovery = &store->recovery;
    uint64_t whole = store->whole[sector];
    for (uint64_t rest = whole; rest; rest &= rest - 1) {
        uint32_t i = (uint32_t)__builtin_ctzll(rest);
        bl_prefetch(&entry[BL_STORE_SECTOR_SLOTS + i]);
        bl_keys_prefetch(&store->keys, entry[i].key);
    }
    bl_bitset_remove_word(&store->free, sector, whole);
    recovery->found_count += (uint32_t)__builtin_popcountll(whole);
    for (; whole; whole &= whole - 1) {
        uint32_t number = first + (uint32_t)__builtin_ctzll(whole);
        bl_recovery_add(recovery, number, store->entry[number].sequence);
        bl_slot_live(store, number);
        if (!recovery->disputed)
            recovery->disputed = !bl_slot_claim_space(store, number) ||
                                 bl_keys_add(&store->keys, number) < 0;
    }
}

uint8_t *bl_store_entries(bl_store *store) { return (uint8_t *)store->entry; }

void bl_store_check(bl_store *store, uint32_t sector, uint32_t count)
{
    uint32_t id_crc = bl_crc32c(0, &store->id, sizeof store->id);
    for (uint32_t end = bl_sectors_end(store, sector, count); sector < end; sector++)
        bl_sector_check(store, sector, id_crc);
}

void bl_store_claim(bl_store *store, uint32_t sector, uint32_t count)
{
    for (uint32_t end = bl_sectors_end(store, sector, count); sector < end; sector++)
        bl_sector_claim(store, sector);
}

/* ---- The order */

/* Return 1 if no two blocks collided in the table. */
static int bl_recovery_is_sorted(const bl_recovery *recovery)
{
    uint64_t last = recovery->newest - recovery->oldest, count = 0;
    if (!recovery->by_sequence || last > recovery->mask)
        return 0;
    for (uint64_t i = 0; i <= last; i++)
        count += recovery->by_sequence[(recovery->oldest + i) & recovery->mask] != 0;
    return count == recovery->found_count;
}

/* Add all blocks to the eviction order, in the order of the table. */
static void bl_store_enter_direct(bl_store *store)
{
    const bl_recovery *recovery = &store->recovery;
    uint32_t slots[BL_STORE_ENTERED], count = 0;
    uint64_t last = recovery->newest - recovery->oldest;
    for (uint64_t i = 0; i <= last; i++) {
        uint32_t place = recovery->by_sequence[(recovery->oldest + i) & recovery->mask];
        slots[count] = place - 1;
        count += place != 0;
        if (count == BL_STORE_ENTERED || i == last) {
            bl_evict_enter(store->order, slots, count);
            count = 0;
        }
    }
}

/* Undo all claims. Returns 0 or -ENOMEM. */
static int bl_store_claim_none(bl_store *store)
{
    memset(store->stripe_slots, 0, (store->stripe_count + 1) * sizeof *store->stripe_slots);
    bl_bitset_fill(&store->free, store->slot_count);
    bl_keys_clear(&store->keys);
    bl_pages_destroy(store->pages);
    store->pages = NULL;
    int rc = bl_pages_create(&store->pages, store->data_offset, store->stripe_count);
    if (rc == 0)
        bl_pages_defer(store->pages);
    return rc;
}

/* Claim with the newest first, and drop blocks that conflict with a newer one. Returns how many
 * remain in the list, the oldest first. */
static uint32_t bl_store_claim_newest(bl_store *store, bl_recovered *sorted, uint32_t found)
{
    uint32_t left = found;
    for (uint32_t i = found; i-- > 0;) {
        uint32_t number = sorted[i].number;
        int space = bl_slot_claim_space(store, number);
        if (space)
            bl_bitset_remove(&store->free, number);
        if (space && bl_keys_add(&store->keys, number) == 0) {
            sorted[--left] = sorted[i];
            continue;
        }
        if (space)
            bl_slot_free(store, number);
        store->slot[number].state = BL_SLOT_FREE;
        store->stat.block_count--;
        store->stat.block_bytes -= store->entry[number].length;
        store->stat.damaged_count++;
        bl_sector_spoil(store, number);
    }
    memmove(sorted, sorted + left, (found - left) * sizeof *sorted);
    return found - left;
}

/* Sort the blocks, drop those that conflict with a newer one, and add the others to the eviction
 * order. Returns 0 or -ENOMEM. */
static int bl_store_enter_sorted(bl_store *store)
{
    uint32_t count = 0, found = store->recovery.found_count;
    size_t size = 2 * ((size_t)found + 1) * sizeof(bl_recovered);
    bl_recovered *list = bl_lazy_map_dense(size);
    if (!list)
        return -ENOMEM;
    for (uint32_t number = 0; count < found; number++)
        if (store->slot[number].state == BL_SLOT_LIVE)
            list[count++] = (bl_recovered){store->entry[number].sequence, number};
    bl_recovered *sorted = bl_recovered_sort(list, list + found, found);
    int rc = 0;
    if (store->recovery.disputed) {
        rc = bl_store_claim_none(store);
        count = rc ? 0 : bl_store_claim_newest(store, sorted, found);
    }
    for (uint32_t i = 0; i < count; i++)
        bl_evict_touch(store->order, sorted[i].number);
    bl_lazy_unmap(list, size);
    return rc;
}

int bl_store_recover(bl_store *store)
{
    bl_recovery *recovery = &store->recovery;
    int rc = 0;
    if (recovery->found_count) {
        store->sequence = recovery->newest;
        if (recovery->disputed || !bl_recovery_is_sorted(recovery))
            rc = bl_store_enter_sorted(store);
        else
            bl_store_enter_direct(store);
    }
    bl_pages_settle(store->pages);
    bl_lazy_unmap(recovery->by_sequence, bl_recovery_size(recovery));
    *recovery = (bl_recovery){0};
    return rc;
}
