/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The verbs: with the headers that have the instructions (instructions.h), the one place that names
 * a flush, a non-temporal store, a fence or an atomic.
 *
 * Several hosts map the pool, and their caches are not coherent with each other. A store may stay
 * in its host's cache forever, and a load may be answered from an old copy. So:
 *
 *   write:  stream the payload, bl_fence_store, stream the line that publishes it, bl_fence_store
 *   read:   refetch and load the published line; if it is news, refetch the payload (its own full
 *           fences keep it after the look), fetch it, refetch the line and look again
 *
 * Which instruction does what, and which does not (x86-64; aarch64.h has the same for aarch64):
 *   non-temporal store   goes round the cache through a write-combining buffer, in any order, and
 *                        perhaps in pieces; a cached copy of the line is dropped. sfence drains it.
 *   clflush, clflushopt  write a dirty line back and drop it. clflushopt is ordered only by fences
 *                        and by older stores to its line.
 *   clwb                 writes back but may keep the line: never a reader's tool.
 *   sfence               orders stores only. A reader that flushes needs mfence, before (the load
 *                        that told it to look) and after (the loads that follow).
 *   load                 a reader checks the copy that it made, so a load that makes a copy is made
 *                        once: a compiler may load twice for one plain load, and what it checks
 *                        is then not what it copied.
 *
 * What the protocol assumes of the hardware:
 *   A1  an aligned 8-byte store is never seen in part. Nothing relies on more: a line can be torn,
 *       and carries a check (format/line.h).
 *   A2  clflush/clflushopt drops a line from all caches of its host; mfence completes it. On
 *       aarch64 it is dc civac and dsb sy, and the point of coherency is the pool's memory.
 *   A3  a streamed line is in memory, for every host, when the fence that follows has completed.
 *   A4  a prefetch may bring a line in at any time. So a reader refetches after the news, and looks
 *       again after the copy.
 *
 *   A5  writing a line back writes no other line. On aarch64 a cache line may be larger than a line
 *       of the pool; such a CPU opens no pool of software coherence (bl_flush_fault).
 *
 * A device of hardware coherence (D2) has one host: flush and invalidate do nothing, a line is
 * stored plainly, and fences stay.
 *
 * The verbs have two bodies, this file's and the simulator's (coherence/sim.h): the same protocol
 * source is built twice. Every use of a verb, and every bl_verify, is a *site*: the simulator
 * numbers them, may switch hosts there, and can skip one to see whether anybody notices. In the
 * hardware build a site costs nothing.
 */
#ifndef BL_COHERENCE_H
#define BL_COHERENCE_H

#include <stddef.h>
#include <string.h>
#include <time.h>

#include "coherence/copy.h"
#include "coherence/instructions.h"
#include "coherence/memory.h"

#define BL_ALL_WRITES UINT64_MAX   /* for bl_ordered() */

#ifdef BL_SIM
#include "coherence/sim.h"
#include "format/pool_format.h"
#else

/* ---- The verbs, hardware body. */

static inline uint8_t *bl_address(const bl_memory *memory, uint64_t offset)
{
    bl_place place = bl_interleave_place(&memory->map, offset);
    return memory->base[place.device] + place.device_offset;
}

/* Load 8 aligned bytes as this host sees them now. */
static inline uint64_t bl_load64(const bl_memory *memory, uint64_t offset)
{
    return __atomic_load_n((const uint64_t *)bl_address(memory, offset), __ATOMIC_RELAXED);
}

/* Prefetch a line that will be loaded soon, so that many misses overlap. The line is as fresh as if
 * it were loaded here. */
static inline void bl_prefetch_line(const bl_memory *memory, uint64_t offset)
{
    __builtin_prefetch(bl_address(memory, offset));
}

/* The same for bytes of a payload, into the cache that feeds the first one: in one stripe. */
#define bl_prefetch_range(memory, offset, size)                                                    \
    bl_prefetch_source(bl_address(memory, offset), size)

/* Make a private copy of a line in one pass, so that nothing changes while the caller checks it. */
static inline void bl_load_line(const bl_memory *memory, uint64_t offset, void *line)
{
    bl_line_read(bl_address(memory, offset), line);
}

/* Write a whole line into the pool past the cache. line is private memory of any alignment. */
static inline void bl_stream_line(const bl_memory *memory, uint64_t offset, const void *line)
{
    bl_place place = bl_interleave_place(&memory->map, offset);
    uint8_t *target = memory->base[place.device] + place.device_offset;
    if (memory->coherent[place.device]) {
        bl_line_store(target, line);
    } else {
        bl_line_stream(target, line);
        bl_streamed(target, BL_LINE_SIZE, memory->flush_choice);
    }
}

/* Complete what was streamed to a run in one stripe, as far as the device needs it. */
static inline void bl_streamed_at(const bl_memory *memory, uint64_t offset, uint64_t size)
{
    bl_place place = bl_interleave_place(&memory->map, offset);
    if (!memory->coherent[place.device])
        bl_streamed(memory->base[place.device] + place.device_offset, size, memory->flush_choice);
}

/* Write whole lines into the pool past the cache: offset and size are multiples of a line. */
static inline void bl_stream(const bl_memory *memory, uint64_t offset, const void *source,
                             uint64_t size)
{
    const uint8_t *next = source;
    while (size > 0) {
        uint64_t piece = bl_stripe_rest(offset) < size ? bl_stripe_rest(offset) : size;
        bl_copy_stream(bl_address(memory, offset), next, piece);
        bl_streamed_at(memory, offset, piece);
        offset += piece, next += piece, size -= piece;
    }
}

