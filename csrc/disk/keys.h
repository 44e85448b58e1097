/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A hash table from keys to slots, with chaining. The keys themselves are only in the entries, so a
 * million keys need 12 MiB here instead of 32.
 *
 * The head of a list has 8 bytes: its first slot, and a Bloom filter of 32 bits, in which each key
 * sets two. So for most absent keys only the head is read.
 */
#ifndef BL_STORE_KEYS_H
#define BL_STORE_KEYS_H

#include <stdint.h>

#include "disk/entry.h"

typedef struct bl_keys {
    const bl_store_entry *entry; /* by slot */
    uint64_t *head;             /* by hash: slot + 1 in the lower half, filter in the upper */
    uint32_t *next;             /* by slot: the next slot of its list + 1; 0: none */
    uint64_t mask;              /* lists - 1 */
    uint32_t slot_count;
    uint64_t seed[2];
} bl_keys;

/* Create the table for the keys of slot_count entries. Returns 0 or -errno; bl_keys_destroy() is
 * allowed after an error. */
int bl_keys_create(bl_keys *keys, const bl_store_entry *entry, uint32_t slot_count);
void bl_keys_destroy(bl_keys *keys);

/* Allocate the memory for the keys of the slots below slot_count before they are added. */
void bl_keys_expect(bl_keys *keys, uint32_t slot_count);

/* Return the slot of a key, or -1. */
int64_t bl_keys_find(const bl_keys *keys, const uint64_t key[2]);

/* Prefetch what adding this key accesses. */
void bl_keys_prefetch(const bl_keys *keys, const uint64_t key[2]);

/* Add the key in a slot's entry. It must not change until bl_keys_remove(). Returns 0, or -EEXIST:
 * another slot has it. */
int bl_keys_add(bl_keys *keys, uint32_t slot);

/* Remove the key of a slot. */
void bl_keys_remove(bl_keys *keys, uint32_t slot);

/* Remove all keys. */
void bl_keys_clear(bl_keys *keys);

#endif
