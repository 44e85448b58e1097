/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The hash of a 128-bit key. The seed is random, so a client that chooses keys cannot make them
 * collide.
 */
#ifndef BL_SEED_H
#define BL_SEED_H

#include <stdint.h>

#include "base/random.h"

/* Fill in the seed. Returns 0 or -errno. */
static inline int bl_hash_seed(uint64_t seed[2])
{
#ifdef BL_SIM
    seed[0] = 0x243f6a8885a308d3, seed[1] = 0x13198a2e03707344;     /* simulated runs are
                                                                     * repeatable */
    return 0;
#else
    return bl_random(seed, 2 * sizeof *seed);
#endif
}

static inline uint64_t bl_key_hash(const uint64_t seed[2], const uint64_t key[2])
{
    __extension__ typedef unsigned __int128 wide;
    wide product = (wide)(key[0] ^ seed[0]) * (key[1] ^ seed[1]);
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

#endif
