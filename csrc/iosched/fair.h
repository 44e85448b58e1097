/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Orders the classes that wait in one queue by shares. The accounts of the classes lie in the
 * direction, which all queues of the host share, so shares also hold between processes.
 */
#ifndef BL_FAIR_H
#define BL_FAIR_H

#include "api/iosched.h"

typedef struct bl_fair {
    bl_direction *direction;
    uint64_t sequence;                      /* number of pushes so far, to break ties */
    uint64_t pushed[BL_LINK_NODES];
    uint64_t waiting[BL_LINK_NODES];        /* pieces of each class */
    uint8_t queued[BL_LINK_NODES];          /* 1: queued in its group */
    uint8_t unplugged[BL_LINK_NODES];
} bl_fair;

/* Queue a class in its group: it has one more piece, or it was resumed and has pieces. */
void bl_fair_wake(bl_fair *fair, uint32_t node);

/* Treat every waiting class as newly pushed, because the queue was not polled for a long time. */
void bl_fair_wake_all(bl_fair *fair);

/* Returns the next class, of those not in skip (a mask), or 0 if none waits. */
uint32_t bl_fair_top(bl_fair *fair, uint32_t skip);

/* Charge a class and its groups for a piece that was taken out. */
void bl_fair_charge(bl_fair *fair, uint32_t node, uint64_t cost);

/* Returns the next class if exactly the classes of the mask waited, or 0. */
uint32_t bl_fair_first(const bl_direction *direction, uint32_t mask);

/* Returns the cost that a class may add before it has used as much as another class, relative to
 * their shares, or 0 if it has used more already. Classes of different groups are compared by their
 * groups. */
uint64_t bl_fair_lag(const bl_direction *direction, uint32_t node, uint32_t other);

/* Returns a mask of the classes that wait and are not stopped. */
uint32_t bl_fair_mask(const bl_fair *fair);

#endif
