/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Verbs that break the rules of coherence/coherence.h on purpose: plain stores into the cache
 * without a flush, and plain loads without an invalidation, as a program on coherent memory would
 * use them. `beluga verify` tests with them whether the memory is coherent between its hosts. Only
 * litmus.c may include this file. Fences are those of coherence/coherence.h.
 */
#ifndef BL_VERIFY_RAW_H
#define BL_VERIFY_RAW_H

#include "coherence/coherence.h"

#ifdef BL_SIM

/* Store size bytes, at most widest of them at a time. */
static inline void bl_raw_store(const bl_memory *memory, uint64_t offset, const void *source,
                                uint32_t size, uint32_t widest)
{
    widest = widest > 8 ? 8 : widest; /* the widest untorn store in the simulator */
    for (uint32_t at = 0; at < size; at += widest)
        bl_sim_store_cached(memory, offset + at, (const uint8_t *)source + at, widest);
}

static inline void bl_raw_load(const bl_memory *memory, uint64_t offset, void *target,
                               uint32_t size)
{
    for (uint32_t at = 0; at < size; at += 8) {
        uint64_t word = bl_load64(memory, offset + at);
        memcpy((uint8_t *)target + at, &word, sizeof word);
    }
}

#else

/* Move with the widest instruction that this CPU has, at most widest bytes. */
static void bl_raw_move(void *target, const void *source, uint32_t size, uint32_t widest)
{
    uint32_t width = 8;
    while (width < size && width < widest && width < BL_LINE_SIZE)
        width *= 2;
    width = bl_move_width(width, bl_cpu_features());
    bl_compiler_barrier();
    for (uint32_t at = 0; at < size; at += width)
        bl_move((uint8_t *)target + at, (const uint8_t *)source + at, width);
    bl_compiler_barrier();
}

static inline void bl_raw_store(const bl_memory *memory, uint64_t offset, const void *source,
                                uint32_t size, uint32_t widest)
{
    bl_raw_move(bl_address(memory, offset), source, size, widest);
}

static inline void bl_raw_load(const bl_memory *memory, uint64_t offset, void *target,
                               uint32_t size)
{
    bl_raw_move(target, bl_address(memory, offset), size, size);
}

#endif

#endif
