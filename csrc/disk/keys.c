/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The hash table of disk/keys.h, with between one and two lists per slot.
 */
#include "disk/keys.h"

#include <errno.h>
#include <string.h>

#include "base/lazy.h"
#include "base/minmax.h"
#include "base/seed.h"
#include "coherence/instructions.h"

static size_t bl_keys_heads_size(const bl_keys *keys)
{
    return (keys->mask + 1) * sizeof *keys->head;
}

int bl_keys_create(bl_keys *keys, const bl_store_entry *entry, uint32_t slot_count)
{
    *keys = (bl_keys){.entry = entry, .slot_count = slot_count};
    uint64_t list_count = 1;
    while (list_count < slot_count)
        list_count *= 2;
    keys->mask = list_count - 1;
    keys->head = bl_lazy_map_dense(bl_keys_heads_size(keys));
    keys->next = bl_lazy_map_dense(slot_count * sizeof *keys->next);
    return !keys->head || !keys->next ? -ENOMEM : bl_hash_seed(keys->seed);
}

void bl_keys_destroy(bl_keys *keys)
{
    bl_lazy_unmap(keys->head, bl_keys_heads_size(keys));
    bl_lazy_unmap(keys->next, keys->slot_count * sizeof *keys->next);
}

void bl_keys_expect(bl_keys *keys, uint32_t slot_count)
{
    uint64_t lists = keys->mask + 1;
    bl_lazy_populate(keys->head, bl_min(lists, 8ull * slot_count) * sizeof *keys->head);
    bl_lazy_populate(keys->next, slot_count * sizeof *keys->next);
}

/* Return the filter bits of a key in the head of its list. */
static inline uint64_t bl_keys_bits(uint64_t hash)
{
    return 1ull << 32 << (hash >> 59) | 1ull << 32 << (hash >> 54 & 31);
}

/* Return the slot of a key in the list that starts at slot at - 1, or -1. */
static int64_t bl_keys_search(const bl_keys *keys, uint32_t at, const uint64_t key[2])
{
    for (; at; at = keys->next[at - 1]) {
        const uint64_t *other = keys->entry[at - 1].key;
        if (other[0] == key[0] && other[1] == key[1])
            return (int64_t)at - 1;
    }
    return -1;
}

int64_t bl_keys_find(const bl_keys *keys, const uint64_t key[2])
{
    uint64_t hash = bl_key_hash(keys->seed, key), head = keys->head[hash & keys->mask];
    uint64_t bits = bl_keys_bits(hash);
    return (head & bits) == bits ? bl_keys_search(keys, (uint32_t)head, key) : -1;
}

void bl_keys_prefetch(const bl_keys *keys, const uint64_t key[2])
{
    bl_prefetch(&keys->head[bl_key_hash(keys->seed, key) & keys->mask]);
}

int bl_keys_add(bl_keys *keys, uint32_t slot)
{
    const uint64_t *key = keys->entry[slot].key;
    uint64_t hash = bl_key_hash(keys->seed, key), bits = bl_keys_bits(hash);
    uint64_t *head = &keys->head[hash & keys->mask], before = *head;
    if ((before & bits) == bits && bl_keys_search(keys, (uint32_t)before, key) >= 0)
        return -EEXIST;
    keys->next[slot] = (uint32_t)before;
    *head = (before >> 32 << 32) | bits | (slot + 1);
    return 0;
}

void bl_keys_remove(bl_keys *keys, uint32_t slot)
{
    uint64_t *head = &keys->head[bl_key_hash(keys->seed, keys->entry[slot].key) & keys->mask];
    uint32_t at = (uint32_t)*head, next = keys->next[slot];
    if (at == slot + 1) {
        *head = next ? (*head >> 32 << 32) | next : 0;
        return;
    }
    while (keys->next[at - 1] != slot + 1)
        at = keys->next[at - 1];
    keys->next[at - 1] = next;
}

void bl_keys_clear(bl_keys *keys) { memset(keys->head, 0, bl_keys_heads_size(keys)); }
