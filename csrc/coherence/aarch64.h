/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The instructions of aarch64 that take an address: flushes, non-temporal stores, fences. Included
 * by instructions.h. "Arm ARM" is Arm's Architecture Reference Manual (DDI 0487).
 *
 *   stnp       is only a hint: the line may stay in the cache, dirty. So bl_streamed adds a dc
 *              civac
 *              for each line, after which the line is in no cache, as on x86-64.
 *   dc civac   writes a dirty line back to the point of coherency and drops it from all caches of
 *              the host. It is ordered after earlier accesses to the same line without a barrier.
 *   dc cvac    writes back and keeps the line: not usable by a reader.
 *   dmb        orders accesses, and dc by address among them, but completes nothing.
 *   dsb        waits for completion. Only a dsb for loads and stores also waits for dc: `dsb st`
 *              does not (Arm ARM, "Data Synchronization Barrier"). So both fences are `dsb sy`.
 *
 * The domain is the full system (sy), because readers on other hosts are outside of this host's
 * shareability domains: `dsb ish` guarantees completion only for the inner domain.
 *
 * Unlike x86-64, this architecture may reorder two stores to different lines, or two loads. The
 * protocol is tested against that only in the simulator, where lines reach memory in any order
 * between two fences, and not yet on a CPU of this architecture.
 */
#ifndef BL_AARCH64_H
#define BL_AARCH64_H

#include <arm_neon.h>
#include <stddef.h>
#include <ucontext.h>

#include "api/coherence.h"
#include "api/error.h"
#include "format/pool_format.h"

static inline void bl_store_fence_now(void) { __asm__ volatile("dsb sy" ::: "memory"); }
static inline void bl_full_fence_now(void) { __asm__ volatile("dsb sy" ::: "memory"); }
static inline void bl_compiler_barrier(void) { __asm__ volatile("" ::: "memory"); }

/* End a copy out of the pool. Without this, a compiler may replace later loads from target by loads
 * from the pool, where the bytes may have changed. */
static inline void bl_copied_to(void *target)
{
    __asm__ volatile("" : : "r"(target) : "memory");
}

/* Prefetch a private line for writing, so that it is exclusive to this core before the store. */
static inline void bl_prefetch_write(const void *address)
{
    __builtin_prefetch(address, 1);
    bl_compiler_barrier();
}

/* Order this thread's stores for the other threads of this host, which do not need completion. */
static inline void bl_settle_now(void) { __asm__ volatile("dmb ishst" ::: "memory"); }

/* Two 8-byte stores, neither of which is torn (A1). A pair of 16-byte registers would be faster,
 * but the architecture guarantees the atomicity of at most 8 bytes of it, and only implicitly. */
static inline void bl_stnp16(void *target, uint64_t low, uint64_t high)
{
    __asm__ volatile("stnp %0, %1, [%2]" : : "r"(low), "r"(high), "r"(target) : "memory");
}

/* A streaming store for payloads, which may be torn. */
static inline void bl_stnp32(void *target, uint8x16_t low, uint8x16_t high)
{
    __asm__ volatile("stnp %q0, %q1, [%2]" : : "w"(low), "w"(high), "r"(target) : "memory");
}

static inline void bl_dc_civac(const void *line)
{
    __asm__ volatile("dc civac, %0" : : "r"(line) : "memory");
}

static inline void bl_dc_cvac(const void *line)
{
    __asm__ volatile("dc cvac, %0" : : "r"(line) : "memory");
}

/* Return CTR_EL0, which describes the caches. Linux lets programs read it. */
static inline uint64_t bl_cache_type(void)
{
    uint64_t type;
    __asm__("mrs %0, ctr_el0" : "=r"(type));
    return type;
}

/* Return the size of the smallest data cache line (DminLine): the step from one dc to the next. */
static inline uint32_t bl_cache_line_size(uint64_t cache_type)
{
    return 4u << (cache_type >> 16 & 15);
}

/* Return the largest granule that a cache writes back (CWG), in bytes; if the register does not
 * specify it, the architecture requires the assumption of 2 KiB. */
static inline uint32_t bl_write_back_size(uint64_t cache_type)
{
    uint32_t words_log2 = cache_type >> 24 & 15;
    return words_log2 > 0 ? 4u << words_log2 : 2048;
}

/* Return 0 if writing a line back never writes another one, or else -BL_ERROR_CACHE_LINE. Two lines
 * of 64 bytes in one larger cache line may have writers on two hosts. Each host caches both lines,
 * one of them old; when it writes its own line back, the old one overwrites the other host's bytes
 * (D4). No order of instructions prevents that. */
static inline int bl_flush_fault_of(uint64_t cache_type)
{
    return bl_cache_line_size(cache_type) > BL_LINE_SIZE ||
                   bl_write_back_size(cache_type) > BL_LINE_SIZE
               ? -BL_ERROR_CACHE_LINE
               : 0;
}

static inline int bl_flush_fault(void) { return bl_flush_fault_of(bl_cache_type()); }

/* Return the parameter of bl_flush_lines for this CPU: the bytes from one dc to the next, at most
 * 64, since a CPU with larger cache lines may still use a pool with a single host. */
