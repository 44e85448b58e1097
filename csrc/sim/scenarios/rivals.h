/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Servers of several hosts that depose each other while they live.
 */
#ifndef BL_SIM_RIVALS_H
#define BL_SIM_RIVALS_H

#include "sim/scenarios/blocks.h"

enum {
    BL_RIVAL_COUNT = 3,         /* hosts with a server that serves or stands by */
    BL_RIVAL_EPOCHS = 128,
    BL_RIVAL_CONTESTS = 10,     /* takeovers from living servers */
    BL_LATE_NS = 16 * 1000 * 1000 /* longer than a rival tolerates silence */
};

typedef struct bl_rivals {
    bl_blocks blocks;           /* first: its clients' argument */
    bl_server *server[BL_RIVAL_COUNT]; /* the server that serves, or believes so, by host */
    uint32_t contests;          /* contests still to come */
    uint32_t deaths;            /* likewise */
    uint32_t over;
    uint64_t late_ns;           /* how late a server may be after it looked at the epoch */
    uint32_t owner[BL_RIVAL_EPOCHS]; /* process + 1 that served in it */
} bl_rivals;

/* Restart a rival of a host when it has died; end them all when the clients have finished. */
int bl_rivals_keep(bl_pool *pool, void *argument);

#endif
