/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Flushes and invalidates cache lines for a device that accesses the pool by DMA, such as a GPU's
 * copy engine or Intel DSA. A device's accesses pass through its own host's cache:
 *
 *   its reads   hit lines that the host has cached, however old these are
 *   its writes  arrive in memory, or as dirty lines in the host's cache (DDIO; DSA's cache
 *               control), in any order until the completion was read, and even after its process
 *               has died
 *
 * So a get checks the entry, calls bl_device_reads, lets the device read, and checks the entry
 * again. A put lets the device write, waits for the completion, calls bl_device_written, and
 * commits. A device writes only whole lines of granted space.
 *
 * A process with devices counts as gone only after its DMA has ended; its file lock does not prove
 * that (see liveness/lock.c). Dirty lines that its DMA left in the host's cache are written back at
 * any later time. So if a grant does not end in a commit, all of its space is flushed before it is
 * granted again, on the host whose device may have written there:
 *
 *   the writer lives    by the writer, before it aborts or abandons its session (kvcache/engine.c)
 *   it is proven gone   by the server, if that is on its host (bl_lane_has_devices)
 *   on another host     its death cannot be proven there: its space is held until a server on its
 *                       host proves it, or until that host is off or has rebooted, with empty
 *                       caches
 *
 * On a pool device with hardware coherence nothing is flushed; the fences stay.
 */
#ifndef BL_DEVICE_RANGE_H
#define BL_DEVICE_RANGE_H

#include "coherence/coherence.h"

/* Flush a range that a device has written, after its completion was read. Afterwards the bytes are
 * in memory, ahead of what this thread streams next. */
static inline void bl_device_written(const bl_memory *memory, uint64_t offset, uint64_t size)
{
    bl_fence_full(memory); /* no flush before the load that read the completion */
    bl_invalidate(memory, offset, size);
    bl_fence_full(memory); /* the flushes are done before the publication */
}

/* The same for a device whose writes bypass the cache: no flush is necessary. */
static inline void bl_device_ordered(const bl_memory *memory)
{
    bl_fence_full(memory); /* no publication before the load that read the completion */
}

/* Invalidate a range before a device reads it, and after the read of its entry. The device then
 * hits no cached line older than that read. */
static inline void bl_device_reads(const bl_memory *memory, uint64_t offset, uint64_t size)
{
    bl_fence_full(memory); /* no invalidation before the read of the entry */
    bl_invalidate(memory, offset, size);
    bl_fence_full(memory); /* the invalidations are complete before the device starts */
}

#endif
