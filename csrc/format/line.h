/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The check of a line, which detects torn, stale and damaged lines. All of it is arithmetic on
 * private copies.
 *
 * A multilinear hash (Carter and Wegman; Lemire and Kaser 2014, "Strongly universal string
 * hashing is fast"): the words' products with fixed odd numbers are independent of each other, so
 * a line costs a few nanoseconds on any CPU. The high half of the sum depends on all bits.
 */
#ifndef BL_LINE_H
#define BL_LINE_H

#include <string.h>

#include "format/pool_format.h"

static inline uint32_t bl_line_hash(const uint64_t word[8], uint64_t key)
{
    uint64_t sum = (key + 0x9e3779b97f4a7c15u) * 0xda942042e4dd58b5u;
    sum += (word[0] ^ 0x243f6a8885a308d3u) * 0x9e3779b97f4a7c15u;
    sum += (word[1] ^ 0x13198a2e03707344u) * 0xbf58476d1ce4e5b9u;
    sum += (word[2] ^ 0xa4093822299f31d0u) * 0x94d049bb133111ebu;
    sum += (word[3] ^ 0x082efa98ec4e6c89u) * 0xd6e8feb86659fd93u;
    sum += (word[4] ^ 0x452821e638d01377u) * 0xa0761d6478bd642fu;
    sum += (word[5] ^ 0xbe5466cf34e90c6cu) * 0xe7037ed1a0b428dbu;
    sum += (word[6] ^ 0xc0ac29b7c97c50ddu) * 0x8ebc6af09c88c6e3u;
    sum += (word[7] ^ 0x3f84d5b5b5470917u) * 0x589965cc75374cc3u;
    sum ^= sum >> 29; /* low bits of a product depend on low bits only: fold and multiply again */
    return (uint32_t)((sum * 0x9fb21c651e98df25u) >> 32);
}

/* Return 1 if a line has any bit set. */
static inline int bl_line_used(const uint64_t word[8])
{
    uint64_t any = 0;
    for (int i = 0; i < 8; i++)
        any |= word[i];
    return any != 0;
}

/* Return the check of a line that ends in its check (tables, heartbeats, epochs). key identifies
 * the owner of the line, or is 0. */
static inline uint32_t bl_table_check(const void *line, uint64_t key)
{
    uint64_t word[8];
    memcpy(word, line, sizeof word);
    word[7] &= 0xffffffffu;
    return bl_line_hash(word, key);
}

/* Return the check of a line that ends in check and sequence_end (messages, lobby). */
static inline uint32_t bl_message_check(const void *line, uint64_t key)
{
    uint64_t word[8];
    memcpy(word, line, sizeof word);
    word[7] &= 0xffffffff00000000u;
    return bl_line_hash(word, key);
}

#endif
