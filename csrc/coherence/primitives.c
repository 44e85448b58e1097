/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Cache control and copies by address, for Python and for tools, with any alignment and any
 * mapping. The protocol uses the verbs (coherence/coherence.h) instead.
 */
#include <sched.h>

#include "coherence/coherence.h"

void bl_ntstore_copy(void *target, const void *source, size_t size)
{
    uint8_t *to = target;
    const uint8_t *from = source;
    size_t head = -(uintptr_t)to & (BL_LINE_SIZE - 1);
    if (head > size)
        head = size;
    size_t whole = (size - head) & ~(size_t)(BL_LINE_SIZE - 1), tail = size - head - whole;
    if (head > 0) {
        memcpy(to, from, head);
        bl_flush(to, head);
    }
    bl_copy_stream(to + head, from + head, whole);
    bl_streamed(to + head, whole, bl_flush_choice(bl_cpu_features()));
    if (tail > 0) {
        memcpy(to + head + whole, from + head + whole, tail);
        bl_flush(to + head + whole, tail);
    }
    bl_store_fence_now();
}

void bl_flush(const void *address, size_t size)
{
    bl_write_back_lines(address, size, bl_cpu_features());
}

void bl_drop(const void *address, size_t size)
{
    bl_full_fence_now();
    bl_flush_lines(address, size, bl_flush_choice(bl_cpu_features()));
    bl_full_fence_now();
}

void bl_fence(void) { bl_full_fence_now(); }

#ifndef BL_SIM
void bl_nap(const bl_memory *memory, uint64_t ns)
{
    (void)memory;
    if (ns == 0) {
        sched_yield();
        return;
    }
    struct timespec time = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    nanosleep(&time, NULL);
}
#endif
