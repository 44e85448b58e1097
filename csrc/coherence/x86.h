/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The instructions of x86-64 that take an address: flushes, non-temporal stores, fences. Included
 * by instructions.h. coherence.h explains what each instruction does, and what it does not.
 */
#ifndef BL_X86_H
#define BL_X86_H

#include <immintrin.h>
#include <stddef.h>
#include <ucontext.h>

#include "api/coherence.h"
#include "format/pool_format.h"

/* The target attribute of functions with the crc32 instruction. Clang has a feature name for it;
 * for GCC it is part of SSE 4.2, and GCC 10 accepts no other name. */
#ifdef __clang__
#define BL_CRC_TARGET "sse4.2,crc32"
#else
#define BL_CRC_TARGET "sse4.2"
#endif

static inline void bl_store_fence_now(void) { __asm__ volatile("sfence" ::: "memory"); }
static inline void bl_full_fence_now(void) { __asm__ volatile("mfence" ::: "memory"); }

/* Order this thread's streamed stores for the other threads of this host. */
static inline void bl_settle_now(void) { bl_store_fence_now(); }

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
    __asm__ volatile("prefetchw %0" ::"m"(*(const char *)address));
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

/* Load 16 aligned bytes, or 64 of any alignment, with one instruction. A compiler may split a plain
 * load. Clang did: it copied a line by one load and checked the sequence number by another, so a
 * stale reply was accepted when a new one was written in between. */
static inline __m128i bl_load16_once(const __m128i *source)
{
    __m128i value;
    __asm__ volatile("movdqa %1, %0" : "=x"(value) : "m"(*source));
    return value;
}

__attribute__((target("avx512f"), always_inline)) static inline __m512i
bl_load64_once(const uint8_t *source)
{
    __m512i value;
    __asm__ volatile("vmovdqu64 %1, %0" : "=v"(value) : "m"(*(const uint8_t(*)[64])source));
    return value;
}

/* Copy an aligned line of the pool into private memory of any alignment, in one pass. */
static inline void bl_line_read(const void *address, void *line)
{
    const __m128i *source = address;
    __m128i *target = line;
    bl_compiler_barrier();
    __m128i a = bl_load16_once(source), b = bl_load16_once(source + 1);
    __m128i c = bl_load16_once(source + 2), d = bl_load16_once(source + 3);
    bl_compiler_barrier();
    _mm_storeu_si128(target, a);
    _mm_storeu_si128(target + 1, b);
    _mm_storeu_si128(target + 2, c);
    _mm_storeu_si128(target + 3, d);
}

/* Store private memory of any alignment to an aligned line. */
static inline void bl_line_store(void *address, const void *line)
{
    __m128i *target = address;
    const __m128i *source = line;
    __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    bl_compiler_barrier();
    _mm_store_si128(target, a);
    _mm_store_si128(target + 1, b);
    _mm_store_si128(target + 2, c);
    _mm_store_si128(target + 3, d);
    bl_compiler_barrier();
}

/* Like bl_line_store, but past the cache. The four stores are adjacent, so they fill one
 * write-combining buffer. */
static inline void bl_line_stream(void *address, const void *line)
{
    __m128i *target = address;
    const __m128i *source = line;
    __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    bl_compiler_barrier();
    bl_nt16(target, a);
    bl_nt16(target + 1, b);
    bl_nt16(target + 2, c);
    bl_nt16(target + 3, d);
    bl_compiler_barrier();
}

/* Does nothing: a non-temporal store leaves no copy in a cache, so the fence alone completes it. */
static inline void bl_streamed(const void *address, size_t size, uint32_t choice)
{
    (void)address, (void)size, (void)choice;
}

/* Move one line without tearing; both addresses are line-aligned. */
static inline void bl_movdir64b(void *target, const void *source)
{
    __asm__ volatile(".byte 0x66, 0x0f, 0x38, 0xf8, 0x02" /* movdir64b (%rdx), %rax */
                     : : "a"(target), "d"(source) : "memory");
}

/* Submit a descriptor to a device's portal. Only the instruction for a shared queue returns a
 * result: 1 (accepted) or 0 (full). */
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

/* Sleep (umwait) for at most this many cycles, until the line of word is written; do not sleep if
 * word no longer has this value. */
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

/* Return the parameter of bl_flush_lines for this CPU: 1 if it has clflushopt. */
static inline uint32_t bl_flush_choice(uint32_t features)
{
    return (features & BL_CPU_CLFLUSHOPT) != 0;
}

/* Write back and invalidate every line that overlaps [address, address + size), without a fence. */
static inline void bl_flush_lines(const void *address, size_t size, uint32_t choice)
{
    const char *line = (const char *)((uintptr_t)address & ~(uintptr_t)(BL_LINE_SIZE - 1));
    const char *end = size > 0 ? (const char *)address + size : line;
    if (choice)
        for (; line < end; line += BL_LINE_SIZE)
            bl_clflushopt(line);
    else
        for (; line < end; line += BL_LINE_SIZE)
            bl_clflush(line);
}

/* Write every such line back, without a fence. It may stay cached; without clwb it is
 * invalidated. */
static inline void bl_write_back_lines(const void *address, size_t size, uint32_t features)
{
    const char *line = (const char *)((uintptr_t)address & ~(uintptr_t)(BL_LINE_SIZE - 1));
    const char *end = size > 0 ? (const char *)address + size : line;
    if (!(features & BL_CPU_CLWB))
        bl_flush_lines(address, size, bl_flush_choice(features));
    else
        for (; line < end; line += BL_LINE_SIZE)
            bl_clwb(line);
}

/* Return 0: on x86-64 all cache lines have 64 bytes, so writing a line back writes no other. */
static inline int bl_flush_fault(void) { return 0; }

/* Return the widest of 8, 16, 32 and 64 bytes, at most widest, that one instruction moves. */
static inline uint32_t bl_move_width(uint32_t widest, uint32_t features)
{
    if (widest >= 64 && (features & BL_CPU_AVX512))
        return 64;
    if (widest >= 32 && (features & BL_CPU_AVX2))
        return 32;
    return widest >= 16 ? 16 : 8;
}

__attribute__((target("avx512f"))) static void bl_move_64(void *target, const void *source)
{
    _mm512_storeu_si512(target, _mm512_loadu_si512(source));
}

__attribute__((target("avx2"))) static void bl_move_32(void *target, const void *source)
{
    _mm256_storeu_si256(target, _mm256_loadu_si256(source));
}

/* Move width bytes by one load and one store, through the cache. */
static inline void bl_move(void *target, const void *source, uint32_t width)
{
    if (width == 64)
        bl_move_64(target, source);
    else if (width == 32)
        bl_move_32(target, source);
    else if (width == 16)
        _mm_storeu_si128(target, _mm_loadu_si128(source));
    else
        *(volatile uint64_t *)target = *(const volatile uint64_t *)source;
}

static inline void bl_pause_now(void) { _mm_pause(); }

/* Return the instruction address in a signal's context. */
static inline uint64_t bl_interrupted_at(const void *context)
{
    return (uint64_t)((const ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
}

/* Return the time stamp counter. */
static inline uint64_t bl_ticks(void) { return __builtin_ia32_rdtsc(); }

/* About 100 us: the counter's rate is nearly that of the CPU. */
static inline uint64_t bl_ticks_of_100_us(void) { return 1u << 18; }

#endif
