/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A queue from inside: iosched/queue.c keeps its pieces, iosched/admit.c says which may go.
 */
#ifndef BL_QUEUE_H
#define BL_QUEUE_H

#include "iosched/fair.h"
#include "iosched/link.h"

/* Seastar's: a piece that is under way for longer is a stall. The threshold doubles with each, so
 * that a link that stands still is not told of all the time, and comes down again a millisecond
 * with every look at the flow ratio. */
enum { BL_STALL_NS = 100000000, BL_STALL_STEP_NS = 1000000 };

enum bl_waiter_state { BL_WAITER_FREE, BL_WAITER_QUEUED, BL_WAITER_CANCELLED, BL_WAITER_ADMITTED };

typedef struct bl_waiter {
    uint64_t tokens, bytes, id;
    uint64_t since_ns;          /* pushed; or admitted */
    uint64_t owner;             /* of the member that holds its tokens, once admitted */
    uint64_t device_tokens[BL_LINK_DEVICES], device_ticket[BL_LINK_DEVICES];
    uint32_t generation;        /* so that an old handle does not name a new piece */
    uint32_t next;
    uint8_t state, node, ticketed;
} bl_waiter;

struct bl_queue {
    bl_direction *way;
    bl_member *member;
    uint64_t owner;
    uint64_t want;              /* ticket */
    uint64_t pending;
    uint64_t per_tick;          /* tokens to reserve at a time: a share of the bucket's limit */
    uint64_t queued_tokens;
    bl_tokens *devices[BL_LINK_DEVICES];
    uint32_t device_count;
    bl_queue_stat stat;
    uint64_t goal_ns, flow_ns;
    uint64_t blocked_ns;        /* since when pieces wait and none is admitted; 0: not so */
    uint64_t started, completed;    /* tokens, since flow_ns */
    uint64_t took_ns;           /* how long the last piece was under way */
    uint32_t coming[BL_LINK_NODES]; /* threads that copy, and will be back for more */
    uint32_t gated;             /* classes whose next piece waited for its device */
    bl_waiter *waiters;
    uint32_t waiter_count, free;     /* waiter 0 is no waiter */
    uint32_t first[BL_LINK_NODES], last[BL_LINK_NODES];
    uint64_t plug_ns[BL_LINK_NODES];    /* when a class that had its bandwidth goes on; 0: not so */
    bl_fair fair;
};

/* The class whose turn it is here, of those not in skip, with nothing cancelled at its front. */
uint32_t bl_queue_top(bl_queue *queue, uint32_t skip);

/* The first piece of a class goes, at this price; owner is of the member that holds its tokens. */
void bl_queue_admit(bl_queue *queue, uint32_t node, uint64_t price, uint64_t owner,
                    uint64_t now_ns, bl_admission *admission);

/* A piece that is under way went on as if it had been admitted anew, until now: bytes more, as so
 * many pieces, each within what it holds. They lie on this device, if there is one. */
void bl_queue_renewed(bl_queue *queue, uint64_t waiter, uint64_t bytes, uint32_t pieces,
                      uint64_t tokens, uint32_t device, uint64_t device_tokens, uint64_t now_ns);

/* Is a class, or a group of it, stopped or of a limited bandwidth? */
int bl_queue_limited(const bl_queue *queue, uint32_t node);

/* The waiter of a handle, if it is in that state; or NULL. */
bl_waiter *bl_waiter_find(bl_queue *queue, uint64_t handle, uint8_t state);
void bl_waiter_free(bl_queue *queue, uint32_t index);

/* Does the member still belong to this queue? */
int bl_queue_owns(const bl_queue *queue);

#endif