static inline uint32_t bl_flush_choice(uint32_t features)
{
    uint32_t size = bl_cache_line_size(bl_cache_type());
    (void)features;
    return size < BL_LINE_SIZE ? size : BL_LINE_SIZE;
}

/* Write back and invalidate every line that overlaps [address, address + size), without a fence. */
static inline void bl_flush_lines(const void *address, size_t size, uint32_t step)
{
    const char *line = (const char *)((uintptr_t)address & ~(uintptr_t)(BL_LINE_SIZE - 1));
    const char *end = size > 0 ? (const char *)address + size : line;
    for (; line < end; line += step)
        bl_dc_civac(line);
}

/* Write every such line back and keep it cached, without a fence. */
static inline void bl_write_back_lines(const void *address, size_t size, uint32_t features)
{
    const char *line = (const char *)((uintptr_t)address & ~(uintptr_t)(BL_LINE_SIZE - 1));
    const char *end = size > 0 ? (const char *)address + size : line;
    uint32_t step = bl_flush_choice(features);
    for (; line < end; line += step)
        bl_dc_cvac(line);
}

/* Write back streamed lines that stnp may have left in the cache, without a fence. As on x86-64,
 * this host's readers then load them from memory. */
static inline void bl_streamed(const void *address, size_t size, uint32_t step)
{
    bl_flush_lines(address, size, step);
}

/* Load 8 bytes of any alignment with one instruction: a compiler may split a plain load. */
static inline uint64_t bl_load8_once(const uint8_t *source)
{
    typedef uint64_t any __attribute__((aligned(1), may_alias));
    return *(const volatile any *)source;
}

/* Copy an aligned line of the pool into private memory of any alignment, in one pass. */
static inline void bl_line_read(const void *address, void *line)
{
    const uint64_t *source = address;
    uint64_t word[BL_LINE_SIZE / 8];
    for (int i = 0; i < BL_LINE_SIZE / 8; i++)
        word[i] = __atomic_load_n(source + i, __ATOMIC_RELAXED);
    bl_compiler_barrier();
    __builtin_memcpy(line, word, sizeof word);
}

/* Store private memory of any alignment to an aligned line. */
static inline void bl_line_store(void *address, const void *line)
{
    uint64_t *target = address, word[BL_LINE_SIZE / 8];
    __builtin_memcpy(word, line, sizeof word);
    bl_compiler_barrier();
    for (int i = 0; i < BL_LINE_SIZE / 8; i++)
        __atomic_store_n(target + i, word[i], __ATOMIC_RELAXED);
    bl_compiler_barrier();
}

/* Like bl_line_store, but past the cache; bl_streamed completes it. */
static inline void bl_line_stream(void *address, const void *line)
{
    uint8_t *target = address;
    uint64_t word[BL_LINE_SIZE / 8];
    __builtin_memcpy(word, line, sizeof word);
    bl_stnp16(target, word[0], word[1]);
    bl_stnp16(target + 16, word[2], word[3]);
    bl_stnp16(target + 32, word[4], word[5]);
    bl_stnp16(target + 48, word[6], word[7]);
}

/* Return the wider of 8 and 16 bytes, at most widest, that one instruction moves. */
static inline uint32_t bl_move_width(uint32_t widest, uint32_t features)
{
    (void)features;
    return widest >= 16 ? 16 : 8;
}

/* Move width bytes by one load and one store, through the cache. */
static inline void bl_move(void *target, const void *source, uint32_t width)
{
    if (width == 16)
        vst1q_u8(target, vld1q_u8(source));
    else
        *(volatile uint64_t *)target = *(const volatile uint64_t *)source;
}

/* Pause briefly: isb drains the pipeline, whereas yield does nothing on most CPUs. */
static inline void bl_pause_now(void) { __asm__ volatile("isb" ::: "memory"); }

/* Return the instruction address in a signal's context. */
static inline uint64_t bl_interrupted_at(const void *context)
{
    return ((const ucontext_t *)context)->uc_mcontext.pc;
}

/* Return the virtual counter, which user programs can read. */
static inline uint64_t bl_ticks(void)
{
    uint64_t ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
}

static inline uint64_t bl_ticks_of_100_us(void)
{
    uint64_t ticks_per_second;
    __asm__("mrs %0, cntfrq_el0" : "=r"(ticks_per_second));
    return ticks_per_second / 10000;
}

/* Intel DSA and its instructions exist only on x86-64. Here bl_cpu_features() has none of them, so
 * bl_dsa_queue_open() refuses portals, and these functions are never called. */
static inline void bl_portal_move(void *portal, const void *descriptor)
{
    (void)portal, (void)descriptor;
    __builtin_trap();
}

static inline int bl_portal_enqueue(void *portal, const void *descriptor)
{
    (void)portal, (void)descriptor;
    __builtin_trap();
}

static inline void bl_monitor(const uint64_t *word, uint64_t value, uint32_t cycles)
{
    (void)word, (void)value, (void)cycles;
    __builtin_trap();
}

#endif
