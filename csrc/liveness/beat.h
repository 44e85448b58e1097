/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Signs of life for other hosts: a counter in a line that its writer moves on. A thread of its own
 * does it, in C, so that a Python thread that holds the interpreter for a minute does not look
 * dead. A beat that stands still proves nothing (D7); it only makes others careful.
 *
 * A session that ends says so with its last beat, in a line that it alone writes. Whoever serves
 * next reads it there, so a session can end in order while nobody serves.
 */
#ifndef BL_BEAT_H
#define BL_BEAT_H

#include <pthread.h>

#include "coherence/coherence.h"

enum {
    BL_BEAT_PERIOD_NS = 50 * 1000 * 1000,
    BL_BEAT_WATCH_NS = 10 * BL_BEAT_PERIOD_NS /* one that stood still so long stands still */
};

#define BL_BEAT_LAST UINT64_MAX /* the count of a session's farewell: no beat follows it */

typedef struct bl_beat {
    const bl_memory *memory;
    uint64_t offset;
    uint64_t nonce;
    uint64_t count;
    pthread_t thread;
    pthread_mutex_t lock;       /* of stop */
    pthread_cond_t wake;        /* stop was set */
    int stop;
    int running;
} bl_beat;

/* One beat, by hand: the simulator has no threads. */
void bl_beat_once(bl_beat *beat);

/* 0 or -errno. The first beat is out when this returns. */
int bl_beat_start(bl_beat *beat, const bl_memory *memory, uint64_t offset, uint64_t nonce);
void bl_beat_stop(bl_beat *beat);

/* Stop, and say that the session is over. Its process writes nothing under its nonce any more: the
 * caller has ended all copies, those of devices, too; what it streamed is fenced here. */
void bl_beat_end(bl_beat *beat);

/* The counter in a beat line, if the line is whole and its writer is nonce; else 0. No fence: the
 * caller invalidated the line and completed that. */
uint64_t bl_beat_read(const bl_memory *memory, uint64_t offset, uint64_t nonce);

#endif
