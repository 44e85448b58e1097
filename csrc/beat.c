/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Beats: see beat.h.
 */
#include "beat.h"

#include <errno.h>
#include <signal.h>

#include "message.h"

void bl_beat_once(bl_beat *beat)
{
    bl_beat_line line = {.count = ++beat->count, .nonce = beat->nonce};
    bl_table_seal(&line, beat->nonce);
    bl_publish_line(beat->memory, beat->offset, &line); /* SYNC beat */
}

uint64_t bl_beat_read(const bl_memory *memory, uint64_t offset, uint64_t nonce)
{
    bl_beat_line line;
    bl_load_line(memory, offset, &line); /* SYNC beat */
    if (!bl_verify(memory, bl_table_whole(&line, nonce)) || line.nonce != nonce)
        return 0;
    return line.count;
}

#ifdef BL_SIM

int bl_beat_start(bl_beat *beat, const bl_memory *memory, uint64_t offset, uint64_t nonce)
{
    *beat = (bl_beat){.memory = memory, .offset = offset, .nonce = nonce};
    bl_beat_once(beat);
    return 0;
}

void bl_beat_stop(bl_beat *beat) { beat->running = 0; }

#else

static void *bl_beat_run(void *argument)
{
    bl_beat *beat = argument;
    while (!bl_shared_load(&beat->stop)) {
        bl_nap(beat->memory, BL_BEAT_PERIOD_NS);
        bl_beat_once(beat);
    }
    return NULL;
}

int bl_beat_start(bl_beat *beat, const bl_memory *memory, uint64_t offset, uint64_t nonce)
{
    *beat = (bl_beat){.memory = memory, .offset = offset, .nonce = nonce};
    bl_beat_once(beat);
    sigset_t all, before; /* signals are the application's threads' business */
    sigfillset(&all);
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
    bl_shared_store(&beat->stop, 1);
    pthread_join(beat->thread, NULL);
    beat->running = 0;
}

#endif
