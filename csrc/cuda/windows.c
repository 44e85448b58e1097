/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The windows of a pool on a GPU. A thread of Python registers them (registration.py): first those
 * that copies need, then the others in a given order. A copy holds its windows until the events of
 * its parts have ended, whether or not a thread waits for it: before a window is retired, the
 * events of all holds are polled.
 */
#include "cuda/windows.h"

#ifndef BL_SIM

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/host_atomic.h"

int bl_cuda_windows_open(uint32_t device_count, uint32_t window_count, uint32_t window_shift,
                         const uint64_t *sizes, const uint32_t *order, uint32_t order_count,
                         bl_cuda_windows **out)
{
    uint32_t total = device_count * window_count;
    bl_cuda_windows *windows = calloc(1, sizeof *windows);
    if (windows == NULL)
        return -ENOMEM;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&windows->changed, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&windows->lock, NULL);
    windows->total = total, windows->window_count = window_count;
    windows->window_shift = window_shift;
    windows->bases = calloc(total, sizeof *windows->bases);
    windows->windows = calloc(total, sizeof *windows->windows);
    windows->order = calloc(order_count, sizeof *windows->order);
    if (windows->bases == NULL || windows->windows == NULL || windows->order == NULL) {
        bl_cuda_windows_free(windows);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < total; i++)
        windows->windows[i].size = sizes[i];
    for (uint32_t i = 0; i < order_count; i++) {
        windows->order[i] = order[i];
        windows->windows[order[i]].state = BL_CUDA_WINDOW_WAITING;
    }
    windows->order_count = windows->waiting = order_count;
    *out = windows;
    return 0;
}

void bl_cuda_windows_free(bl_cuda_windows *windows)
{
    free(windows->bases);
    free(windows->windows);
    free(windows->order);
    free(windows);
}

const bl_cuda_window *bl_cuda_windows_at(const bl_cuda_windows *windows, uint32_t index)
{
    return &windows->windows[index];
}

const uint64_t *bl_cuda_windows_bases(const bl_cuda_windows *windows) { return windows->bases; }

/* The functions below whose names do not begin with bl_cuda_windows or bl_cuda_hold are called with
 * the lock. */

static void bl_cuda_want(bl_cuda_windows *windows, bl_cuda_window *window, uint8_t wanted)
{
    windows->wanted += wanted - window->wanted;
    window->wanted = wanted;
}

static void bl_cuda_put(bl_cuda_windows *windows, uint32_t index, uint32_t state, uint64_t base)
{
    bl_cuda_window *window = &windows->windows[index];
    windows->waiting -= window->state == BL_CUDA_WINDOW_WAITING;
    windows->waiting += state == BL_CUDA_WINDOW_WAITING;
    window->state = (uint8_t)state;
    window->base = windows->bases[index] = base;
    bl_cuda_want(windows, window, 0);
    if (base) {
        window->used = ++windows->uses;
        window->missed = 0;
    }
}

/* Return the next window to register, or -1. */
static int64_t bl_cuda_next(const bl_cuda_windows *windows, uint32_t *requested)
{
    *requested = windows->wanted > 0;
    for (uint32_t i = 0; *requested && i < windows->total; i++)
        if (windows->windows[i].wanted)
            return i;
    for (uint32_t i = 0; windows->waiting && i < windows->order_count; i++)
        if (windows->windows[windows->order[i]].state == BL_CUDA_WINDOW_WAITING)
            return windows->order[i];
    return -1;
}

int64_t bl_cuda_windows_next(bl_cuda_windows *windows, uint32_t *requested)
{
    int64_t index = -1;
    pthread_mutex_lock(&windows->lock);
    windows->busy = 0;
    pthread_cond_broadcast(&windows->changed);
    while (!windows->stopped && (index = bl_cuda_next(windows, requested)) < 0)
        pthread_cond_wait(&windows->changed, &windows->lock);
    if (!windows->stopped) {
        windows->busy = 1;
        bl_cuda_want(windows, &windows->windows[index], 0);
    }
    int stopped = windows->stopped != 0;
    pthread_mutex_unlock(&windows->lock);
    return stopped ? -ECANCELED : index;
}

void bl_cuda_windows_set(bl_cuda_windows *windows, uint32_t index, uint32_t state, uint64_t base)
{
    pthread_mutex_lock(&windows->lock);
    bl_cuda_put(windows, index, state, base);
    pthread_mutex_unlock(&windows->lock);
}

void bl_cuda_windows_fill_no_more(bl_cuda_windows *windows)
{
    pthread_mutex_lock(&windows->lock);
    for (uint32_t i = 0; i < windows->total; i++)
        if (windows->windows[i].state == BL_CUDA_WINDOW_WAITING)
            bl_cuda_put(windows, i, BL_CUDA_WINDOW_REFUSED, 0);
    pthread_mutex_unlock(&windows->lock);
}

int bl_cuda_windows_settle(bl_cuda_windows *windows, uint64_t timeout_ns)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t ns = (uint64_t)until.tv_nsec + timeout_ns;
    until.tv_sec += (time_t)(ns / 1000000000), until.tv_nsec = (long)(ns % 1000000000);
    int status = 0;
    pthread_mutex_lock(&windows->lock);
    while (status == 0 && !windows->stopped &&
           (windows->waiting || windows->wanted || windows->busy))
        status = pthread_cond_timedwait(&windows->changed, &windows->lock, &until);
    pthread_mutex_unlock(&windows->lock);
    return -status;
}

void bl_cuda_windows_stop(bl_cuda_windows *windows)
{
    pthread_mutex_lock(&windows->lock);
    windows->stopped = 1;
    pthread_cond_broadcast(&windows->changed);
    pthread_mutex_unlock(&windows->lock);
}

