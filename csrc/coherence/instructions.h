/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Includes the instructions of the target architecture, and adds what all architectures share:
 * prefetches and atomics on private words. The verbs (coherence.h) and the streaming copies are
 * built on these; the protocol calls verbs only.
 *
 * The header of an architecture defines:
 *   bl_store_fence_now, bl_full_fence_now, bl_compiler_barrier, bl_copied_to
 *   bl_prefetch_write
 *   bl_line_read, bl_line_store, bl_line_stream
 *   bl_streamed, bl_flush_choice, bl_flush_lines, bl_write_back_lines, bl_flush_fault
 *   bl_move_width, bl_move
 *   bl_settle_now, bl_pause_now, bl_interrupted_at, bl_ticks, bl_ticks_of_100_us
 *   bl_portal_move, bl_portal_enqueue, bl_monitor
 * Its sources are the files that begin with its name.
 */
#ifndef BL_INSTRUCTIONS_H
#define BL_INSTRUCTIONS_H

#include <stddef.h>
#include <stdint.h>

#include "api/coherence.h"
#include "format/pool_format.h"

#if defined(__x86_64__)
#include "coherence/x86.h"
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include "coherence/aarch64.h"
#else
#error "Beluga supports x86-64 and little-endian aarch64"
#endif

/* Prefetch private memory. The barrier prevents the compiler from removing calls of a function that
 * only prefetches. */
static inline void bl_prefetch(const void *address)
{
    __builtin_prefetch(address);
    bl_compiler_barrier();
}

/* Access private words that threads of one process share, such as a stop flag or a counter. */
static inline uint64_t bl_shared_load(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void bl_shared_store(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

/* Add amount and return the value before. */
static inline uint64_t bl_shared_add(uint64_t *word, uint64_t amount)
{
    return __atomic_fetch_add(word, amount, __ATOMIC_RELAXED);
}

/* Prefetch the source of a streaming copy into the second-level cache: the fill buffers of the
 * first level are occupied by the streaming stores. */
static inline void bl_prefetch_source(const void *address, size_t size)
{
    for (size_t at = 0; at < size; at += BL_LINE_SIZE)
        __builtin_prefetch((const char *)address + at, 0, 2);
    bl_compiler_barrier();
}

/* Prefetch the partial lines at both ends of a run that is written next. Otherwise the streaming
 * stores would wait for them. */
static inline void bl_prefetch_edges(const void *address, size_t size)
{
    uintptr_t start = (uintptr_t)address, end = start + size;
    if (start % BL_LINE_SIZE > 0)
        __builtin_prefetch(address, 1);
    if (end % BL_LINE_SIZE > 0)
        __builtin_prefetch((const void *)end, 1);
    bl_compiler_barrier();
}

#endif
