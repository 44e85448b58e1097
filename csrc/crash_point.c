/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Crash points: see crash_point.h. The kernel carries the sentence out before the call returns, so
 * nothing of this process happens after its point: a kill ends every thread, a stop halts them all.
 */
#include "crash_point.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#ifdef BL_SIM

uint32_t bl_crash_point_count(void) { return 0; }

const char *bl_crash_point_name(uint32_t index)
{
    (void)index;
    return NULL;
}

int bl_crash_arm(const char *name, uint32_t passage, int stop)
{
    (void)name, (void)passage, (void)stop;
    return -ENOENT;
}

#else

extern bl_crash_place __start_bl_crash_places[] __attribute__((visibility("hidden")));
extern bl_crash_place __stop_bl_crash_places[] __attribute__((visibility("hidden")));

const bl_crash_place *bl_crash_armed;

/* How the armed point goes off; under the lock, for a process has several threads. */
static struct {
    pthread_mutex_t lock;
    uint32_t passages_left;
    int signal;
} bl_crash = {.lock = PTHREAD_MUTEX_INITIALIZER};

uint32_t bl_crash_point_count(void)
{
    return (uint32_t)(__stop_bl_crash_places - __start_bl_crash_places);
}

const char *bl_crash_point_name(uint32_t index)
{
    return index < bl_crash_point_count() ? __start_bl_crash_places[index].name : NULL;
}

int bl_crash_arm(const char *name, uint32_t passage, int stop)
{
    const bl_crash_place *place = __start_bl_crash_places;
    while (name && place < __stop_bl_crash_places && strcmp(place->name, name) != 0)
        place++;
    if (place == __stop_bl_crash_places || (name && passage == 0))
        return -ENOENT;
    pthread_mutex_lock(&bl_crash.lock);
    bl_crash.passages_left = passage;
    bl_crash.signal = stop ? SIGSTOP : SIGKILL;
    bl_crash_armed = name ? place : NULL;
    pthread_mutex_unlock(&bl_crash.lock);
    return 0;
}

void bl_crash_pass(const bl_crash_place *place)
{
    pthread_mutex_lock(&bl_crash.lock);
    int strikes = place == bl_crash_armed && --bl_crash.passages_left == 0;
    if (strikes)
        bl_crash_armed = NULL; /* once: a process that was stopped goes on */
    pthread_mutex_unlock(&bl_crash.lock);
    if (strikes)
        raise(bl_crash.signal); /* to this thread: not one instruction more */
}

#endif
