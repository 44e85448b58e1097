/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Crash points: see coherence/crash_point.h. The kernel delivers the signal before the call
 * returns, so this process does nothing after the point: a kill ends every thread, and a stop halts
 * them all.
 */
#include "coherence/crash_point.h"

#include "coherence/coherence.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#ifdef BL_SIM

int bl_crash_arm(const char *name, uint32_t passage, int stop, uint32_t words)
{
    (void)name, (void)passage, (void)stop, (void)words;
    return -ENOENT;
}

#else

extern bl_crash_place __start_bl_crash_places[] __attribute__((visibility("hidden")));
extern bl_crash_place __stop_bl_crash_places[] __attribute__((visibility("hidden")));

const bl_crash_place *bl_crash_armed;

/* The armed point and its action. The lock is needed because several threads may pass the point. */
static struct {
    pthread_mutex_t lock;
    uint32_t passages_left;
    uint32_t words;
    int signal;
} bl_crash = {.lock = PTHREAD_MUTEX_INITIALIZER};

int bl_crash_arm(const char *name, uint32_t passage, int stop, uint32_t words)
{
    const bl_crash_place *place = __start_bl_crash_places;
    while (name && place < __stop_bl_crash_places && strcmp(place->name, name) != 0)
        place++;
    if (place == __stop_bl_crash_places || (name && passage == 0))
        return -ENOENT;
    if (words > UINT8_MAX || (words > 0 && !(name && place->is_line)))
        return -EINVAL;
    pthread_mutex_lock(&bl_crash.lock);
    bl_crash.words = words;
    bl_crash.passages_left = passage;
    bl_crash.signal = stop ? SIGSTOP : SIGKILL;
    bl_crash_armed = name ? place : NULL;
    pthread_mutex_unlock(&bl_crash.lock);
    return 0;
}

/* Count a pass. Returns 1 if it is the armed one; *words is then the set of words to write. */
static int bl_crash_strikes(const bl_crash_place *place, uint32_t *words)
{
    pthread_mutex_lock(&bl_crash.lock);
    int strikes = place == bl_crash_armed && --bl_crash.passages_left == 0;
    if (strikes)
        bl_crash_armed = NULL; /* only once: a stopped process may resume */
    *words = bl_crash.words;
    pthread_mutex_unlock(&bl_crash.lock);
    return strikes;
}

void bl_crash_pass(const bl_crash_place *place)
{
    uint32_t words;
    if (bl_crash_strikes(place, &words))
        raise(bl_crash.signal); /* delivered before this thread continues */
}

void bl_crash_pass_line(const bl_crash_place *place, const bl_memory *memory, uint64_t offset,
                        const void *line)
{
    uint32_t words;
    if (!bl_crash_strikes(place, &words))
        return;
    if (words > 0) {
        uint64_t torn[8], whole[8];
        bl_refetch(memory, offset, BL_LINE_SIZE); /* modify the bytes in memory */
        bl_load_line(memory, offset, torn);
        memcpy(whole, line, sizeof whole);
        for (uint32_t i = 0; i < 8; i++)
            if (words >> i & 1)
                torn[i] = whole[i];
        bl_publish_line(memory, offset, torn);
    }
    raise(bl_crash.signal);
}

#endif
