/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The verbs: the only operations by which protocol code accesses the pool. Flushes, non-temporal
 * stores, fences and atomics occur only here and in the headers of instructions.h.
 *
 * Several hosts map the pool, and their caches are not coherent with each other. A store may stay
 * in its host's cache forever, and a load may be answered from an old copy. So:
 *
 *   write:  stream the payload, bl_fence_store, stream the line that publishes it, bl_fence_store
 *   read:   refetch and load the published line; if it is new, refetch the payload (the full fences
 *           of a refetch order it after that load), fetch it, then refetch and check the line again
 *
 * What each instruction does and does not do (x86-64; for aarch64 see aarch64.h):
 *   non-temporal store   bypasses the cache through a write-combining buffer, in any order, and
 *                        perhaps in pieces; a cached copy of the line is dropped. sfence drains
 *                        the buffer.
 *   clflush, clflushopt  write a dirty line back and drop it. clflushopt is ordered only by fences
 *                        and by older stores to its line.
 *   clwb                 writes back but may keep the line: not usable by a reader.
 *   sfence               orders stores only. A reader that flushes needs mfence before the flush
 *                        (after the load that triggered it) and after it (before the loads that
 *                        follow).
 *   load                 a reader checks its private copy, so each byte of a copy must be loaded
 *                        exactly once: for a plain load a compiler may load twice, and then check
 *                        other bytes than it copied.
 *
 * What the protocol assumes of the hardware:
 *   A1  an aligned 8-byte store is never torn. Nothing relies on more: a whole line can be torn,
 *       and therefore has a check (format/line.h).
 *   A2  clflush/clflushopt drops a line from all caches of its host; mfence completes it. On
 *       aarch64 it is dc civac and dsb sy, and the point of coherency is the pool's memory.
 *   A3  a streamed line is in memory, for every host, when the fence that follows has completed.
 *   A4  a prefetch may fill a line into the cache at any time. So a reader refetches after it has
 *       read the published line, and checks that line again after the copy.
 *   A5  writing a line back writes no other line. On aarch64 a cache line may be larger than a line
 *       of the pool; such a CPU opens no pool of software coherence (bl_flush_fault).
 *
 * A device of hardware coherence (D2) has one host, or it is a metadata device for which the caches
 * of all its hosts are coherent: flush and invalidate do nothing, lines are stored by plain stores,
 * and fences stay.
 *
 * The verbs have two implementations, in this file and in the simulator (coherence/sim.h): the same
 * protocol source is built twice. Every use of a verb, and every bl_verify, is a *site*: the
 * simulator numbers the sites, may switch hosts at them, and can skip one to test whether an oracle
 * detects that. In the hardware build a site costs nothing.
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

/* ---- The verbs, for hardware. */

static inline uint8_t *bl_address(const bl_memory *memory, uint64_t offset)
{
    bl_place place = bl_interleave_place(&memory->map, offset);
    return memory->base[place.device] + place.device_offset;
}

/* Load 8 aligned bytes through this host's cache. */
static inline uint64_t bl_load64(const bl_memory *memory, uint64_t offset)
{
    return __atomic_load_n((const uint64_t *)bl_address(memory, offset), __ATOMIC_RELAXED);
}

/* Prefetch a line, so that several cache misses overlap. The later load may return bytes as old as
 * this prefetch. */
static inline void bl_prefetch_line(const bl_memory *memory, uint64_t offset)
{
    __builtin_prefetch(bl_address(memory, offset));
}

/* Prefetch bytes of a payload, within one stripe, into the second-level cache. */
#define bl_prefetch_range(memory, offset, size)                                                    \
    bl_prefetch_source(bl_address(memory, offset), size)

/* Copy a line into private memory, each byte loaded once, so that the caller checks what it
 * uses. */
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

/* Complete what was streamed to a run in one stripe, where the device's coherence requires it. */
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

/* Like bl_stream; returns the CRC-32C of the bytes. seed is the CRC of the preceding bytes. */
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

/* Like bl_fetch, into or past the cache (bl_copy_how in coherence/copy.h). If crc is not NULL, *crc
 * is the CRC-32C of the preceding bytes, and is extended by the bytes now in target; the pool is
 * read once. */
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

/* Invalidate this host's cached lines of a range, without a fence: one bl_fence_full completes
 * several invalidations. */
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

/* What this thread streamed before reaches memory before what it streams after. */
#define bl_fence_store(memory) ((void)(memory), bl_store_fence_now())

/* All earlier accesses of this thread, including invalidations and loads, are complete before any
 * later one. */
#define bl_fence_full(memory) ((void)(memory), bl_full_fence_now())

/* A check of the protocol: true if condition holds. The simulator can skip it. */
#define bl_verify(memory, condition) ((void)(memory), (condition))

/* These annotations declare to the simulator what a reader relies on; in this build they do
 * nothing. The simulator checks them (tests/sim/native), and so detects a missing flush or fence
 * even in runs where it did no harm. */

/* The reader accepts the line that it last loaded at offset: the line is whole and from its writer.
 * The reader may now invalidate, read and use what that writer had fenced before it. */
#define bl_believe(memory, offset) ((void)(memory), (void)(offset))

/* The reader uses the bytes that it read from this range. */
#define bl_rely(memory, offset, size) ((void)(memory), (void)(offset), (void)(size))

/* Like bl_rely, because the line at look, read again after the bytes, has not changed. */
#define bl_confirm(memory, look, offset, size)                                                     \
    ((void)(memory), (void)(look), (void)(offset), (void)(size))

/* The last load of the line at look came after our own write at written (or all our writes) was in
 * memory: of two processes that each write first and then read, at least one sees the other's
 * write. */
#define bl_ordered(memory, look, written) ((void)(memory), (void)(look), (void)(written))

/* Return nanoseconds of this host's clock. Clocks of different hosts are never compared. */
static inline uint64_t bl_now_ns(const bl_memory *memory)
{
    struct timespec now;
    (void)memory;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Pause briefly in a spin loop. */
static inline void bl_pause(const bl_memory *memory)
{
    (void)memory;
    bl_pause_now();
}

/* Sleep for about ns nanoseconds; 0 yields the core to any thread that is ready. */
void bl_nap(const bl_memory *memory, uint64_t ns);

/* A server announces that it will sleep; a process of its host wakes it (liveness/wake.h). */
#define bl_announce(memory, sleeper) ((void)(memory), bl_sleeper_announce(sleeper))
#define bl_wake(memory, directory, waker) ((void)(memory), bl_waker_ring(directory, waker))

#endif /* BL_SIM */

/* ---- Composed verbs, for both builds. */

/* Publish a line: it is streamed as a whole, and reaches memory before anything that this thread
 * streams later. */
#define bl_publish_line(memory, offset, line)                                                      \
    do {                                                                                           \
        bl_stream_line(memory, offset, line);                                                      \
        bl_fence_store(memory);                                                                    \
    } while (0)

/* Invalidate this host's cached lines of a range, after all earlier loads and before all later
 * ones. */
#define bl_refetch(memory, offset, size)                                                           \
    do {                                                                                           \
        bl_fence_full(memory);                                                                     \
        bl_invalidate(memory, offset, size);                                                       \
        bl_fence_full(memory);                                                                     \
    } while (0)

#endif
