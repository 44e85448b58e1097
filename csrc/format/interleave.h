/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Pool offset <-> (device, offset in the device). Pure arithmetic without state, also for CUDA. The
 * first stripe of every device is for its superblock and not part of the linear range.
 */
#ifndef BL_INTERLEAVE_H
#define BL_INTERLEAVE_H

#include "format/placement.h"
#include "format/pool_format.h"

typedef struct bl_place {
    uint64_t device_offset;
    uint32_t device;
} bl_place;

/* The mapping of a linear range to its devices. The stripes of a metadata device come first in the
 * range; without one, meta_stripes and data_device are 0. */
typedef struct bl_interleave {
    uint64_t meta_stripes;      /* stripes of the metadata device, without its superblock's */
    uint64_t device_stripes;    /* stripes of each other device, without its superblock's */
    uint32_t device_count;      /* with the metadata device */
    uint32_t data_device;       /* the first device that has data stripes */
    uint32_t data_count;        /* devices from data_device on */
    uint32_t interleaved;
    int32_t shift;              /* log2(device_count) if stripes are interleaved over a power of two
                                 * of devices, none of them for metadata: no division; else -1 */
} bl_interleave;

static inline bl_interleave bl_interleave_of(const bl_geometry *g)
{
    uint32_t apart = g->interleaved & BL_PLACEMENT_METADATA ? 1 : 0;
    bl_interleave map = {
        .meta_stripes = apart ? g->data_offset / BL_STRIPE_SIZE : 0,
        .device_stripes = g->device_size / BL_STRIPE_SIZE - 1,
        .device_count = g->device_count,
        .data_device = apart,
        .data_count = g->device_count - apart,
        .interleaved = g->interleaved & BL_PLACEMENT_INTERLEAVED,
        .shift = -1,
    };
    for (int32_t shift = 0; shift < 7; shift++)
        if (map.interleaved && !apart && map.data_count == 1u << shift)
            map.shift = shift;
    return map;
}

/* Return the mapping of a single range of memory that starts with a superblock's stripe. */
static inline bl_interleave bl_interleave_one(uint64_t size)
{
    const bl_geometry g = {.device_count = 1, .device_size = size};
    return bl_interleave_of(&g);
}

static inline bl_place bl_interleave_place(const bl_interleave *map, uint64_t offset)
{
    uint64_t stripe = offset >> BL_STRIPE_SHIFT, row;
    uint64_t in_stripe = offset & (BL_STRIPE_SIZE - 1);
    uint32_t device;
    if (map->shift >= 0)
        return (bl_place){(((stripe >> map->shift) + 1) << BL_STRIPE_SHIFT) + in_stripe,
                          (uint32_t)stripe & (map->device_count - 1)};
    if (stripe < map->meta_stripes)
        return (bl_place){((stripe + 1) << BL_STRIPE_SHIFT) + in_stripe, 0};
    stripe -= map->meta_stripes;
    if (!map->interleaved) {
        device = (uint32_t)(stripe / map->device_stripes);
        row = stripe % map->device_stripes;
    } else {
        device = (uint32_t)(stripe % map->data_count);
        row = stripe / map->data_count;
    }
    return (bl_place){((row + 1) << BL_STRIPE_SHIFT) + in_stripe, map->data_device + device};
}

static inline uint64_t bl_interleave_offset(const bl_interleave *map, bl_place place)
{
    uint64_t row = (place.device_offset >> BL_STRIPE_SHIFT) - 1, stripe = row;
    if (place.device >= map->data_device) {
        uint32_t device = place.device - map->data_device;
        stripe = map->meta_stripes + (map->interleaved ? row * map->data_count + device
                                                       : device * map->device_stripes + row);
    }
    return (stripe << BL_STRIPE_SHIFT) + (place.device_offset & (BL_STRIPE_SIZE - 1));
}

/* Return the stripes of a device that are part of the linear range. */
static inline uint64_t bl_device_stripes(const bl_interleave *map, uint32_t device)
{
    return device < map->data_device ? map->meta_stripes : map->device_stripes;
}

/* Return the bytes that a pool uses of a device, including its superblock's stripe. */
static inline uint64_t bl_device_size(const bl_interleave *map, uint32_t device)
{
    return (bl_device_stripes(map, device) + 1) << BL_STRIPE_SHIFT;
}

/* Return the bytes from offset to the end of its stripe: addresses are contiguous only within a
 * stripe. */
static inline uint64_t bl_stripe_rest(uint64_t offset)
{
    return BL_STRIPE_SIZE - (offset & (BL_STRIPE_SIZE - 1));
}

#endif
