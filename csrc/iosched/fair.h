/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Whose turn it is among the classes that wait in one queue. What each has had so far stands in the
 * way and is the same for all queues of the host, so shares hold between processes too.
 */
#ifndef BL_FAIR_H
#define BL_FAIR_H

#include "api/iosched.h"

typedef struct bl_fair {
    bl_direction *way;
    uint64_t sequence;                      /* of pushes into the tree: ties go by it */
    uint64_t pushed[BL_LINK_NODES];
    uint64_t waiting[BL_LINK_NODES];        /* a class: its pieces */
    uint8_t queued[BL_LINK_NODES];          /* in its group's contest */
    uint8_t unplugged[BL_LINK_NODES];
} bl_fair;

/* A class has one piece more; or was plugged in again, and has some. */
void bl_fair_wake(bl_fair *fair, uint32_t node);

/* All that waits here comes as if it had just been pushed: nobody has asked for it for long. */
void bl_fair_rouse(bl_fair *fair);

/* The class whose turn it is, of those not in skip (a bit each); 0 if nobody waits. */
uint32_t bl_fair_top(bl_fair *fair, uint32_t skip);

/* A piece of this class was taken out: it and its groups have had that much more. */
void bl_fair_charge(bl_fair *fair, uint32_t node, uint64_t cost);

/* The class whose turn it would be, were exactly those of a mask waiting; 0 for none. */
uint32_t bl_fair_first(const bl_direction *way, uint32_t mask);

/* The cost that a class may have before it has had as much as another one, in their shares; 0 if it
 * has had more. In different groups the groups are compared. */
uint64_t bl_fair_lag(const bl_direction *way, uint32_t node, uint32_t other);

/* Classes that wait and are not stopped, a bit each. */
uint32_t bl_fair_mask(const bl_fair *fair);

#endif
