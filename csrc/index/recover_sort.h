/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Sorts recovered blocks by generation. In a cache that was filled only once they are in order
 * already; otherwise this is a radix sort over the bits that differ.
 */
#ifndef BL_RECOVER_SORT_H
#define BL_RECOVER_SORT_H

#include <stdint.h>
#include <string.h>

typedef struct bl_recovered {
    uint64_t generation;
    uint32_t number;
} bl_recovered;

enum { BL_RADIX_BITS = 11, BL_RADIX = 1 << BL_RADIX_BITS };

/* One pass of the radix sort: a stable sort by one digit, from one list into the other. */
static inline void bl_recovered_deal(const bl_recovered *from, bl_recovered *to, uint32_t count,
                                     uint32_t shift)
{
    uint32_t start[BL_RADIX] = {0}, sum = 0;
    for (uint32_t i = 0; i < count; i++)
        start[from[i].generation >> shift & (BL_RADIX - 1)]++;
    for (uint32_t digit = 0; digit < BL_RADIX; digit++) {
        uint32_t size = start[digit];
        start[digit] = sum;
        sum += size;
    }
    for (uint32_t i = 0; i < count; i++)
        to[start[from[i].generation >> shift & (BL_RADIX - 1)]++] = from[i];
}

/* Sort with the oldest first. room has space for count more. Returns list or room, whichever has
 * the result. */
static inline bl_recovered *bl_recovered_sort(bl_recovered *list, bl_recovered *room,
                                              uint32_t count)
{
    uint64_t differ = 0;
    int in_order = 1;
    for (uint32_t i = 1; i < count; i++) {
        differ |= list[i].generation ^ list[0].generation;
        in_order &= list[i - 1].generation <= list[i].generation;
    }
    for (uint32_t shift = 0; !in_order && shift < 64; shift += BL_RADIX_BITS) {
        if ((differ >> shift & (BL_RADIX - 1)) == 0)
            continue;
        bl_recovered_deal(list, room, count, shift);
        bl_recovered *sorted = room;
        room = list;
        list = sorted;
    }
    return list;
}

#endif
