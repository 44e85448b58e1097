/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * XXH3-64 with a seed (api/routing.h), from its specification: there are separate paths for inputs
 * of up to 16, 128, 240, and more bytes. All numbers are little-endian, like the machine's.
 */
#include "api/routing.h"

#include <string.h>

#define BL_XXH_P32_1 0x9E3779B1ull
#define BL_XXH_P32_2 0x85EBCA77ull
#define BL_XXH_P32_3 0xC2B2AE3Dull
#define BL_XXH_P64_1 0x9E3779B185EBCA87ull
#define BL_XXH_P64_2 0xC2B2AE3D27D4EB4Full
#define BL_XXH_P64_3 0x165667B19E3779F9ull
#define BL_XXH_P64_4 0x85EBCA77C2B2AE63ull
#define BL_XXH_P64_5 0x27D4EB2F165667C5ull
#define BL_XXH_MIX_1 0x165667919E3779F9ull
#define BL_XXH_MIX_2 0x9FB21C651E98DF25ull

enum { BL_XXH_SECRET = 192, BL_XXH_STRIPE = 64, BL_XXH_BLOCK = 1024 };

static const uint8_t bl_xxh_secret[BL_XXH_SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t bl_xxh_64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint32_t bl_xxh_32(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint64_t bl_xxh_rotated(uint64_t value, int bits)
{
    return value << bits | value >> (64 - bits);
}

/* Multiply to 128 bits, and fold the halves. */
static inline uint64_t bl_xxh_folded(uint64_t a, uint64_t b)
{
    __extension__ typedef unsigned __int128 wide;
    wide product = (wide)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t bl_xxh_short_end(uint64_t hash)
{
    hash = (hash ^ hash >> 33) * BL_XXH_P64_2;
    hash = (hash ^ hash >> 29) * BL_XXH_P64_3;
    return hash ^ hash >> 32;
}

static inline uint64_t bl_xxh_end(uint64_t hash)
{
    hash = (hash ^ hash >> 37) * BL_XXH_MIX_1;
    return hash ^ hash >> 32;
}

static uint64_t bl_xxh_to_16(const uint8_t *in, uint64_t size, uint64_t seed)
{
    const uint8_t *secret = bl_xxh_secret;
    if (size > 8) {
        uint64_t low = bl_xxh_64(in) ^ ((bl_xxh_64(secret + 24) ^ bl_xxh_64(secret + 32)) + seed);
        uint64_t high = bl_xxh_64(in + size - 8) ^
                        ((bl_xxh_64(secret + 40) ^ bl_xxh_64(secret + 48)) - seed);
        return bl_xxh_end(size + __builtin_bswap64(low) + high + bl_xxh_folded(low, high));
    }
    if (size >= 4) {
        seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t both = bl_xxh_32(in + size - 4) + ((uint64_t)bl_xxh_32(in) << 32);
        uint64_t hash = both ^ ((bl_xxh_64(secret + 8) ^ bl_xxh_64(secret + 16)) - seed);
        hash ^= bl_xxh_rotated(hash, 49) ^ bl_xxh_rotated(hash, 24);
        hash *= BL_XXH_MIX_2;
        hash ^= (hash >> 35) + size;
        hash *= BL_XXH_MIX_2;
        return hash ^ hash >> 28;
    }
    if (!size)
        return bl_xxh_short_end(seed ^ bl_xxh_64(secret + 56) ^ bl_xxh_64(secret + 64));
    uint32_t all = (uint32_t)in[0] << 16 | (uint32_t)in[size >> 1] << 24 | in[size - 1] |
                   (uint32_t)size << 8;
    return bl_xxh_short_end(all ^ ((bl_xxh_32(secret) ^ bl_xxh_32(secret + 4)) + seed));
}

static inline uint64_t bl_xxh_mix(const uint8_t *in, const uint8_t *secret, uint64_t seed)
{
    return bl_xxh_folded(bl_xxh_64(in) ^ (bl_xxh_64(secret) + seed),
                         bl_xxh_64(in + 8) ^ (bl_xxh_64(secret + 8) - seed));
}

/* Pairs of 16 bytes from both ends. */
static inline uint64_t bl_xxh_to_128(const uint8_t *in, uint64_t size, uint64_t seed)
{
    uint64_t hash = size * BL_XXH_P64_1;
    for (uint64_t i = (size - 1) / 32 + 1; i-- > 0;) {
        hash += bl_xxh_mix(in + 16 * i, bl_xxh_secret + 32 * i, seed);
        hash += bl_xxh_mix(in + size - 16 * (i + 1), bl_xxh_secret + 32 * i + 16, seed);
    }
    return bl_xxh_end(hash);
}

static uint64_t bl_xxh_to_240(const uint8_t *in, uint64_t size, uint64_t seed)
{
    uint64_t hash = size * BL_XXH_P64_1;
    for (uint64_t i = 0; i < 8; i++)
        hash += bl_xxh_mix(in + 16 * i, bl_xxh_secret + 16 * i, seed);
    hash = bl_xxh_end(hash);
    for (uint64_t i = 8; i < size / 16; i++)
        hash += bl_xxh_mix(in + 16 * i, bl_xxh_secret + 16 * (i - 8) + 3, seed);
    hash += bl_xxh_mix(in + size - 16, bl_xxh_secret + 119, seed);
    return bl_xxh_end(hash);
}

static inline void bl_xxh_stripe(uint64_t sums[8], const uint8_t *in, const uint8_t *secret)
{
    for (int i = 0; i < 8; i++) {
        uint64_t value = bl_xxh_64(in + 8 * i), key = value ^ bl_xxh_64(secret + 8 * i);
        sums[i ^ 1] += value;
        sums[i] += (key & UINT32_MAX) * (key >> 32);
    }
}

static uint64_t bl_xxh_long(const uint8_t *in, uint64_t size, uint64_t seed)
{
    uint8_t secret[BL_XXH_SECRET];
    for (int i = 0; i < BL_XXH_SECRET; i += 16) {
        uint64_t pair[2] = {bl_xxh_64(bl_xxh_secret + i) + seed,
                            bl_xxh_64(bl_xxh_secret + i + 8) - seed};
        memcpy(secret + i, pair, sizeof pair);
    }
    uint64_t sums[8] = {BL_XXH_P32_3, BL_XXH_P64_1, BL_XXH_P64_2, BL_XXH_P64_3,
                        BL_XXH_P64_4, BL_XXH_P32_2, BL_XXH_P64_5, BL_XXH_P32_1};
    const uint8_t *last = secret + BL_XXH_SECRET - BL_XXH_STRIPE;
    uint64_t stripes = (size - 1) / BL_XXH_STRIPE, each = BL_XXH_BLOCK / BL_XXH_STRIPE;
    for (uint64_t stripe = 0; stripe < stripes; stripe++) {
        bl_xxh_stripe(sums, in + stripe * BL_XXH_STRIPE, secret + stripe % each * 8);
        if (stripe % each < each - 1)
            continue;
        for (int i = 0; i < 8; i++)
            sums[i] = (sums[i] ^ sums[i] >> 47 ^ bl_xxh_64(last + 8 * i)) * BL_XXH_P32_1;
    }
    bl_xxh_stripe(sums, in + size - BL_XXH_STRIPE, last - 7);
    uint64_t hash = size * BL_XXH_P64_1;
    for (int i = 0; i < 8; i += 2)
        hash += bl_xxh_folded(sums[i] ^ bl_xxh_64(secret + 11 + 8 * i),
                              sums[i + 1] ^ bl_xxh_64(secret + 19 + 8 * i));
    return bl_xxh_end(hash);
}

uint64_t bl_xxh3(const void *data, uint64_t size, uint64_t seed)
{
    if (size <= 16)
        return bl_xxh_to_16(data, size, seed);
    if (size <= 128)
        return bl_xxh_to_128(data, size, seed);
    return size <= 240 ? bl_xxh_to_240(data, size, seed) : bl_xxh_long(data, size, seed);
}

void bl_hash_windows(const uint8_t *data, uint64_t stride, uint64_t window, uint64_t seed,
                     uint64_t *hashes, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        hashes[i] = bl_xxh3(data + i * stride, window, seed);
}

void bl_hash_chain(const uint64_t *hashes, uint32_t count, uint64_t seed, uint64_t *chained)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t both[2] = {i ? chained[i - 1] : 0, hashes[i]};
        chained[i] = i ? bl_xxh3(both, sizeof both, seed) : hashes[0];
    }
}
