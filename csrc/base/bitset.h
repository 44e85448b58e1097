/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A set of small numbers that finds its next member in a few loads: a bit of each level is set
 * while the corresponding word of the level below is not zero. The caller provides the memory.
 */
#ifndef BL_BITSET_H
#define BL_BITSET_H

#include <stddef.h>
#include <stdint.h>

enum { BL_BITSET_LEVELS = 6 };  /* 64 branches per level: enough for 32-bit numbers */

static const uint64_t BL_BITSET_NONE = UINT64_MAX;

typedef struct bl_bitset {
    uint64_t *level[BL_BITSET_LEVELS];
    uint64_t word_count[BL_BITSET_LEVELS];
} bl_bitset;

/* Return how many words of zeroed memory a set of numbers below count needs. */
static inline size_t bl_bitset_words(uint64_t count)
{
    size_t words = 0;
    for (int level = 0; level < BL_BITSET_LEVELS; level++) {
        count = (count + 63) / 64;
        words += count;
    }
    return words;
}

static inline void bl_bitset_make(bl_bitset *set, uint64_t *memory, uint64_t count)
{
    for (int level = 0; level < BL_BITSET_LEVELS; level++) {
        count = (count + 63) / 64;
        set->level[level] = memory;
        set->word_count[level] = count;
        memory += count;
    }
}

static inline void bl_bitset_add(bl_bitset *set, uint64_t number)
{
    for (int level = 0; level < BL_BITSET_LEVELS; level++) {
        uint64_t *word = &set->level[level][number / 64], before = *word;
        *word |= 1ull << (number % 64);
        if (before)
            return;
        number /= 64;
    }
}

/* Add all numbers below count to an empty set. */
static inline void bl_bitset_fill(bl_bitset *set, uint64_t count)
{
    for (int level = 0; level < BL_BITSET_LEVELS; level++) {
        for (uint64_t word = 0; word < count / 64; word++)
            set->level[level][word] = UINT64_MAX;
        if (count % 64)
            set->level[level][count / 64] = (1ull << (count % 64)) - 1;
        count = (count + 63) / 64;
    }
}

static inline void bl_bitset_remove(bl_bitset *set, uint64_t number)
{
    for (int level = 0; level < BL_BITSET_LEVELS; level++) {
        uint64_t *word = &set->level[level][number / 64];
        *word &= ~(1ull << (number % 64));
        if (*word)
            return;
        number /= 64;
    }
}

/* Remove the numbers 64 * place + i for each bit i of bits. */
static inline void bl_bitset_remove_word(bl_bitset *set, uint64_t place, uint64_t bits)
{
    uint64_t *word = &set->level[0][place];
    *word &= ~bits;
    for (int level = 1; level < BL_BITSET_LEVELS && !*word; level++, place /= 64) {
        word = &set->level[level][place / 64];
        *word &= ~(1ull << (place % 64));
    }
}

/* Return the least member >= from, or BL_BITSET_NONE. */
static inline uint64_t bl_bitset_next(const bl_bitset *set, uint64_t from)
{
    for (int level = 0; level < BL_BITSET_LEVELS; level++) {
        uint64_t place = from / 64;
        if (place >= set->word_count[level])
            return BL_BITSET_NONE;
        uint64_t word = set->level[level][place] & (UINT64_MAX << (from % 64));
        if (word) {
            from = place * 64 + (uint64_t)__builtin_ctzll(word);
            while (level-- > 0)
                from = from * 64 + (uint64_t)__builtin_ctzll(set->level[level][from]);
            return from;
        }
        from = place + 1;
    }
    return BL_BITSET_NONE;
}

#endif
