/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The limit loops, with which ratio_to_limit compares. They use bare instructions, the widest that
 * the CPU has, without checks, interleaving or a protocol. They share nothing with csrc/, so that a
 * slow verb cannot slow its own yardstick. This file changes only in separate commits, because
 * every recorded ratio depends on it.
 */
#include "limit.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

enum {
    LINE = 64,
    LOOKS_PER_CLOCK = 1024      /* polls between two readings of the clock */
};

#ifdef __x86_64__

static struct {
    int clflushopt, clwb, avx2, avx512;
} has;

__attribute__((constructor)) static void find(void)
{
    uint32_t a, b, c, d;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        has.clflushopt = b >> 23 & 1;
        has.clwb = b >> 24 & 1;
    }
    __builtin_cpu_init();
    has.avx2 = __builtin_cpu_supports("avx2");
    has.avx512 = __builtin_cpu_supports("avx512f");
}

int limit_has_clflushopt(void) { return has.clflushopt; }
int limit_has_clwb(void) { return has.clwb; }

static inline void full_fence(void) { __asm__ volatile("mfence" ::: "memory"); }
static inline void store_fence(void) { __asm__ volatile("sfence" ::: "memory"); }
static inline void clflush(const void *p) { __asm__ volatile("clflush (%0)" ::"r"(p) : "memory"); }
static inline void clwb(const void *p) { __asm__ volatile("clwb (%0)" ::"r"(p) : "memory"); }

static inline void clflushopt(const void *p)
{
    __asm__ volatile("clflushopt (%0)" ::"r"(p) : "memory");
}

__attribute__((target("avx512f"))) static void stream512(uint8_t *to, const uint8_t *from,
                                                         uint64_t size)
{
    for (uint64_t i = 0; i < size; i += LINE)
        _mm512_stream_si512((__m512i *)(to + i), _mm512_loadu_si512(from + i));
}

__attribute__((target("avx2"))) static void stream256(uint8_t *to, const uint8_t *from,
                                                      uint64_t size)
{
    for (uint64_t i = 0; i < size; i += 32)
        _mm256_stream_si256((__m256i *)(to + i), _mm256_loadu_si256((const __m256i *)(from + i)));
}

static void stream128(uint8_t *to, const uint8_t *from, uint64_t size)
{
    for (uint64_t i = 0; i < size; i += 16)
        _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
}

static inline void drop(const uint8_t *line, uint64_t size)
{
    if (has.clflushopt)
        for (uint64_t i = 0; i < size; i += LINE)
            clflushopt(line + i);
    else
        for (uint64_t i = 0; i < size; i += LINE)
            clflush(line + i);
}

static inline void stream(uint8_t *to, const uint8_t *from, uint64_t size)
{
    if (has.avx512)
        stream512(to, from, size);
    else if (has.avx2)
        stream256(to, from, size);
    else
        stream128(to, from, size);
}

static inline void stream_line(uint8_t *line, uint32_t value)
{
    for (int k = 0; k < 4; k++)
        _mm_stream_si128((__m128i *)line + k, _mm_set1_epi32((int)value));
}

static inline void store_line(uint8_t *line, uint32_t value)
{
    for (int k = 0; k < 4; k++)
        _mm_store_si128((__m128i *)line + k, _mm_set1_epi32((int)value));
}

#else

/* aarch64: a non-temporal store is a hint, so a streamed line is also written back and dropped; and
 * only dsb completes that. Where a kind names an instruction of x86-64, its counterpart is used. */

int limit_has_clflushopt(void) { return 0; }
int limit_has_clwb(void) { return 1; }

static inline void full_fence(void) { __asm__ volatile("dsb sy" ::: "memory"); }
static inline void store_fence(void) { __asm__ volatile("dsb sy" ::: "memory"); }
static inline void clflush(const void *p) { __asm__ volatile("dc civac, %0" ::"r"(p) : "memory"); }
static inline void clflushopt(const void *p) { clflush(p); }
static inline void clwb(const void *p) { __asm__ volatile("dc cvac, %0" ::"r"(p) : "memory"); }

static inline void drop(const uint8_t *line, uint64_t size)
{
    for (uint64_t i = 0; i < size; i += LINE)
        clflush(line + i);
}

