/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A port from inside: for iosched/toll.c, which keeps what it holds from piece to piece.
 */
#ifndef BL_PORT_H
#define BL_PORT_H

#include <pthread.h>

#include "format/interleave.h"
#include "iosched/queue.h"

struct bl_port {
    pthread_mutex_t lock;       /* of all that follows */
    pthread_cond_t changed;
    int stopped;
    int count;                  /* queues: 1 where the link is not duplex */
    bl_queue *queues[2];
    bl_price price;
    bl_interleave map;          /* of the pool's devices */
    bl_carried carried[BL_LINK_NODES];
};

bl_queue *bl_port_queue(bl_port *port, int direction);

/* What so many bytes of one piece take of the link; and of a memory device. */
uint64_t bl_port_tokens(const bl_port *port, int direction, uint64_t bytes);
uint64_t bl_port_device_tokens(const bl_port *port, uint64_t bytes);

/* Under the lock: the halves of bl_port_acquire, and bl_port_release. now_ns moves on. */
int bl_request_queue(bl_port *port, bl_io_request *request, const uint64_t *device_bytes,
                     uint64_t now_ns);
int bl_request_wait(bl_port *port, bl_io_request *request, uint64_t timeout_ns, uint64_t *now_ns);
void bl_request_end(bl_port *port, bl_io_request *request, uint64_t now_ns);

#endif
