/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Retained blocks (tasks), which are exempt from eviction.
 */
#ifndef BL_INDEX_RETAINED_H
#define BL_INDEX_RETAINED_H

#include "index/state.h"

/* Return 1 if no further block of stored bytes may be retained. Check this before anything is
 * evicted for the block. */
int bl_retained_full(const bl_index *index, uint64_t stored);

/* Exempt a block that has space from eviction until it is removed. Returns 0 or
 * -BL_ERROR_QUEUE_FULL. */
int bl_block_retain(bl_index *index, uint32_t number);

/* End the exemption of a block that is being removed, if it has one. */
void bl_block_unretain(bl_index *index, uint32_t number);

#endif
