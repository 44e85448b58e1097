/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Flushes and drops cache lines for a device that reads or writes the pool by DMA, such as a GPU's
 * copy engine or Intel DSA. A device sees the memory through its own host's cache:
 *
 *   its reads   are answered from a line that the host has cached, however old that is
 *   its writes  arrive in memory, or dirty in the host's cache (DDIO; DSA's cache control), in
 *               any order until its completion has been seen, and even after its process has died
 *
 * So a get checks the entry, calls bl_device_reads, has the device read, and checks the entry
 * again. A put has the device write, waits for its completion, calls bl_device_written, and
 * commits. A device writes only whole lines of granted space.
 *
 * A process that has devices is proven gone only when its DMA has ended; its file lock does not
 * prove that (liveness/lock.c explains why). Lines that its DMA left in the host's cache are
 * written back later, over whatever is in memory then. So when a grant does not end in a commit,
 * all of its space is flushed before it is granted again, on the host whose device may have written
 * there:
 *
 *   the writer lives    by itself, before it aborts, or gives its session up (bl_kv_put_end)
 *   it is found gone    by the server, if that is of its host (bl_lane_has_devices)
 *   another host's      cannot be found gone: its space is held until a server of its host finds
 *                       it gone, or until that host is off or has booted anew, with empty caches
 *
 * On a device of the pool that is declared coherent nothing is flushed; the fences stay.
 */
#ifndef BL_DEVICE_RANGE_H
#define BL_DEVICE_RANGE_H

#include "coherence/coherence.h"

/* Flush a range that a device has written and whose completion has been seen. Afterwards everything
 * is in memory, ahead of whatever this thread streams next. */
static inline void bl_device_written(const bl_memory *memory, uint64_t offset, uint64_t size)
{
    bl_fence_full(memory); /* no flush before the load that saw the completion */
    bl_invalidate(memory, offset, size);
    bl_fence_full(memory); /* the flushes are done before the publication */
}

/* Do the same for a device whose writes pass no cache: nothing has to be flushed. */
static inline void bl_device_ordered(const bl_memory *memory)
{
    bl_fence_full(memory); /* no publication before the load that saw the completion */
}

/* Drop a range that a device will read, and that the entry has just been seen to name. The device
 * then finds nothing in the cache that is older than that look. */
static inline void bl_device_reads(const bl_memory *memory, uint64_t offset, uint64_t size)
{
    bl_fence_full(memory); /* no drop before the look */
    bl_invalidate(memory, offset, size);
    bl_fence_full(memory); /* the drops are done before the device starts */
}

#endif