/* Copy bytes out of the pool into private memory by cached loads. */
static inline void bl_fetch(const bl_memory *memory, uint64_t offset, void *target, uint64_t size)
{
    uint8_t *next = target;
    bl_compiler_barrier();
    while (size > 0) {
        uint64_t piece = bl_stripe_rest(offset) < size ? bl_stripe_rest(offset) : size;
        memcpy(next, bl_address(memory, offset), piece);
        offset += piece, next += piece, size -= piece;
    }
    bl_copied_to(target);
}

/* Do what bl_stream does and return the CRC-32C of the bytes; seed is the CRC of the bytes
 * before. */
static inline uint32_t bl_stream_crc(const bl_memory *memory, uint64_t offset, const void *source,
                                     uint64_t size, uint32_t seed)
{
    const uint8_t *next = source;
    while (size > 0) {
        uint64_t piece = bl_stripe_rest(offset) < size ? bl_stripe_rest(offset) : size;
        seed = bl_copy_stream_crc(seed, bl_address(memory, offset), next, piece);
        bl_streamed_at(memory, offset, piece);
        offset += piece, next += piece, size -= piece;
    }
    return seed;
}

/* Do what bl_fetch does, with or without the cache (bl_copy_how in coherence/copy.h). If crc is not
 * NULL, it holds the CRC-32C of the bytes before; the bytes that now lie in target are added to it,
 * and the pool is read once. */
static inline void bl_fetch_run(const bl_memory *memory, uint64_t offset, void *target,
                                uint64_t size, uint32_t *crc, enum bl_copy_how how)
{
    uint8_t *next = target;
    bl_compiler_barrier();
    while (size > 0) {
        uint64_t piece = bl_stripe_rest(offset) < size ? bl_stripe_rest(offset) : size;
        bl_copy_out(next, bl_address(memory, offset), piece, crc, how);
        offset += piece, next += piece, size -= piece;
    }
    bl_copied_to(target);
}

/* Drop this host's copies of a range, without a fence: bl_fence_full completes a batch of them. */
__attribute__((always_inline)) static inline void
bl_invalidate(const bl_memory *memory, uint64_t offset, uint64_t size)
{
    while (size > 0) {
        uint64_t piece = bl_stripe_rest(offset) < size ? bl_stripe_rest(offset) : size;
        bl_place place = bl_interleave_place(&memory->map, offset);
        if (!memory->coherent[place.device])
            bl_flush_lines(memory->base[place.device] + place.device_offset, piece,
                           memory->flush_choice);
        offset += piece, size -= piece;
    }
}

/* Everything streamed before is in memory before anything streamed after. */
#define bl_fence_store(memory) ((void)(memory), bl_store_fence_now())

/* Everything before, invalidations and loads too, is done before anything after. */
#define bl_fence_full(memory) ((void)(memory), bl_full_fence_now())

/* A check of the protocol: true if condition holds. The simulator can skip it. */
#define bl_verify(memory, condition) ((void)(memory), (condition))

/* These annotations tell the simulator what a reader relies on; in this build they do nothing. The
 * simulator judges the reader by them (sim/coherence.c), so it finds a missing flush or fence even
 * where it did no harm. */

/* The reader believes the line that it loaded last at offset: the line is whole and comes from its
 * writer. What that writer had fenced before it may now be invalidated, read and used. */
#define bl_believe(memory, offset) ((void)(memory), (void)(offset))

/* The reader uses bytes that it read from here. */
#define bl_rely(memory, offset, size) ((void)(memory), (void)(offset), (void)(size))

/* The same, because the line at look was loaded again after the bytes and has not changed. */
#define bl_confirm(memory, look, offset, size)                                                     \
    ((void)(memory), (void)(look), (void)(offset), (void)(size))

/* The last look at this line came after our own write of another (or all our writes) was in memory:
 * of two processes that each write before they look, one sees the other. */
#define bl_ordered(memory, look, written) ((void)(memory), (void)(look), (void)(written))

/* Return nanoseconds of a clock of this host alone: hosts never compare clocks. */
static inline uint64_t bl_now_ns(const bl_memory *memory)
{
    struct timespec now;
    (void)memory;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Spend one turn of a short wait. */
static inline void bl_pause(const bl_memory *memory)
{
    (void)memory;
    bl_pause_now();
}

/* Give the core away for about ns nanoseconds; 0 offers it to any thread that is ready. */
void bl_nap(const bl_memory *memory, uint64_t ns);

#endif /* BL_SIM */

/* ---- Verbs made of verbs: one body for both builds. */

/* A published line: whole, and on its way out before anything that follows. */
#define bl_publish_line(memory, offset, line)                                                      \
    do {                                                                                           \
        bl_stream_line(memory, offset, line);                                                      \
        bl_fence_store(memory);                                                                    \
    } while (0)

/* Drop this host's copies of a range, after all earlier loads and before all later ones. */
#define bl_refetch(memory, offset, size)                                                           \
    do {                                                                                           \
        bl_fence_full(memory);                                                                     \
        bl_invalidate(memory, offset, size);                                                       \
        bl_fence_full(memory);                                                                     \
    } while (0)

#endif
