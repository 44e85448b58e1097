/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * CRC-32C (Castagnoli, reflected) of blocks and of long messages. Four paths compute the same
 * value; the fastest is in coherence/crc32c_wide.c.
 *
 * The crc32 instruction takes 8 bytes a cycle but answers after three, so three lanes side by side
 * keep it busy. To join them: the CRC of a lane, moved over the n bytes that follow it, is its
 * carry-less product with x^(8n-33), put through the instruction once more; and because a CRC is
 * linear, the products are simply xored into the last word of the third lane.
 */
#include <immintrin.h>
#include <string.h>

#include "api/coherence.h"
#include "coherence/crc32c_wide.h"

static uint32_t bl_crc_table[8][256]; /* [k][b]: byte b, then k zero bytes; for the plain path */

__attribute__((constructor)) static void bl_crc_table_fill(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (0x82f63b78u & -(crc & 1));
        bl_crc_table[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t crc = bl_crc_table[k - 1][byte];
            bl_crc_table[k][byte] = (crc >> 8) ^ bl_crc_table[0][crc & 0xff];
        }
}

static inline uint64_t bl_crc_word(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

static uint32_t bl_crc_plain(uint32_t crc, const uint8_t *bytes, size_t size)
{
    for (; size >= 8; bytes += 8, size -= 8) {
        uint64_t word = bl_crc_word(bytes) ^ crc;
        crc = 0;
        for (int k = 7; k >= 0; k--, word >>= 8)
            crc ^= bl_crc_table[k][word & 0xff];
    }
    for (; size > 0; bytes++, size--)
        crc = (crc >> 8) ^ bl_crc_table[0][(crc ^ *bytes) & 0xff];
    return crc;
}

__attribute__((target(BL_CRC_TARGET))) static uint32_t
bl_crc_single(uint32_t crc, const uint8_t *bytes, size_t size)
{
    uint64_t wide = crc;
    for (; size >= 8; bytes += 8, size -= 8)
        wide = _mm_crc32_u64(wide, bl_crc_word(bytes));
    crc = (uint32_t)wide;
    for (; size > 0; bytes++, size--)
        crc = _mm_crc32_u8(crc, *bytes);
    return crc;
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

uint32_t bl_crc32c(uint32_t seed, const void *bytes, size_t size)
{
    uint32_t features = bl_cpu_features(), crc = ~seed;
    const uint8_t *next = bytes;
    if (bl_crc_is_wide(size)) {
        size_t whole = size & ~(size_t)63;
        crc = bl_crc_wide_stay(crc, next, whole);
        next += whole, size -= whole;
    }
    if ((features & BL_CPU_SSE42) && (features & BL_CPU_PCLMUL))
        return ~bl_crc_lanes(crc, next, size);
    if (features & BL_CPU_SSE42)
        return ~bl_crc_single(crc, next, size);
    return ~bl_crc_plain(crc, next, size);
}
