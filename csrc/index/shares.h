/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Counts the use of each share: the space of its blocks, and their lines of the block table. The
 * fingerprint in an entry determines the share, so a successor counts the same. Tenants without a
 * share of their own use the first share, which is the rest of the pool.
 *
 * With only that share nothing is counted: its use is that of the pool.
 */
#ifndef BL_SHARES_H
#define BL_SHARES_H

#include "index/state.h"

/* Assign the whole pool to the first share, until bl_index_share(). */
void bl_shares_begin(bl_index *index);

/* Return the share of blocks with this fingerprint. */
uint32_t bl_share_of(const bl_index *index, uint64_t fingerprint);

/* Count a block that is allocated (step 1) or freed (-1), if there are several shares. */
void bl_share_use(bl_index *index, uint32_t number, int step);

/* Return by how many bytes a share would exceed its part with size more bytes; negative: it would
 * not. */
int64_t bl_share_excess(const bl_index *index, uint32_t share, uint64_t size);

/* The same for the lines of the block table. */
int64_t bl_share_lines_excess(const bl_index *index, uint32_t share, uint64_t count);

/* The next search for room is for blocks with this fingerprint. */
static inline void bl_eviction_set_share(bl_index *index, uint64_t fingerprint)
{
    index->turn.requester = bl_share_of(index, fingerprint);
}

/* Remove a block from the list of its stripe, and from its share's use. */
static inline void bl_block_unplace(bl_index *index, uint32_t number)
{
    uint64_t stripe = bl_stripe_of(index, index->blocks[number].offset);
    bl_list_remove(index, &index->stripe_blocks[stripe], BL_LIST_STRIPE, number);
    if (index->share_count > 1)
        bl_share_use(index, number, -1);
}

#endif
