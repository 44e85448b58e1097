/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Heartbeats for other hosts: a counter in a line that its writer increments. A separate C thread
 * does it, so that a process whose Python thread holds the interpreter for a minute does not seem
 * dead. A stopped heartbeat proves nothing (D7); it only makes the session suspect.
 *
 * A session that ends publishes this with its last heartbeat, in a line that only this session
 * writes. The next server reads it there, so a session can end in order while no server runs.
 */
#ifndef BL_HEARTBEAT_H
#define BL_HEARTBEAT_H

#include <pthread.h>

#include "coherence/coherence.h"

enum {
    BL_HEARTBEAT_PERIOD_NS = 50 * 1000 * 1000,
    /* a heartbeat without a change for this long has stopped */
    BL_HEARTBEAT_WATCH_NS = 10 * BL_HEARTBEAT_PERIOD_NS
};

/* the count of a session's last heartbeat */
#define BL_HEARTBEAT_LAST UINT64_MAX

typedef struct bl_heartbeat {
    const bl_memory *memory;
    uint64_t offset;
    uint64_t nonce;
    uint64_t count;
    pthread_t thread;
    pthread_mutex_t lock;       /* guards stop */
    pthread_cond_t wake;        /* stop was set */
    int stop;
    int running;
} bl_heartbeat;

/* Write one heartbeat. The simulator calls this, since it has no threads. */
void bl_heartbeat_once(bl_heartbeat *heartbeat);

/* Start the thread: 0 or -errno. The first heartbeat is in memory when this returns. */
int bl_heartbeat_start(bl_heartbeat *heartbeat, const bl_memory *memory, uint64_t offset,
                       uint64_t nonce);
void bl_heartbeat_stop(bl_heartbeat *heartbeat);

/* Stop, and publish that the session has ended. Its process writes nothing under its nonce any
 * more: the caller has ended all copies, also those of devices; streamed bytes are fenced here. */
void bl_heartbeat_end(bl_heartbeat *heartbeat);

/* Return the counter in a heartbeat line, if the line is whole and its writer is nonce; else 0.
 * There is no fence: the caller has invalidated the line and fenced. */
uint64_t bl_heartbeat_read(const bl_memory *memory, uint64_t offset, uint64_t nonce);

#endif
