/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The mapping of a pool in this process, by which the verbs translate offsets. The struct is filled
 * when a pool is opened, and then only read. Each device is mapped once, as a whole.
 */
#ifndef BL_MEMORY_H
#define BL_MEMORY_H

#include "format/interleave.h"

struct bl_sim_world;

/* The file of a sparse device, whose pages may be missing. */
typedef struct bl_backing {
    int fd;                                 /* -1: the file is not sparse */
    uint64_t offset;                        /* of the device's first byte in the file */
} bl_backing;

typedef struct bl_memory {
    bl_interleave map;
    uint64_t size;                          /* bytes of the linear range */
    uint8_t *base[BL_DEVICE_COUNT_MAX];     /* not accessible in the simulator */
    uint8_t coherent[BL_DEVICE_COUNT_MAX];  /* 1: flush and invalidate do nothing (D2) */
    uint32_t flush_choice;                  /* result of bl_flush_choice() when the pool was
                                             * opened */
    uint32_t host;                          /* the host whose cache the simulator uses */
    const bl_backing *backing;              /* per device; NULL: no device is sparse */
    struct bl_sim_world *world;             /* simulator only */
} bl_memory;

#endif
