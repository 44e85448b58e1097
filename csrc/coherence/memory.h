/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Where the bytes of a pool are mapped in this process: the verbs translate offsets with it. The
 * struct is filled once when a pool is opened, and then only read. Each device is mapped once, as a
 * whole.
 */
#ifndef BL_MEMORY_H
#define BL_MEMORY_H

#include "format/interleave.h"

struct bl_sim_world;

/* The file behind a device whose pages may be missing, since it is sparse. */
typedef struct bl_backing {
    int fd;                                 /* -1: no page can be missing */
    uint64_t offset;                        /* in the file, of the device's first byte */
} bl_backing;

typedef struct bl_memory {
    bl_interleave map;
    uint64_t size;                          /* of the linear range; every offset is less */
    uint8_t *base[BL_DEVICE_COUNT_MAX];     /* not accessible in the simulator */
    uint8_t coherent[BL_DEVICE_COUNT_MAX];  /* 1: flush and invalidate do nothing (D2) */
    uint32_t flush_choice;                  /* bl_flush_choice(), when the pool was opened */
    uint32_t host;                          /* the host whose cache the simulator uses */
    const bl_backing *backing;              /* of each device; NULL: of none */
    struct bl_sim_world *world;             /* simulator only */
} bl_memory;

#endif