/* ---- Holds */

/* Return the first index from i on whose byte is 1, or the number of windows. */
static uint32_t bl_cuda_marked(const bl_cuda_windows *windows, const uint8_t *map, uint32_t i)
{
    const uint8_t *found = memchr(map + i, 1, windows->total - i);
    return found ? (uint32_t)(found - map) : windows->total;
}

static uint32_t bl_cuda_marked_count(const bl_cuda_windows *windows, const uint8_t *map)
{
    uint32_t count = 0;
    for (uint32_t i = 0; (i = bl_cuda_marked(windows, map, i)) < windows->total; i++)
        count++;
    return count;
}

int64_t bl_cuda_hold_take(bl_cuda_windows *windows, bl_cuda_hold *hold, uint8_t *touched)
{
    int64_t missing = 0;
    uint64_t count = bl_cuda_marked_count(windows, touched);
    hold->windows = malloc((count + 1) * sizeof *hold->windows);
    if (hold->windows == NULL)
        return -ENOMEM;
    pthread_mutex_lock(&windows->lock);
    windows->uses++;
    for (uint32_t i = 0; (i = bl_cuda_marked(windows, touched, i)) < windows->total; i++) {
        if (!windows->bases[i]) {
            missing++;
            continue;
        }
        touched[i] = 0;
        windows->windows[i].used = windows->uses;
        windows->windows[i].holds++;
        hold->windows[hold->count++] = i;
    }
    hold->open = 1;
    hold->next = windows->holds, hold->link = &windows->holds;
    if (hold->next != NULL)
        hold->next->link = &hold->next;
    windows->holds = hold;
    pthread_mutex_unlock(&windows->lock);
    return missing;
}

void bl_cuda_windows_missed(bl_cuda_windows *windows, const uint8_t *missing, uint64_t bytes)
{
    uint32_t count = bl_cuda_marked_count(windows, missing);
    pthread_mutex_lock(&windows->lock);
    for (uint32_t i = 0; (i = bl_cuda_marked(windows, missing, i)) < windows->total; i++) {
        bl_cuda_window *window = &windows->windows[i];
        window->missed += bytes / count;
        if (window->state == BL_CUDA_WINDOW_WAITING ||
            (window->state == BL_CUDA_WINDOW_REFUSED && window->missed >= window->size))
            bl_cuda_want(windows, window, 1);
    }
    pthread_cond_broadcast(&windows->changed);
    pthread_mutex_unlock(&windows->lock);
}

static void bl_cuda_release(bl_cuda_windows *windows, bl_cuda_hold *hold)
{
    if (hold->link == NULL || hold->running > 0 || (hold->open && !bl_host_load(&hold->dropped)))
        return;
    for (uint32_t i = 0; i < hold->count; i++)
        windows->windows[hold->windows[i]].holds--;
    *hold->link = hold->next;
    if (hold->next != NULL)
        hold->next->link = hold->link;
    hold->link = NULL;
}

static int bl_cuda_poll(bl_cuda_hold *hold, bl_cuda_mark *mark)
{
    int status = mark->ended ? 1 : bl_cuda_query(hold->cuda, mark->event);
    if (status == 1 && !mark->ended) {
        mark->ended = 1;
        hold->running--;
    }
    return status;
}

void bl_cuda_hold_add(bl_cuda_windows *windows, bl_cuda_hold *hold, bl_cuda_mark *mark)
{
    pthread_mutex_lock(&windows->lock);
    mark->next = hold->marks;
    mark->ended = 0;
    hold->marks = mark;
    hold->running++;
    pthread_mutex_unlock(&windows->lock);
}

int bl_cuda_hold_poll(bl_cuda_windows *windows, bl_cuda_hold *hold, bl_cuda_mark *mark)
{
    pthread_mutex_lock(&windows->lock);
    int status = bl_cuda_poll(hold, mark);
    bl_cuda_release(windows, hold);
    pthread_mutex_unlock(&windows->lock);
    return status;
}

void bl_cuda_hold_end(bl_cuda_windows *windows, bl_cuda_hold *hold, bl_cuda_mark *mark)
{
    pthread_mutex_lock(&windows->lock);
    hold->running -= !mark->ended;
    mark->ended = 1;
    bl_cuda_release(windows, hold);
    pthread_mutex_unlock(&windows->lock);
}

void bl_cuda_hold_close(bl_cuda_windows *windows, bl_cuda_hold *hold)
{
    pthread_mutex_lock(&windows->lock);
    hold->open = 0;
    bl_cuda_release(windows, hold);
    pthread_mutex_unlock(&windows->lock);
}

int64_t bl_cuda_windows_retire(bl_cuda_windows *windows)
{
    int64_t oldest = -EBUSY;
    pthread_mutex_lock(&windows->lock);
    for (bl_cuda_hold *hold = windows->holds, *next; hold != NULL; hold = next) {
        next = hold->next;
        for (bl_cuda_mark *mark = hold->marks; mark != NULL; mark = mark->next)
            bl_cuda_poll(hold, mark); /* the owner gets an error; the windows stay held */
        bl_cuda_release(windows, hold);
    }
    for (uint32_t i = 0; i < windows->total; i++) {
        const bl_cuda_window *window = &windows->windows[i];
        if (window->state == BL_CUDA_WINDOW_READY && window->holds == 0 &&
            (oldest < 0 || window->used < windows->windows[oldest].used))
            oldest = i;
    }
    if (oldest >= 0)
        bl_cuda_put(windows, (uint32_t)oldest, BL_CUDA_WINDOW_NONE, 0);
    pthread_mutex_unlock(&windows->lock);
    return oldest;
}

#endif
