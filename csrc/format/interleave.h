/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Pool offset <-> (device, offset in the device). Pure arithmetic without state, also for CUDA. The
 * first stripe of every device is for its superblock and not part of the linear range.
 */
#ifndef BL_INTERLEAVE_H
#define BL_INTERLEAVE_H

#include "format/pool_format.h"

typedef struct bl_place {
    uint64_t device_offset;
    uint32_t device;
} bl_place;

/* The mapping of a linear range to its devices. device_shift replaces a division where device_count
 * is a power of two. */
typedef struct bl_interleave {
    uint64_t device_stripes;    /* stripes of each device, without its superblock's */
    uint32_t device_count;
    uint32_t interleaved;
    int32_t device_shift;       /* log2(device_count), or -1 */
} bl_interleave;

static inline bl_interleave bl_interleave_make(uint32_t device_count, uint64_t device_size,
                                               uint32_t interleaved)
{
    bl_interleave map = {device_size / BL_STRIPE_SIZE - 1, device_count, interleaved, -1};
    for (int32_t shift = 0; shift < 7; shift++)
        if (device_count == 1u << shift)
            map.device_shift = shift;
    return map;
}

static inline bl_place bl_interleave_place(const bl_interleave *map, uint64_t offset)
{
    uint64_t stripe = offset >> BL_STRIPE_SHIFT, row;
    uint32_t device;
    if (!map->interleaved) {
        device = (uint32_t)(stripe / map->device_stripes);
        row = stripe % map->device_stripes;
    } else if (map->device_shift >= 0) {
        device = (uint32_t)stripe & (map->device_count - 1);
        row = stripe >> map->device_shift;
    } else {
        device = (uint32_t)(stripe % map->device_count);
        row = stripe / map->device_count;
    }
    uint64_t in_stripe = offset & (BL_STRIPE_SIZE - 1);
    return (bl_place){((row + 1) << BL_STRIPE_SHIFT) + in_stripe, device};
}

static inline uint64_t bl_interleave_offset(const bl_interleave *map, bl_place place)
{
    uint64_t row = (place.device_offset >> BL_STRIPE_SHIFT) - 1;
    uint64_t stripe = map->interleaved ? row * map->device_count + place.device
                                       : place.device * map->device_stripes + row;
    return (stripe << BL_STRIPE_SHIFT) + (place.device_offset & (BL_STRIPE_SIZE - 1));
}

/* Return the bytes from offset to the end of its stripe: addresses are contiguous only within a
 * stripe. */
static inline uint64_t bl_stripe_rest(uint64_t offset)
{
    return BL_STRIPE_SIZE - (offset & (BL_STRIPE_SIZE - 1));
}

#endif
