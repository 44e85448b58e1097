/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * An entry of a store's index on disk: 64 bytes with the key and the place of a block.
 *
 *   0 key 16 | 16 fingerprint 8 | 24 sequence 8 | 32 length 4, chunk_size 4
 *   40 stripe 4, extent_stripes 2, place 2 | 48 payload_crc 4, reserved 4 | 56 zero 4
 *   60 entry_crc 4
 *
 * entry_crc covers the bytes before it and is seeded with the store's id and the slot, so an entry
 * of another store, or one written to a wrong place, counts as damaged. payload_crc is seeded with
 * the key, so the bytes of another block do not match. A block begins at page `place` of its
 * stripe. Earlier releases cut extents of extent_stripes stripes into blocks of one size: in their
 * entries the block begins at block `place` of the extent that begins with its stripe. They treat
 * an entry with extent_stripes 0 as damaged, that is, as a miss.
 */
#ifndef BL_STORE_ENTRY_H
#define BL_STORE_ENTRY_H

#include <stddef.h>

#include "api/coherence.h"
#include "api/disk.h"

typedef struct bl_store_entry {
    uint64_t key[2];
    uint64_t fingerprint;
    uint64_t sequence;          /* greater is newer; 0: no entry */
    uint32_t length;
    uint32_t chunk_size;
    uint32_t stripe;
    uint16_t extent_stripes;    /* 0, except in entries of earlier releases */
    uint16_t place;
    uint32_t payload_crc;
    uint32_t reserved[2];
    uint32_t entry_crc;
} bl_store_entry;

_Static_assert(sizeof(bl_store_entry) == BL_STORE_ENTRY_SIZE, "an entry has 64 bytes");

static inline uint32_t bl_store_key_crc(const uint64_t key[2])
{
    return bl_crc32c(0, key, 2 * sizeof *key);
}

static inline uint32_t bl_store_entry_crc(const bl_store_entry *entry, uint64_t id, uint32_t slot)
{
    uint64_t seed[2] = {id, slot};
    return bl_crc32c(bl_crc32c(0, seed, sizeof seed), entry, offsetof(bl_store_entry, entry_crc));
}

#endif
