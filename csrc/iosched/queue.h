/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The internals of a queue: iosched/queue.c stores its pieces, and iosched/admit.c admits them.
 */
#ifndef BL_QUEUE_H
#define BL_QUEUE_H

#include "iosched/fair.h"
#include "iosched/link.h"

/* As in Seastar, a piece that is in flight for longer than a threshold is a stall. The threshold
 * doubles with each stall, so that a stalled link is not reported all the time. Each update of the
 * flow ratio lowers it by a millisecond. */
enum { BL_STALL_NS = 100000000, BL_STALL_STEP_NS = 1000000 };

enum bl_waiter_state { BL_WAITER_FREE, BL_WAITER_QUEUED, BL_WAITER_CANCELLED, BL_WAITER_ADMITTED };

typedef struct bl_waiter {
    uint64_t tokens, bytes, id;
    uint64_t since_ns;          /* time of the push, then of the admission */
    uint64_t owner;             /* the member that holds its tokens, once admitted */
    uint64_t device_tokens[BL_LINK_DEVICES], device_ticket[BL_LINK_DEVICES];
    uint32_t generation;        /* an old handle must not match a new piece */
    uint32_t next;
    uint8_t state, node, ticketed;
} bl_waiter;

struct bl_queue {
    bl_direction *direction;
    bl_member *member;
    uint64_t owner;
    uint64_t ticket;            /* of the reservation */
    uint64_t pending;
    uint64_t per_tick;          /* tokens to reserve at a time: the limit divided by the engines */
    uint64_t queued_tokens;
    bl_tokens *devices[BL_LINK_DEVICES];
    uint32_t device_count;
    bl_queue_stat stat;
    uint64_t goal_ns, flow_ns;
    uint64_t blocked_ns;        /* since when pieces wait without an admission, or 0 */
    uint64_t started, completed;    /* tokens since flow_ns */
    uint64_t took_ns;           /* how long the last piece was in flight */
    uint32_t coming[BL_LINK_NODES]; /* copying threads that will return */
    uint32_t gated;             /* classes whose next piece waits for a device */
    bl_waiter *waiters;
    uint32_t waiter_count, free;     /* waiter 0 is unused */
    uint32_t first[BL_LINK_NODES], last[BL_LINK_NODES];
    uint64_t plug_ns[BL_LINK_NODES];    /* when a class over its bandwidth resumes, or 0 */
    bl_fair fair;
};

/* Returns the next class of this queue, of those not in skip. The first piece of the class is not
 * cancelled. */
uint32_t bl_queue_top(bl_queue *queue, uint32_t skip);

/* Start the first piece of a class at this price. owner is the owner of the member that holds its
 * tokens. */
void bl_queue_admit(bl_queue *queue, uint32_t node, uint64_t price, uint64_t owner,
                    uint64_t now_ns, bl_admission *admission);

/* Account for renewals of a piece until now_ns as if it had been admitted again: for this many more
 * bytes, in this many pieces, on this device if there is one. */
void bl_queue_renewed(bl_queue *queue, uint64_t waiter, uint64_t bytes, uint32_t pieces,
                      uint64_t tokens, uint32_t device, uint64_t device_tokens, uint64_t now_ns);

/* Give back the tokens that are reserved for waiting pieces. */
void bl_queue_give_back(bl_queue *queue);

/* Returns 1 if a class or one of its groups is stopped or has a limited bandwidth. */
int bl_queue_limited(const bl_queue *queue, uint32_t node);

/* Returns the waiter of a handle if it is in this state, or NULL. */
bl_waiter *bl_waiter_find(bl_queue *queue, uint64_t handle, uint8_t state);
void bl_waiter_free(bl_queue *queue, uint32_t index);

/* Returns 1 if the member still belongs to this queue. */
int bl_queue_owns(const bl_queue *queue);

#endif
