/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Folds digests into keys. A digest is uniformly random already; the folding adds the namespace.
 * Every step is a bijection of the 128-bit state, so different digests of 16 bytes have different
 * keys, and a digest has different keys in different namespaces. The folding does not resist chosen
 * input: a caller that chooses digests freely can make two keys equal, just as if it passed the
 * same digest twice.
 */
#include <errno.h>
#include <string.h>

#include "api/kvcache.h"


enum { BL_DIGEST_SIZE_MIN = 16, BL_DIGEST_SIZE_MAX = 64, BL_KEY_SIZE = 16 };

/* Multiplication by odd factors spreads bits upward; folding the halves spreads them downward and
 * across. */
static void bl_key_mix(uint64_t key[2])
{
    for (int round = 0; round < 3; round++) {
        key[0] *= 0x9e3779b97f4a7c15;
        key[1] ^= key[0] ^ key[0] >> 32;
        key[1] *= 0xd6e8feb86659fd93;
        key[0] ^= key[1] ^ key[1] >> 29;
    }
}

int bl_fold_keys(const uint8_t *digests, uint32_t digest_size, uint32_t count,
                 const uint8_t name_space[16], uint64_t *keys)
{
    if (digest_size < BL_DIGEST_SIZE_MIN || digest_size > BL_DIGEST_SIZE_MAX)
        return -EINVAL;
    uint64_t start[2];
    memcpy(start, name_space, sizeof start);
    start[1] ^= digest_size;    /* distinguishes a short digest from one that ends in zeros */
    bl_key_mix(start);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t key[2] = {start[0], start[1]};
        for (uint32_t done = 0; done < digest_size; done += BL_KEY_SIZE) {
            uint64_t piece[2] = {0, 0};
            uint32_t rest = digest_size - done;
            memcpy(piece, digests + done, rest < BL_KEY_SIZE ? rest : BL_KEY_SIZE);
            key[0] ^= piece[0];
            key[1] ^= piece[1];
            bl_key_mix(key);
        }
        memcpy(&keys[2ull * i], key, sizeof key);
        digests += digest_size;
    }
    return 0;
}
