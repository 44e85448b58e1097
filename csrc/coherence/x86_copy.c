/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Streaming copies on x86-64: one loop for each instruction set. The stores of a line are adjacent,
 * so that its write-combining buffer is full before the next one is opened.
 *
 * bl_copy_stream uses the widest instruction set of the CPU that bl_cpu_limit does not disable. The
 * line-to-line move (movdir64b) comes after the vector paths: it is weakly ordered like them, its
 * load and store cannot be scheduled apart, and the protocol does not rely on its advantage, that a
 * line cannot be torn. A CPU without AVX2 uses it, and bl_cpu_limit can force it.
 */
#ifdef __x86_64__

#include "api/coherence.h"
#include "coherence/copy_isa.h"
#include "coherence/instructions.h"

static void bl_copy_sse2(uint8_t *target, const uint8_t *source, size_t size)
{
    for (const uint8_t *end = source + size; source < end;
         source += BL_LINE_SIZE, target += BL_LINE_SIZE) {
        const __m128i *from = (const __m128i *)source;
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        bl_nt16(target, a);
        bl_nt16(target + 16, b);
        bl_nt16(target + 32, c);
        bl_nt16(target + 48, d);
    }
}

__attribute__((target("avx2"))) static void bl_copy_avx2(uint8_t *target, const uint8_t *source,
                                                         size_t size)
{
    for (const uint8_t *end = source + size; source < end;
         source += BL_LINE_SIZE, target += BL_LINE_SIZE) {
        __m256i a = _mm256_loadu_si256((const __m256i *)source);
        __m256i b = _mm256_loadu_si256((const __m256i *)(source + 32));
        bl_nt32(target, a);
        bl_nt32(target + 32, b);
    }
}

__attribute__((target("avx512f"))) static void
bl_copy_avx512(uint8_t *target, const uint8_t *source, size_t size)
{
    for (const uint8_t *end = source + size; source < end;
         source += BL_LINE_SIZE, target += BL_LINE_SIZE)
        bl_nt64(target, _mm512_loadu_si512(source));
}

static void bl_copy_movdir64b(uint8_t *target, const uint8_t *source, size_t size)
{
    for (const uint8_t *end = source + size; source < end;
         source += BL_LINE_SIZE, target += BL_LINE_SIZE)
        bl_movdir64b(target, source);
}

void bl_copy_stream(void *target, const void *source, size_t size)
{
    uint32_t features = bl_cpu_features();
    if (features & BL_CPU_AVX512)
        bl_copy_avx512(target, source, size);
    else if (features & BL_CPU_AVX2)
        bl_copy_avx2(target, source, size);
    else if (features & BL_CPU_MOVDIR64B)
        bl_copy_movdir64b(target, source, size);
    else
        bl_copy_sse2(target, source, size);
}

const char *bl_copy_isa(void)
{
    uint32_t features = bl_cpu_features();
    return features & BL_CPU_AVX512      ? "avx512"
           : features & BL_CPU_AVX2      ? "avx2"
           : features & BL_CPU_MOVDIR64B ? "movdir64b"
                                         : "sse2";
}

#endif
