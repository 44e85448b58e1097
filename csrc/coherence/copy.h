/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Copies by address: into the pool with a checksum, and out of it.
 */
#ifndef BL_COPY_H
#define BL_COPY_H

#include <stddef.h>
#include <stdint.h>

#include "coherence/copy_isa.h"

/* Like bl_copy_stream; returns the CRC-32C of the bytes. seed is 0 or the CRC of the preceding
 * bytes. */
uint32_t bl_copy_stream_crc(uint32_t seed, void *target, const void *source, size_t size);

/* Copy bytes of any size and alignment. Returns the CRC-32C of the bytes now in target, even if
 * source changes meanwhile. */
uint32_t bl_copy_crc(uint32_t seed, void *target, const void *source, size_t size);

/* How bytes are copied into private memory. */
enum bl_copy_how {
    BL_COPY_CACHED,             /* into the cache, for a reader that reads them soon */
    BL_COPY_PAST                /* past the cache: nothing is evicted for the bytes, and no
                                 * target line is read; bl_copy_settle() completes the copy */
};

/* Copy bytes of any size and alignment out of the pool. If crc is not NULL, *crc is the CRC-32C of
 * the preceding bytes, and is extended by the bytes now in target, even if source changes
 * meanwhile. */
void bl_copy_out(void *target, const void *source, size_t size, uint32_t *crc,
                 enum bl_copy_how how);

/* Make copies of kind BL_COPY_PAST visible to other threads of this process. */
void bl_copy_settle(void);

#endif
