/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * CRC-32C by the crc32 instruction of x86-64.
 *
 * It takes 8 bytes per cycle and has a latency of three cycles, so three parallel lanes keep it
 * busy. To join them, the CRC of a lane is shifted over the n bytes that follow it: its carry-less
 * product with x^(8n-33), passed through the instruction once more. Because a CRC is linear, the
 * products are xored into the last word of the third lane.
 */
#ifdef __x86_64__

#include <immintrin.h>

#include "api/coherence.h"
#include "coherence/crc32c_isa.h"
#include "coherence/instructions.h"

/* Add fewer than 8 bytes to a CRC. */
__attribute__((target(BL_CRC_TARGET))) static inline uint32_t
bl_crc_tail(uint32_t crc, const uint8_t *bytes, size_t size)
{
    if (size >= 4) {
        uint32_t half;
        memcpy(&half, bytes, sizeof half);
        crc = _mm_crc32_u32(crc, half);
        bytes += 4, size -= 4;
    }
    for (; size > 0; bytes++, size--)
        crc = _mm_crc32_u8(crc, *bytes);
    return crc;
}

__attribute__((target(BL_CRC_TARGET))) static uint32_t
bl_crc_single(uint32_t crc, const uint8_t *bytes, size_t size)
{
    uint64_t wide = crc;
    for (; size >= 8; bytes += 8, size -= 8)
        wide = _mm_crc32_u64(wide, bl_crc_word(bytes));
    return bl_crc_tail((uint32_t)wide, bytes, size);
}

__attribute__((target(BL_CRC_TARGET ",pclmul"), always_inline)) static inline uint64_t
bl_crc_product(uint64_t crc, uint32_t power)
{
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)crc),
                                           _mm_cvtsi64_si128((long long)power), 0);
    return (uint64_t)_mm_cvtsi128_si64(product);
}

/* Process three lanes of lane_size bytes each. far and near are x^(8n-33) for n of two lanes and of
 * one. */
__attribute__((target(BL_CRC_TARGET ",pclmul"), always_inline)) static inline uint32_t
bl_crc_three(uint32_t crc, const uint8_t *bytes, size_t lane_size, uint32_t far, uint32_t near)
{
    const uint8_t *first = bytes, *second = bytes + lane_size, *third = second + lane_size;
    const uint8_t *last = second - 8;
    uint64_t a = crc, b = 0, c = 0;
    for (; first < last; first += 8, second += 8, third += 8) {
        a = _mm_crc32_u64(a, bl_crc_word(first));
        b = _mm_crc32_u64(b, bl_crc_word(second));
        c = _mm_crc32_u64(c, bl_crc_word(third));
    }
    a = _mm_crc32_u64(a, bl_crc_word(first));
    b = _mm_crc32_u64(b, bl_crc_word(second));
    uint64_t joined = bl_crc_product(a, far) ^ bl_crc_product(b, near);
    return (uint32_t)_mm_crc32_u64(c, bl_crc_word(third) ^ joined);
}

__attribute__((target(BL_CRC_TARGET ",pclmul"))) static uint32_t
bl_crc_lanes(uint32_t crc, const uint8_t *bytes, size_t size)
{
    for (; size >= 3 * 1024; bytes += 3 * 1024, size -= 3 * 1024)
        crc = bl_crc_three(crc, bytes, 1024, 0xa51b6135, 0x170076fa);
    for (; size >= 3 * 128; bytes += 3 * 128, size -= 3 * 128)
        crc = bl_crc_three(crc, bytes, 128, 0xb9e02b86, 0x0d3b6092);
    return bl_crc_single(crc, bytes, size);
}

__attribute__((target(BL_CRC_TARGET))) void
bl_crc_four_by_instruction(uint32_t crc[4], const uint8_t *bytes, size_t stride, size_t size)
{
    const uint8_t *end = bytes + (size & ~(size_t)7);
    uint64_t a = crc[0], b = crc[1], c = crc[2], d = crc[3];
    for (; bytes < end; bytes += 8) {
        a = _mm_crc32_u64(a, bl_crc_word(bytes));
        b = _mm_crc32_u64(b, bl_crc_word(bytes + stride));
        c = _mm_crc32_u64(c, bl_crc_word(bytes + 2 * stride));
        d = _mm_crc32_u64(d, bl_crc_word(bytes + 3 * stride));
    }
    crc[0] = (uint32_t)a, crc[1] = (uint32_t)b, crc[2] = (uint32_t)c, crc[3] = (uint32_t)d;
    for (int i = 0; i < 4 && size % 8; i++, bytes += stride)
        crc[i] = bl_crc_tail(crc[i], bytes, size % 8);
}

int bl_crc_has_instruction(uint32_t features) { return (features & BL_CPU_SSE42) != 0; }

uint32_t bl_crc_by_instruction(uint32_t crc, const uint8_t *bytes, size_t size, uint32_t features)
{
    return features & BL_CPU_PCLMUL ? bl_crc_lanes(crc, bytes, size)
                                    : bl_crc_single(crc, bytes, size);
}

#endif
