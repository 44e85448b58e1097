/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Streaming copies by address, for each instruction set, chosen once (coherence/copy.c).
 */
#ifndef BL_COPY_H
#define BL_COPY_H

#include <stddef.h>
#include <stdint.h>

/* Whole lines by non-temporal stores. target is line-aligned, size a multiple of a line, source
 * of any alignment. No fence: the caller's next bl_fence_store covers it. */
void bl_copy_stream(void *target, const void *source, size_t size);

/* The same, and the CRC-32C of the bytes; seed is 0 or the result for those before. */
uint32_t bl_copy_stream_crc(uint32_t seed, void *target, const void *source, size_t size);

/* A plain copy of any size and alignment, and the CRC-32C of what has come to lie in target,
 * whatever becomes of source meanwhile. */
uint32_t bl_copy_crc(uint32_t seed, void *target, const void *source, size_t size);

/* How bytes come to lie in private memory. */
enum bl_copy_how {
    BL_COPY_CACHED,             /* for who reads them next */
    BL_COPY_PAST                /* round the cache, which they would fill and which is not asked for
                                 * lines that are written over; bl_copy_settle() ends it */
};

/* Out of the pool, of any size and alignment. crc, if it is not NULL: of the bytes before, then of
 * what has come to lie in target too, whatever becomes of source meanwhile. */
void bl_copy_out(void *target, const void *source, size_t size, uint32_t *crc,
                 enum bl_copy_how how);

/* Other threads of this process see what was copied past the cache. */
void bl_copy_settle(void);

#endif
