/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * CRC-32C by carry-less products of 512 bits: several times as fast as the crc32 instruction, and
 * almost free for bytes that a copy has in a register anyway.
 *
 * A register holds 64 bytes as four lanes of 128 bits. To move a lane over the D bits that follow,
 * multiply its halves by x^(D+31) and x^(D-33) (modulo the polynomial, reflected); the bits there
 * are xored in. Four registers advance by 256 bytes per step. At the end they are folded into one
 * register, its lanes into one, and the crc32 instruction reduces the last 16 bytes.
 */
#ifdef __x86_64__

#include "coherence/crc32c_isa.h"
#include "coherence/instructions.h"

#define BL_CRC_WIDE __attribute__((target(BL_CRC_TARGET ",avx512f,vpclmulqdq,pclmul")))

static const uint64_t bl_crc_over_2048[2] = {0xdcb17aa4, 0xb9e02b86};
static const uint64_t bl_crc_over_512[2] = {0x740eef02, 0x9e4addf8};
static const uint64_t bl_crc_over_128[2] = {0xf20c0dfe, 0x493c7d27};

BL_CRC_WIDE static inline __m512i bl_crc_powers(const uint64_t powers[2])
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)powers));
}

BL_CRC_WIDE static inline __m512i bl_crc_fold(__m512i sum, __m512i powers, __m512i data)
{
    __m512i low = _mm512_clmulepi64_epi128(sum, powers, 0x00);
    __m512i high = _mm512_clmulepi64_epi128(sum, powers, 0x11);
    return _mm512_ternarylogic_epi64(low, high, data, 0x96); /* low ^ high ^ data */
}

BL_CRC_WIDE static inline __m128i bl_crc_fold_lane(__m128i sum, __m128i powers, __m128i data)
{
    __m128i low = _mm_clmulepi64_si128(sum, powers, 0x00);
    __m128i high = _mm_clmulepi64_si128(sum, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), data);
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

/* A copy reads remote memory: lines are prefetched this many bytes ahead, also beyond the end of a
 * chunk, where the reduction of the CRC would otherwise stall the loads. Measured: half and double
 * this value are slower. */
enum { BL_CRC_AHEAD = 4096 };

/* How the bytes are stored while the CRC is computed. Each byte is loaded once, so the CRC is that
 * of the stored bytes. */
enum bl_crc_move { BL_CRC_STAY, BL_CRC_COPY, BL_CRC_STREAM };

BL_CRC_WIDE __attribute__((always_inline)) static inline __m512i
bl_crc_take(uint8_t *target, const uint8_t *source, size_t at, enum bl_crc_move move)
{
    __m512i line = bl_load64_once(source + at);
    if (move == BL_CRC_COPY) {
        _mm_prefetch((const char *)(source + at + BL_CRC_AHEAD), _MM_HINT_T0);
        _mm512_storeu_si512(target + at, line);
    }
    if (move == BL_CRC_STREAM)
        bl_nt64(target + at, line);
    return line;
}

/* Returns the CRC of size bytes: a multiple of 64, and at least 256. */
BL_CRC_WIDE __attribute__((always_inline)) static inline uint32_t
bl_crc_wide(uint32_t crc, uint8_t *target, const uint8_t *source, size_t size,
            enum bl_crc_move move)
{
    __m512i seed = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc));
    __m512i a = _mm512_xor_si512(bl_crc_take(target, source, 0, move), seed);
    __m512i b = bl_crc_take(target, source, 64, move);
    __m512i c = bl_crc_take(target, source, 128, move);
    __m512i d = bl_crc_take(target, source, 192, move);
    __m512i powers = bl_crc_powers(bl_crc_over_2048);
    size_t at = 256;
    for (; size - at >= 256; at += 256) {
        a = bl_crc_fold(a, powers, bl_crc_take(target, source, at, move));
        b = bl_crc_fold(b, powers, bl_crc_take(target, source, at + 64, move));
        c = bl_crc_fold(c, powers, bl_crc_take(target, source, at + 128, move));
        d = bl_crc_fold(d, powers, bl_crc_take(target, source, at + 192, move));
    }
    powers = bl_crc_powers(bl_crc_over_512);
    a = bl_crc_fold(bl_crc_fold(bl_crc_fold(a, powers, b), powers, c), powers, d);
    for (; at < size; at += 64)
        a = bl_crc_fold(a, powers, bl_crc_take(target, source, at, move));
    return bl_crc_reduce(a);
}

int bl_crc_is_wide(size_t size)
{
    uint32_t needs = BL_CPU_VPCLMUL | BL_CPU_AVX512;
    return size >= 256 && (bl_cpu_features() & needs) == needs;
}

BL_CRC_WIDE uint32_t bl_crc_wide_stay(uint32_t crc, const uint8_t *source, size_t size)
{
    return bl_crc_wide(crc, NULL, source, size, BL_CRC_STAY);
}

BL_CRC_WIDE uint32_t bl_crc_wide_copy(uint32_t crc, uint8_t *target, const uint8_t *source,
                                      size_t size)
{
    return bl_crc_wide(crc, target, source, size, BL_CRC_COPY);
}

BL_CRC_WIDE uint32_t bl_crc_wide_stream(uint32_t crc, uint8_t *target, const uint8_t *source,
                                        size_t size)
{
    return bl_crc_wide(crc, target, source, size, BL_CRC_STREAM);
}

#endif
