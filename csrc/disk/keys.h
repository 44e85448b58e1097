/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Finds the slot of a key: lists of slots by the hash of their keys. The keys themselves are in the
 * entries, so a million keys have 12 MiB here and not 32.
 *
 * The head of a list is 8 bytes: its first slot, and 32 bits, of which each key that was added
 * since the list was empty has set two. So the head alone tells of most keys that they are not in
 * the list.
 */
#ifndef BL_STORE_KEYS_H
#define BL_STORE_KEYS_H

#include <stdint.h>

#include "disk/entry.h"

typedef struct bl_keys {
    const bl_store_entry *entry; /* by slot */
    uint64_t *head;             /* by hash: the lower half is a slot + 1, the upper the bits */
    uint32_t *next;             /* by slot: the next slot of its list + 1; 0: none */
    uint64_t mask;              /* lists - 1 */
    uint32_t slot_count;
    uint64_t seed[2];
} bl_keys;

/* Prepare for the keys of slot_count entries: 0 or -errno; destroy may follow in either case. */
int bl_keys_create(bl_keys *keys, const bl_store_entry *entry, uint32_t slot_count);
void bl_keys_destroy(bl_keys *keys);

/* Make the memory for the keys of the slots below slot_count, which are added soon. */
void bl_keys_expect(bl_keys *keys, uint32_t slot_count);

/* Return the slot of a key, or -1. */
int64_t bl_keys_find(const bl_keys *keys, const uint64_t key[2]);

/* Prefetch what adding this key takes. */
void bl_keys_prefetch(const bl_keys *keys, const uint64_t key[2]);

/* Add the key in a slot's entry: 0, or -EEXIST: another slot has it. The key stays as it is until
 * remove. */
int bl_keys_add(bl_keys *keys, uint32_t slot);

/* Remove the key of a slot, which was added. */
void bl_keys_remove(bl_keys *keys, uint32_t slot);

/* Remove all keys. */
void bl_keys_clear(bl_keys *keys);

#endif
