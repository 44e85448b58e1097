/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Windows (cuda/windows.c): which are registered, which copies hold them, and the events that end
 * these holds.
 */
#ifndef BL_CUDA_WINDOWS_H
#define BL_CUDA_WINDOWS_H

#include <pthread.h>

#include "cuda/driver.h"

/* The end of a part of a copy on its stream. */
typedef struct bl_cuda_mark {
    struct bl_cuda_mark *next;
    uint64_t event;
    int ended;                  /* the event is not used, or was reached */
} bl_cuda_mark;

/* The windows that one copy holds, until its marks have ended. */
typedef struct bl_cuda_hold {
    struct bl_cuda_hold *next, **link;  /* in the list of the windows; link is NULL outside it */
    bl_cuda *cuda;
    bl_cuda_mark *marks;
    uint32_t *windows;
    uint32_t count;
    uint32_t running;           /* marks that have not ended */
    uint32_t open;              /* more marks may follow */
    uint64_t dropped;           /* 1: none will; stored by any thread */
} bl_cuda_hold;

struct bl_cuda_windows {
    pthread_mutex_t lock;       /* of everything, and of the holds and marks */
    pthread_cond_t changed;
    uint64_t *bases;            /* a copy of those of the windows, for bl_windows */
    bl_cuda_window *windows;
    uint32_t *order;
    bl_cuda_hold *holds;
    uint64_t uses;
    uint32_t total, window_count, window_shift;
    uint32_t order_count;
    uint32_t waiting, wanted;   /* numbers of windows */
    uint32_t busy;              /* one is being registered */
    uint32_t stopped;
};

static inline bl_windows bl_cuda_windows_of(const bl_cuda_windows *windows, const bl_pool *pool)
{
    return (bl_windows){pool, windows->bases, windows->window_count, windows->window_shift};
}

/* Hold the windows among touched that are registered, and set touched to 1 for the others only.
 * Returns how many others there are, or -ENOMEM. */
int64_t bl_cuda_hold_take(bl_cuda_windows *windows, bl_cuda_hold *hold, uint8_t *touched);

/* Count bytes that are bounced because these windows are missing. */
void bl_cuda_windows_missed(bl_cuda_windows *windows, const uint8_t *missing, uint64_t bytes);

/* Hold the windows until the mark's event, which was recorded, has ended. */
void bl_cuda_hold_add(bl_cuda_windows *windows, bl_cuda_hold *hold, bl_cuda_mark *mark);

/* Return 1 if the mark has ended, 0 if not, or the error of its event. */
int bl_cuda_hold_poll(bl_cuda_windows *windows, bl_cuda_hold *hold, bl_cuda_mark *mark);

/* End a mark whose event is known to have ended. */
void bl_cuda_hold_end(bl_cuda_windows *windows, bl_cuda_hold *hold, bl_cuda_mark *mark);

/* Declare that no marks follow: the hold ends with the last one. */
void bl_cuda_hold_close(bl_cuda_windows *windows, bl_cuda_hold *hold);

#endif
