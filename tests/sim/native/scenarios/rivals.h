/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Servers of several hosts that depose each other while they are alive.
 */
#ifndef BL_SIM_RIVALS_H
#define BL_SIM_RIVALS_H

#include "sim/native/scenarios/blocks.h"

enum {
    BL_RIVAL_COUNT = 3,         /* hosts with a server that serves or stands by */
    BL_RIVAL_EPOCHS = 128,
    BL_RIVAL_CONTESTS = 10,     /* takeovers from living servers */
    BL_LATE_NS = 16 * 1000 * 1000 /* longer than a rival's timeout */
};

typedef struct bl_rivals {
    bl_blocks blocks;           /* first: its clients' argument */
    bl_server *server[BL_RIVAL_COUNT]; /* by host: the server that serves, or has not noticed its
                                        * deposition */
    uint32_t contests;          /* contests still to come */
    uint32_t deaths;            /* deaths still to come */
    uint32_t over;
    uint64_t late_ns;           /* the longest delay of a server after it has read the epoch */
    uint32_t owner[BL_RIVAL_EPOCHS]; /* by epoch: 1 + the process that served */
} bl_rivals;

/* Restart dead rivals; stop all of them when the clients have finished. */
int bl_rivals_keep(bl_pool *pool, void *argument);

#endif
