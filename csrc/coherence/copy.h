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

/* Do what bl_copy_stream does and return the CRC-32C of the bytes; seed is 0 or the result for the
 * bytes before. */
uint32_t bl_copy_stream_crc(uint32_t seed, void *target, const void *source, size_t size);

/* Copy bytes of any size and alignment and return the CRC-32C of what now lies in target, even if
 * source changes meanwhile. */
uint32_t bl_copy_crc(uint32_t seed, void *target, const void *source, size_t size);

/* The way in which bytes are copied into private memory. */
enum bl_copy_how {
    BL_COPY_CACHED,             /* into the cache, for a reader that follows soon */
    BL_COPY_PAST                /* around the cache: nothing is evicted for the bytes, and no target
                                 * line is fetched; bl_copy_settle() completes it */
};

/* Copy bytes of any size and alignment out of the pool. If crc is not NULL, it holds the CRC-32C of
 * the bytes before; the bytes that now lie in target are added, even if source changes
 * meanwhile. */
void bl_copy_out(void *target, const void *source, size_t size, uint32_t *crc,
                 enum bl_copy_how how);

/* Make copies of kind BL_COPY_PAST visible to other threads of this process. */
void bl_copy_settle(void);

#endif
