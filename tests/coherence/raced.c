/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Reads lines and payloads of the pool while a second thread writes them. What a reader has checked
 * must be what it has copied: a compiler that loads from the pool twice, once for the check and
 * once for the copy, breaks that. Prints the number of copies that differ from what was checked.
 */
#define _GNU_SOURCE
#include "coherence/coherence.h"
#include "pool/message.h"

#include "coherence/x86_cpu.c"
#include "coherence/aarch64_cpu.c"
#include "coherence/cpu.c"
#include "coherence/x86_crc32c.c"
#include "coherence/x86_crc32c_wide.c"
#include "coherence/aarch64_crc32c.c"
#include "coherence/crc32c.c"
#include "coherence/x86_copy.c"
#include "coherence/aarch64_copy.c"
#include "coherence/copy.c"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { KEY = 7, PAYLOAD_OFFSET = 4096, PAYLOAD_SIZE = 512, WHOLE_MIN = 1000, LOOKS_MAX = 400000 };

static bl_memory memory;
static int stopped;

/* Write replies that differ only in their first word and their check, and payloads that differ
 * everywhere. */
static void *write_on(void *unused)
{
    uint8_t payload[PAYLOAD_SIZE];
    for (uint32_t n = 1; !__atomic_load_n(&stopped, __ATOMIC_RELAXED); n++) {
        bl_reply line = {.size = (uint8_t)n, .epoch = 1};
        bl_message_seal(&line, n, KEY);
        bl_publish_line(&memory, 0, &line);
        memset(payload, (int)n, sizeof payload);
        bl_stream(&memory, PAYLOAD_OFFSET, payload, sizeof payload);
        bl_fence_store(&memory);
    }
    return unused;
}

/* Return whether the copy is one whole line. The compiler cannot see how the copy was made. */
__attribute__((noinline)) static int whole(const void *copy)
{
    __asm__ volatile("" : "+r"(copy) : : "memory");
    return bl_reply_whole(copy, KEY);
}

/* Copy a reply into the caller's memory, as bl_lane_take() does. Return whether it is whole. */
__attribute__((noinline)) static int take_line(bl_reply *line)
{
    bl_refetch(&memory, 0, BL_LINE_SIZE);
    bl_load_line(&memory, 0, line);
    return bl_reply_whole(line, KEY);
}

static void read_payload(enum bl_copy_how how, uint32_t *differ)
{
    static uint8_t copy[PAYLOAD_SIZE] __attribute__((aligned(BL_LINE_SIZE)));
    uint32_t crc = 0;
    bl_refetch(&memory, PAYLOAD_OFFSET, sizeof copy);
    bl_fetch_run(&memory, PAYLOAD_OFFSET, copy, sizeof copy, &crc, how);
    *differ += crc != bl_crc32c(0, copy, sizeof copy);
}

int main(void)
{
    uint32_t checked = 0, line_differs = 0, payload_differs = 0;
    pthread_t writer;
    memory.map = bl_interleave_one(4 * BL_STRIPE_SIZE);
    memory.base[0] = aligned_alloc(BL_PAGE_SIZE, 4 * BL_STRIPE_SIZE);
    memory.flush_choice = bl_flush_choice(bl_cpu_features());
    if (memory.base[0] == NULL || pthread_create(&writer, NULL, write_on, NULL) != 0)
        return 1;
    for (uint32_t i = 0; i < LOOKS_MAX || checked < WHOLE_MIN; i++) {
        bl_reply line;
        if (take_line(&line)) {
            checked++;
            line_differs += !whole(&line);
        }
        read_payload(i % 2 ? BL_COPY_CACHED : BL_COPY_PAST, &payload_differs);
    }
    __atomic_store_n(&stopped, 1, __ATOMIC_RELAXED);
    pthread_join(writer, NULL);
    printf("lines %u payloads %u\n", line_differs, payload_differs);
    return 0;
}