static inline void stream(uint8_t *to, const uint8_t *from, uint64_t size)
{
    for (uint64_t i = 0; i < size; i += 32)
        __asm__ volatile("stnp %q0, %q1, [%2]"
                         ::"w"(vld1q_u8(from + i)), "w"(vld1q_u8(from + i + 16)), "r"(to + i)
                         : "memory");
    drop(to, size);
}

static inline void store_line(uint8_t *line, uint32_t value)
{
    for (int k = 0; k < 4; k++)
        vst1q_u32((uint32_t *)line + 4 * k, vdupq_n_u32(value));
}

static inline void stream_line(uint8_t *line, uint32_t value)
{
    uint32_t words[LINE / 4];
    for (int k = 0; k < LINE / 4; k++)
        words[k] = value;
    stream(line, (const uint8_t *)words, LINE);
}

#endif

/* ---- Copies. */

int limit_write(const void *base, uint64_t offset, void *buffer, uint64_t size)
{
    stream((uint8_t *)(uintptr_t)base + offset, buffer, size);
    store_fence();
    return 0;
}

int limit_read(const void *base, uint64_t offset, void *buffer, uint64_t size)
{
    const uint8_t *from = (const uint8_t *)base + offset;
    full_fence();
    drop(from, size);
    full_fence();
    memcpy(buffer, from, size);
    return 0;
}

int limit_load(const void *base, uint64_t offset, void *buffer, uint64_t size)
{
    memcpy(buffer, (const uint8_t *)base + offset, size);
    return 0;
}

int limit_store(const void *base, uint64_t offset, void *buffer, uint64_t size)
{
    memcpy((uint8_t *)(uintptr_t)base + offset, buffer, size);
    return 0;
}

int limit_store_clflush(const void *base, uint64_t offset, void *buffer, uint64_t size)
{
    limit_store(base, offset, buffer, size);
    for (uint64_t i = 0; i < size; i += LINE)
        clflush((const uint8_t *)base + offset + i);
    store_fence();
    return 0;
}

int limit_store_clflushopt(const void *base, uint64_t offset, void *buffer, uint64_t size)
{
    limit_store(base, offset, buffer, size);
    for (uint64_t i = 0; i < size; i += LINE)
        clflushopt((const uint8_t *)base + offset + i);
    store_fence();
    return 0;
}

int limit_store_clwb(const void *base, uint64_t offset, void *buffer, uint64_t size)
{
    limit_store(base, offset, buffer, size);
    for (uint64_t i = 0; i < size; i += LINE)
        clwb((const uint8_t *)base + offset + i);
    store_fence();
    return 0;
}

int limit_gather(const void *context, uint64_t first, void *buffer, uint64_t size)
{
    const limit_rows *rows = context;
    (void)buffer;
    for (uint64_t i = first, end = first + size / rows->size; i < end; i++)
        stream((uint8_t *)rows->pool_places[i], (const uint8_t *)rows->private_places[i],
               rows->size);
    store_fence();
    return 0;
}

int limit_scatter(const void *context, uint64_t first, void *buffer, uint64_t size)
{
    const limit_rows *rows = context;
    uint64_t end = first + size / rows->size;
    (void)buffer;
    full_fence();
    for (uint64_t i = first; i < end; i++)
        drop((const uint8_t *)rows->pool_places[i], rows->size);
    full_fence();
    for (uint64_t i = first; i < end; i++)
        memcpy((void *)rows->private_places[i], (const void *)rows->pool_places[i], rows->size);
    return 0;
}

/* ---- Exchange of lines. */

static inline uint8_t *slot(const limit_lines *lines, uint8_t *way, uint32_t sequence)
{
    return way + (uint64_t)(sequence & (lines->slots - 1)) * lines->stride;
}

/* Send count lines from sequence on, with one fence behind them. */
static inline void send(const limit_lines *lines, uint8_t *way, uint32_t sequence, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *line = slot(lines, way, sequence + i);
        if (lines->coherent)
            store_line(line, sequence + i);
        else
            stream_line(line, sequence + i);
    }
    store_fence();
}

static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Wait until count lines from sequence on have arrived. One fence serves a poll of all missing
 * lines. */
