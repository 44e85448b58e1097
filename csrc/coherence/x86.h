/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The instructions that take an address: flushes, non-temporal stores, fences, and atomics of
 * private words. The verbs (coherence.h) and the streaming copies (copy_isa.c, crc32c.c) are built
 * from them; the protocol calls verbs only. coherence.h says what each instruction does, and what
 * it does not.
 */
#ifndef BL_X86_H
#define BL_X86_H

#include <immintrin.h>
#include <stddef.h>

#include "api/coherence.h"
#include "format/pool_format.h"


static inline void bl_store_fence_now(void) { __asm__ volatile("sfence" ::: "memory"); }
static inline void bl_full_fence_now(void) { __asm__ volatile("mfence" ::: "memory"); }
static inline void bl_compiler_barrier(void) { __asm__ volatile("" ::: "memory"); }

/* Ask for private memory that is needed soon. To the compiler, a function that only prefetches has
 * no effect, and its calls would be dropped: hence the barrier. */
static inline void bl_prefetch(const void *address)
{
    __builtin_prefetch(address);
    bl_compiler_barrier();
}

static inline void bl_nt16(void *target, __m128i value) { _mm_stream_si128(target, value); }

__attribute__((target("avx2"), always_inline)) static inline void bl_nt32(void *target,
                                                                          __m256i value)
{
    _mm256_stream_si256(target, value);
}

__attribute__((target("avx512f"), always_inline)) static inline void bl_nt64(void *target,
                                                                             __m512i value)
{
    _mm512_stream_si512(target, value);
}

/* Move one aligned line without tearing: both addresses are those of lines. */
static inline void bl_movdir64b(void *target, const void *source)
{
    __asm__ volatile(".byte 0x66, 0x0f, 0x38, 0xf8, 0x02" /* movdir64b (%rdx), %rax */
                     : : "a"(target), "d"(source) : "memory");
}

/* Move a descriptor of one line into a device's portal. A dedicated queue answers nothing; a shared
 * one answers 1 (taken) or 0 (full). */
static inline void bl_portal_move(void *portal, const void *descriptor)
{
    bl_movdir64b(portal, descriptor);
}

static inline int bl_portal_enqueue(void *portal, const void *descriptor)
{
    int full;
    __asm__ volatile(".byte 0xf2, 0x0f, 0x38, 0xf8, 0x02" /* enqcmd (%%rdx), %%rax */
                     : "=@ccz"(full) : "a"(portal), "d"(descriptor) : "memory");
    return !full;
}

/* Sleep lightly until the line of word is written, as long as word has this value; at most
 * cycles. */
static inline void bl_monitor(const uint64_t *word, uint64_t value, uint32_t cycles)
{
    __asm__ volatile(".byte 0xf3, 0x0f, 0xae, 0xf0" : : "a"(word) : "memory"); /* umonitor %%rax */
    if (*(const volatile uint64_t *)word != value)
        return;
    uint64_t until = __builtin_ia32_rdtsc() + cycles;
    __asm__ volatile(".byte 0xf2, 0x0f, 0xae, 0xf1" /* umwait %%ecx */
                     : : "a"((uint32_t)until), "d"((uint32_t)(until >> 32)), "c"(0)
                     : "memory", "cc");
}

static inline void bl_clflush(const void *line)
{
    __asm__ volatile("clflush %0" : "+m"(*(volatile char *)(uintptr_t)line));
}

static inline void bl_clflushopt(const void *line)
{
    __asm__ volatile("clflushopt %0" : "+m"(*(volatile char *)(uintptr_t)line));
}

static inline void bl_clwb(const void *line)
{
    __asm__ volatile("clwb %0" : "+m"(*(volatile char *)(uintptr_t)line));
}

/* Write back and drop every line that has a byte of [address, address + size). There is no
 * fence. */
static inline void bl_flush_lines(const void *address, size_t size, uint32_t has_clflushopt)
{
    const char *line = (const char *)((uintptr_t)address & ~(uintptr_t)(BL_LINE_SIZE - 1));
    const char *end = size > 0 ? (const char *)address + size : line;
    if (has_clflushopt)
        for (; line < end; line += BL_LINE_SIZE)
            bl_clflushopt(line);
    else
        for (; line < end; line += BL_LINE_SIZE)
            bl_clflush(line);
}

/* Write every such line back; it may stay cached, and without clwb it is dropped. There is no
 * fence. */
static inline void bl_write_back_lines(const void *address, size_t size, uint32_t features)
{
    const char *line = (const char *)((uintptr_t)address & ~(uintptr_t)(BL_LINE_SIZE - 1));
    const char *end = size > 0 ? (const char *)address + size : line;
    if (!(features & BL_CPU_CLWB))
        bl_flush_lines(address, size, features & BL_CPU_CLFLUSHOPT);
    else
        for (; line < end; line += BL_LINE_SIZE)
            bl_clwb(line);
}

/* Access private words that threads of one process share: a stop flag, or a counter that another
 * thread reads. */
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

/* Prefetch private memory that a streaming copy will read, into the second-level cache: the buffers
 * of the first level are busy with what goes out. */
static inline void bl_prefetch_source(const void *address, size_t size)
{
    for (size_t at = 0; at < size; at += BL_LINE_SIZE)
        _mm_prefetch((const char *)address + at, _MM_HINT_T1);
    bl_compiler_barrier();
}

/* Prefetch the lines at both ends of a run that is written next: the streaming stores would wait
 * for them. */
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
