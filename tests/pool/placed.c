/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The arithmetic of format/interleave.h, for test_layout.py.
 */
#include "format/interleave.h"

void place(const bl_geometry *geometry, uint64_t offset, uint64_t *device, uint64_t *device_offset)
{
    bl_interleave map = bl_interleave_of(geometry);
    bl_place found = bl_interleave_place(&map, offset);
    *device = found.device;
    *device_offset = found.device_offset;
}

uint64_t offset_of(const bl_geometry *geometry, uint64_t device, uint64_t device_offset)
{
    bl_interleave map = bl_interleave_of(geometry);
    return bl_interleave_offset(&map, (bl_place){device_offset, (uint32_t)device});
}

uint64_t size_of(const bl_geometry *geometry, uint64_t device)
{
    bl_interleave map = bl_interleave_of(geometry);
    return bl_device_size(&map, (uint32_t)device);
}
