/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The bytes of one block: its payload, then its checksums.
 */
#ifndef BL_PAYLOAD_H
#define BL_PAYLOAD_H

#include "format/block_limit.h"
#include "format/pool_format.h"

/* Return the size of a block in the pool: payload and checksums. A single checksum is not stored
 * there, since it is the entry's CRC of the checksums. */
static inline uint64_t bl_stored_size(uint32_t length, uint32_t chunk_size)
{
    uint64_t chunks = chunk_size ? ((uint64_t)length + chunk_size - 1) / chunk_size : 0;
    uint64_t padded = ((uint64_t)length + BL_LINE_SIZE - 1) & ~(uint64_t)(BL_LINE_SIZE - 1);
    return chunks > 1 ? padded + chunks * sizeof(uint32_t) : length;
}

/* Return 1 if a block of this length, with its checksums, lies within the data stripes. */
static inline int bl_block_within(const bl_geometry *g, uint64_t offset, uint32_t length,
                                  uint32_t chunk_size)
{
    uint64_t end = g->data_offset + g->stripe_count * BL_STRIPE_SIZE;
    uint64_t size = bl_stored_size(length, chunk_size); /* no overflow: two times 32 bits */
    return length > 0 && offset >= g->data_offset && offset < end && offset % BL_PAGE_SIZE == 0 &&
           size <= end - offset && size <= BL_BLOCK_SIZE_MAX;
}

/* Return the offset of the checksums: the first line after the payload. */
static inline uint64_t bl_checksums_offset(uint64_t offset, uint32_t length)
{
    return offset + (((uint64_t)length + BL_LINE_SIZE - 1) & ~(uint64_t)(BL_LINE_SIZE - 1));
}

#endif
