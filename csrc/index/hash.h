/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The hash index: key -> block number, in the server's DRAM. A lookup nearly always costs one cache
 * miss; prefetches overlap the misses of a chain of keys.
 */
#ifndef BL_INDEX_H
#define BL_INDEX_H

#include "format/pool_format.h"

enum { BL_NO_BLOCK = -1 };

typedef struct bl_hash bl_hash;

/* Create an index with room for count_max keys. Returns 0 or -errno. */
int bl_hash_create(bl_hash **out, uint32_t count_max);
void bl_hash_destroy(bl_hash *hash);

void bl_hash_prefetch(const bl_hash *hash, const uint64_t key[2]);

/* Return the block of a key, or BL_NO_BLOCK. */
int64_t bl_hash_find(const bl_hash *hash, const uint64_t key[2]);

/* Add a key. Returns 0, -EEXIST or -ENOSPC (count_max keys). */
int bl_hash_add(bl_hash *hash, const uint64_t key[2], uint32_t block);

/* Remove a key. Returns 0 or -ENOENT. */
int bl_hash_remove(bl_hash *hash, const uint64_t key[2]);

uint32_t bl_hash_count(const bl_hash *hash);

#endif
