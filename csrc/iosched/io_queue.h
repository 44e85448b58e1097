/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The internals of an I/O queue, for iosched/throttle.c, which reuses tokens from piece to piece.
 */
#ifndef BL_IO_QUEUE_H
#define BL_IO_QUEUE_H

#include <pthread.h>

#include "format/interleave.h"
#include "iosched/queue.h"

struct bl_io_queue {
    pthread_mutex_t lock;       /* protects all other fields */
    pthread_cond_t changed;
    int stopped;
    int count;                  /* queues: 1 if the link is not duplex */
    bl_queue *queues[2];
    bl_price price;
    bl_interleave map;          /* the pool's devices */
    bl_transfer_stats stats[BL_LINK_NODES];
};

bl_queue *bl_io_queue_of(bl_io_queue *io_queue, int direction);

/* Return the tokens that one piece of this many bytes takes of the link, or of a memory device. */
uint64_t bl_io_queue_tokens(const bl_io_queue *io_queue, int direction, uint64_t bytes);
uint64_t bl_io_queue_device_tokens(const bl_io_queue *io_queue, uint64_t bytes);

/* The two halves of bl_io_queue_acquire, and bl_io_queue_release, for a caller that holds the lock.
 * A wait advances *now_ns. */
int bl_request_queue(bl_io_queue *io_queue, bl_io_request *request, const uint64_t *device_bytes,
                     uint64_t now_ns);
int bl_request_wait(bl_io_queue *io_queue, bl_io_request *request, uint64_t timeout_ns,
                    uint64_t *now_ns);
void bl_request_end(bl_io_queue *io_queue, bl_io_request *request, uint64_t now_ns);

#endif
