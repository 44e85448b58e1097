/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * CRC-32C by carry-less products of 512 bits: several times the crc32 instruction, so that checking a
 * block costs little beside copying it.
 *
 * A register holds 64 bytes as four lanes of 128 bits. To move a lane over the D bits that follow,
 * multiply its halves by x^(D+31) and x^(D-33) (modulo the polynomial, reflected); what it meets
 * there is xored in. Four registers run 256 bytes ahead of themselves, then they are folded into
 * one, its lanes into one, and the crc32 instruction reduces the last 16 bytes.
 */
#include <immintrin.h>

#include "api.h"

#define BL_CRC_WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))

static const uint64_t bl_crc_over_2048[2] = {0xdcb17aa4, 0xb9e02b86};
static const uint64_t bl_crc_over_512[2] = {0x740eef02, 0x9e4addf8};
static const uint64_t bl_crc_over_128[2] = {0xf20c0dfe, 0x493c7d27};

BL_CRC_WIDE static inline __m512i bl_crc_powers(const uint64_t powers[2])
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)powers));
}

BL_CRC_WIDE static inline __m512i bl_crc_fold(__m512i sum, __m512i powers, __m512i meets)
{
    __m512i low = _mm512_clmulepi64_epi128(sum, powers, 0x00);
    __m512i high = _mm512_clmulepi64_epi128(sum, powers, 0x11);
    return _mm512_ternarylogic_epi64(low, high, meets, 0x96); /* low ^ high ^ meets */
}

BL_CRC_WIDE static inline __m128i bl_crc_fold_lane(__m128i sum, __m128i powers, __m128i meets)
{
    __m128i low = _mm_clmulepi64_si128(sum, powers, 0x00);
    __m128i high = _mm_clmulepi64_si128(sum, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), meets);
}

BL_CRC_WIDE static uint32_t bl_crc_reduce(__m512i sum)
{
    __m128i powers = _mm_loadu_si128((const __m128i *)bl_crc_over_128);
    __m128i lane = _mm512_extracti32x4_epi32(sum, 0);
    lane = bl_crc_fold_lane(lane, powers, _mm512_extracti32x4_epi32(sum, 1));
    lane = bl_crc_fold_lane(lane, powers, _mm512_extracti32x4_epi32(sum, 2));
    lane = bl_crc_fold_lane(lane, powers, _mm512_extracti32x4_epi32(sum, 3));
    uint64_t crc = _mm_crc32_u64(0, (uint64_t)_mm_extract_epi64(lane, 0));
    return (uint32_t)_mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(lane, 1));
}

/* Of size bytes: a multiple of 64, and 256 at least. */
BL_CRC_WIDE static uint32_t bl_crc_wide(uint32_t crc, const uint8_t *bytes, size_t size)
{
    const uint8_t *end = bytes + size;
    __m512i seed = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc));
    __m512i a = _mm512_xor_si512(_mm512_loadu_si512(bytes), seed);
    __m512i b = _mm512_loadu_si512(bytes + 64);
    __m512i c = _mm512_loadu_si512(bytes + 128);
    __m512i d = _mm512_loadu_si512(bytes + 192);
    __m512i powers = bl_crc_powers(bl_crc_over_2048);
    for (bytes += 256; end - bytes >= 256; bytes += 256) {
        a = bl_crc_fold(a, powers, _mm512_loadu_si512(bytes));
        b = bl_crc_fold(b, powers, _mm512_loadu_si512(bytes + 64));
        c = bl_crc_fold(c, powers, _mm512_loadu_si512(bytes + 128));
        d = bl_crc_fold(d, powers, _mm512_loadu_si512(bytes + 192));
    }
    powers = bl_crc_powers(bl_crc_over_512);
    a = bl_crc_fold(bl_crc_fold(bl_crc_fold(a, powers, b), powers, c), powers, d);
    for (; bytes < end; bytes += 64)
        a = bl_crc_fold(a, powers, _mm512_loadu_si512(bytes));
    return bl_crc_reduce(a);
}
