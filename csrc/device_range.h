/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What the CPU does for a device that reads or writes the pool by DMA: a GPU's copy engine, Intel
 * DSA. A device sees the memory through its own host's cache:
 *
 *   its reads   are answered from a line that the host has cached, however old that is
 *   its writes  come to lie in memory, or dirty in the host's cache (DDIO; DSA's cache control), in
 *               any order until its completion has been seen, and even after its process has died
 *
 * So a get looks at the entry, says bl_device_reads, lets the device read, and looks again; a put
 * lets the device write, waits for its completion, says bl_device_written, and commits. A device
 * writes only whole lines of granted space.
 *
 * A process is proven gone only when its DMA has ended: the kernel tears the device's context down
 * before it lets go of the process's files. What its DMA left in the host's cache is written back
 * later, over whatever is there then. So who finds a writer by device gone says bl_device_written
 * on that host, of all that was granted to it, before anybody is given the space.
 *
 * On a device of the pool that is declared coherent nothing is flushed; the fences stay.
 */
#ifndef BL_DEVICE_RANGE_H
#define BL_DEVICE_RANGE_H

#include "coherence.h"

/* A device has written this range, and its completion has been seen: everything is in memory, and
 * before anything that this thread streams from now on. */
static inline void bl_device_written(const bl_memory *memory, uint64_t offset, uint64_t size)
{
    bl_fence_full(memory); /* no flush before the load that saw the completion */
    bl_invalidate(memory, offset, size);
    bl_fence_full(memory); /* the flushes are done before the publication */
}

/* The same of a device whose writes are known to pass no cache: there is nothing to flush. */
static inline void bl_device_ordered(const bl_memory *memory)
{
    bl_fence_full(memory); /* no publication before the load that saw the completion */
}

/* A device will read this range, which the entry has just been seen to name: it finds nothing in
 * the cache that is older than that look. */
static inline void bl_device_reads(const bl_memory *memory, uint64_t offset, uint64_t size)
{
    bl_fence_full(memory); /* no drop before the look */
    bl_invalidate(memory, offset, size);
    bl_fence_full(memory); /* the drops are done before the device is told to start */
}

#endif
