/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A port from inside: iosched/port.c hands pieces that were pushed to one thread, iosched/toll.c
 * lets threads pass that copy by themselves.
 */
#ifndef BL_PORT_H
#define BL_PORT_H

#include <pthread.h>

#include "format/interleave.h"
#include "iosched/queue.h"

struct bl_port {
    pthread_mutex_t lock;       /* of all that follows */
    pthread_cond_t changed;
    int woken;
    int stopped;
    int next;                   /* the direction to ask first */
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

/* Under the lock: queue a piece; its handle, or a negative errno. */
int64_t bl_port_queue_piece(bl_port *port, int direction, uint32_t node, uint64_t bytes,
                            const uint64_t *device_bytes, uint64_t id, uint64_t now_ns);

/* Under the lock: what of this queue may start, counted: 0, or -EAGAIN and when to ask again. */
int bl_port_ask(bl_port *port, bl_queue *queue, uint64_t now_ns, bl_admission *admission,
                uint64_t *wait_ns);

/* Under the lock: let others have it until wait_ns have gone by, or there is news. */
void bl_port_doze(bl_port *port, uint64_t wait_ns);

#endif
