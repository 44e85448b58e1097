/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Decides which share's blocks are evicted for room.
 */
#ifndef BL_INDEX_ORDER_H
#define BL_INDEX_ORDER_H

#include "index/state.h"

/* Return 1 if there is only one eviction order. Then a search needs no bl_eviction. */
static inline int bl_eviction_plain(const bl_index *index)
{
    return index->share_count == 1 && index->hints == NULL;
}

/* Begin a search for room for the share of bl_eviction_set_share(): size bytes, or a line of the
 * table if size is 0. At first only blocks of shares that exceed their parts may be evicted. */
void bl_eviction_begin(bl_index *index, uint64_t size);

/* The search found no room: allow more blocks to be evicted. Returns 0 if all are allowed
 * already. */
int bl_eviction_widen(bl_index *index);

/* Return the first block to evict, and the one after a given block, or -1. A walk visits each block
 * that may be evicted once. */
int64_t bl_eviction_coldest(const bl_index *index);
int64_t bl_eviction_warmer(const bl_index *index, uint32_t number);

/* Return the block to evict for a line of the table, or -1. */
int64_t bl_eviction_first(bl_index *index);

/* Return 1 if this search may evict the block. */
int bl_eviction_has(const bl_index *index, uint32_t number);

#endif
