/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Writes and reads heartbeat lines: see liveness/heartbeat.h.
 */
#include "liveness/heartbeat.h"

#include <errno.h>

#include "base/thread.h"
#include "coherence/crash_point.h"
#include "coherence/guard.h"
#include "pool/message.h"

void bl_heartbeat_once(bl_heartbeat *heartbeat)
{
    bl_heartbeat_line line = {.count = ++heartbeat->count, .nonce = heartbeat->nonce};
    bl_table_seal(&line, heartbeat->nonce);
    bl_crash_line("heartbeat.line", heartbeat->memory, heartbeat->offset, &line);
    bl_publish_line(heartbeat->memory, heartbeat->offset, &line); /* SYNC heartbeat */
    bl_crash_point("heartbeat.out");
}

uint64_t bl_heartbeat_read(const bl_memory *memory, uint64_t offset, uint64_t nonce)
{
    bl_heartbeat_line line;
    bl_load_line(memory, offset, &line); /* SYNC heartbeat */
    if (!bl_verify(memory, bl_table_whole(&line, nonce)) || line.nonce != nonce)
        return 0;
    return line.count;
}

static int bl_heartbeat_farewell(void *context)
{
    const bl_heartbeat *heartbeat = context;
    bl_heartbeat_line line = {.count = BL_HEARTBEAT_LAST, .nonce = heartbeat->nonce};
    bl_table_seal(&line, heartbeat->nonce);
    bl_fence_store(heartbeat->memory); /* all streamed bytes are in memory before a reader accepts
                                        * this line */
    bl_crash_line("heartbeat.last_line", heartbeat->memory, heartbeat->offset, &line);
    /* SYNC heartbeat.last: see bl_housekeeping_watch() */
    bl_publish_line(heartbeat->memory, heartbeat->offset, &line);
    bl_crash_point("heartbeat.last_out");
    return 0;
}

void bl_heartbeat_end(bl_heartbeat *heartbeat)
{
    bl_heartbeat_stop(heartbeat); /* this thread becomes the line's last writer */
    bl_guarded(heartbeat->memory, bl_heartbeat_farewell, heartbeat);
}

#ifndef BL_SIM /* the simulator's are in tests/sim/native */

static int bl_heartbeat_guarded(void *context)
{
    bl_heartbeat_once(context);
    return 0;
}

static void *bl_heartbeat_run(void *argument)
{
    bl_heartbeat *heartbeat = argument;
    pthread_mutex_lock(&heartbeat->lock);
    while (!heartbeat->stop) {
        struct timespec next;
        clock_gettime(CLOCK_MONOTONIC, &next);
        next.tv_nsec += BL_HEARTBEAT_PERIOD_NS;
        next.tv_sec += next.tv_nsec / 1000000000;
        next.tv_nsec %= 1000000000;
        int rc = 0;
        while (!heartbeat->stop && rc == 0)
            rc = pthread_cond_timedwait(&heartbeat->wake, &heartbeat->lock, &next);
        if (!heartbeat->stop && bl_guarded(heartbeat->memory, bl_heartbeat_guarded, heartbeat) < 0)
            break; /* the device is gone: the heartbeat stops, as for a dead process */
    }
    pthread_mutex_unlock(&heartbeat->lock);
    return NULL;
}

int bl_heartbeat_start(bl_heartbeat *heartbeat, const bl_memory *memory, uint64_t offset,
                       uint64_t nonce)
{
    *heartbeat = (bl_heartbeat){.memory = memory, .offset = offset, .nonce = nonce};
    int status = bl_guarded(memory, bl_heartbeat_guarded, heartbeat);
    if (status < 0)
        return status;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&heartbeat->wake, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&heartbeat->lock, NULL);
    status = bl_thread_start(&heartbeat->thread, bl_heartbeat_run, heartbeat);
    heartbeat->running = status == 0;
    return status;
}

void bl_heartbeat_stop(bl_heartbeat *heartbeat)
{
    if (!heartbeat->running)
        return;
    pthread_mutex_lock(&heartbeat->lock);
    heartbeat->stop = 1;
    pthread_cond_signal(&heartbeat->wake);
    pthread_mutex_unlock(&heartbeat->lock);
    pthread_join(heartbeat->thread, NULL);
    heartbeat->running = 0;
}

#endif