static int receive(const limit_lines *lines, uint8_t *way, uint32_t sequence, uint32_t count)
{
    uint64_t looks = 0, deadline = 0;
    for (uint32_t have = 0;;) {
        if (!lines->coherent)
            for (uint32_t i = have; i < count; i++)
                drop(slot(lines, way, sequence + i), LINE);
        full_fence();
        while (have < count &&
               *(volatile uint32_t *)slot(lines, way, sequence + have) == sequence + have)
            have++;
        if (have == count)
            return 0;
        if (++looks % LOOKS_PER_CLOCK == 0) {
            uint64_t now = clock_ns();
            if (deadline == 0)
                deadline = now + lines->timeout_ns;
            else if (now > deadline)
                return -ETIMEDOUT;
        }
    }
}

int limit_request(const limit_lines *lines)
{
    uint64_t sent = 0;
    for (uint64_t done = 0; done < lines->count; done += lines->batch) {
        for (; sent < lines->count && sent - done < lines->depth; sent += lines->batch)
            send(lines, lines->requests, lines->sequence + (uint32_t)sent, lines->batch);
        int status =
            receive(lines, lines->replies, lines->sequence + (uint32_t)done, lines->batch);
        if (status < 0)
            return status;
    }
    return 0;
}

int limit_answer(const limit_lines *lines)
{
    for (uint64_t done = 0; done < lines->count; done += lines->batch) {
        uint32_t sequence = lines->sequence + (uint32_t)done;
        int status = receive(lines, lines->requests, sequence, lines->batch);
        if (status < 0)
            return status;
        send(lines, lines->replies, sequence, lines->batch);
    }
    return 0;
}

/* ---- A block table: scanned by lines. */

enum { SCAN_LINES = 4096 };     /* invalidated together: 256 KiB */

static const uint8_t *line_of(const limit_table *table, uint64_t number)
{
    number += table->first;
    return table->pieces[number / table->piece_lines] + number % table->piece_lines * LINE;
}

int limit_scan(const limit_table *table)
{
    for (uint64_t number = 0; number < table->lines; number++) {
        if (!table->coherent && number % SCAN_LINES == 0) {
            uint64_t end = number + SCAN_LINES < table->lines ? number + SCAN_LINES : table->lines;
            full_fence();
            for (uint64_t i = number; i < end; i++)
                drop(line_of(table, i), LINE);
            full_fence();
        }
        uint64_t line[8];
        memcpy(line, line_of(table, number), sizeof line);
        int status = table->insert(table->index, line, (uint32_t)number);
        if (status < 0)
            return status;
    }
    return 0;
}

/* ---- A hash table. */

static limit_slot *slot_of(const limit_hash *hash, uint64_t key)
{
    uint64_t at = (key * 0x9e3779b97f4a7c15) >> 32;
    limit_slot *found = &hash->slot[at & (hash->slots - 1)];
    while (found->key && found->key != key)
        found = &hash->slot[++at & (hash->slots - 1)];
    return found;
}

void limit_hash_put(const limit_hash *hash, const uint64_t *keys, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        *slot_of(hash, keys[i]) = (limit_slot){keys[i], i};
}

uint64_t limit_hash_walk(const limit_hash *hash, const uint64_t *keys, uint64_t count)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < count; i++)
        sum += slot_of(hash, keys[i])->value;
    return sum;
}

/* ---- A bare index. */

enum { INDEX_AHEAD = 16 };      /* keys prefetched: the misses that a core has in flight */

static void prefetch(const limit_index *index, const uint64_t *keys, uint64_t i, uint64_t count)
{
    if (i < count)
        index->prefetch(index->index, keys + 2 * i);
}

uint64_t limit_index_walk(const limit_index *index, const uint64_t *keys, uint64_t count)
{
    uint64_t found = 0;
    for (uint64_t i = 0; i < INDEX_AHEAD; i++)
        prefetch(index, keys, i, count);
    for (uint64_t i = 0; i < count; i++) {
        prefetch(index, keys, i + INDEX_AHEAD, count);
        found += index->find(index->index, keys + 2 * i) >= 0;
    }
    return found;
}

int limit_index_replace(const limit_index *index, const uint64_t *old, const uint64_t *keys,
                        uint64_t count)
{
    int status = 0;
    for (uint64_t i = 0; i < count && status == 0; i++) {
        prefetch(index, keys, i + INDEX_AHEAD, count);
        if (old) {
            prefetch(index, old, i + INDEX_AHEAD, count);
            status = index->remove(index->index, old + 2 * i);
        }
        if (status == 0)
            status = index->insert(index->index, keys + 2 * i, (uint32_t)i);
    }
    return status;
}
