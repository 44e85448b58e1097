/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Beats: see liveness/beat.h.
 */
#include "liveness/beat.h"

#include <errno.h>
#include <signal.h>

#include "coherence/crash_point.h"
#include "coherence/guard.h"
#include "pool/message.h"

void bl_beat_once(bl_beat *beat)
{
    bl_beat_line line = {.count = ++beat->count, .nonce = beat->nonce};
    bl_table_seal(&line, beat->nonce);
    bl_crash_line("beat.line", beat->memory, beat->offset, &line);
    bl_publish_line(beat->memory, beat->offset, &line); /* SYNC beat */
    bl_crash_point("beat.out");
}

uint64_t bl_beat_read(const bl_memory *memory, uint64_t offset, uint64_t nonce)
{
    bl_beat_line line;
    bl_load_line(memory, offset, &line); /* SYNC beat */
    if (!bl_verify(memory, bl_table_whole(&line, nonce)) || line.nonce != nonce)
        return 0;
    return line.count;
}

static int bl_beat_farewell(void *context)
{
    const bl_beat *beat = context;
    bl_beat_line line = {.count = BL_BEAT_LAST, .nonce = beat->nonce};
    bl_table_seal(&line, beat->nonce);
    bl_fence_store(beat->memory); /* all that was streamed is out before this is believed */
    bl_crash_line("beat.last_line", beat->memory, beat->offset, &line);
    bl_publish_line(beat->memory, beat->offset, &line); /* SYNC beat.last: see bl_house_watch() */
    bl_crash_point("beat.last_out");
    return 0;
}

void bl_beat_end(bl_beat *beat)
{
    bl_beat_stop(beat); /* this line's last writer is this thread */
    bl_guarded(beat->memory, bl_beat_farewell, beat);
}

#ifndef BL_SIM /* the simulator's are in sim/acts.c */

static int bl_beat_guarded(void *context)
{
    bl_beat_once(context);
    return 0;
}

static void *bl_beat_run(void *argument)
{
    bl_beat *beat = argument;
    pthread_mutex_lock(&beat->lock);
    while (!beat->stop) {
        struct timespec next;
        clock_gettime(CLOCK_MONOTONIC, &next);
        next.tv_nsec += BL_BEAT_PERIOD_NS;
        next.tv_sec += next.tv_nsec / 1000000000;
        next.tv_nsec %= 1000000000;
        int rc = 0;
        while (!beat->stop && rc == 0)
            rc = pthread_cond_timedwait(&beat->wake, &beat->lock, &next);
        if (!beat->stop && bl_guarded(beat->memory, bl_beat_guarded, beat) < 0)
            break; /* its device is gone: it stands still, as for any who is dead */
    }
    pthread_mutex_unlock(&beat->lock);
    return NULL;
}

int bl_beat_start(bl_beat *beat, const bl_memory *memory, uint64_t offset, uint64_t nonce)
{
    *beat = (bl_beat){.memory = memory, .offset = offset, .nonce = nonce};
    int status = bl_guarded(memory, bl_beat_guarded, beat);
    if (status < 0)
        return status;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&beat->wake, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&beat->lock, NULL);
    sigset_t all, before; /* signals are the application's threads' business */
    sigfillset(&all);
    sigdelset(&all, SIGBUS); /* but its own faults are its own */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&beat->thread, NULL, bl_beat_run, beat);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    beat->running = error == 0;
    return -error;
}

void bl_beat_stop(bl_beat *beat)
{
    if (!beat->running)
        return;
    pthread_mutex_lock(&beat->lock);
    beat->stop = 1;
    pthread_cond_signal(&beat->wake);
    pthread_mutex_unlock(&beat->lock);
    pthread_join(beat->thread, NULL);
    beat->running = 0;
}

#endif
