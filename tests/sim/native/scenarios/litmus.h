/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The shared part of litmus programs: a flag, a payload, and their readers.
 */
#ifndef BL_SIM_LITMUS_H
#define BL_SIM_LITMUS_H

#include "sim/native/world.h"

enum {
    BL_LITMUS_ROUNDS = 40,
    BL_LITMUS_PAYLOAD = 4 * BL_LINE_SIZE
};

typedef struct bl_litmus {
    bl_sim_world *world;
    uint64_t flag;              /* offsets */
    uint64_t payload;
    uint32_t finished;
    uint32_t arrived[2];
    uint32_t missed[BL_LITMUS_ROUNDS];
} bl_litmus;

bl_litmus bl_litmus_make(bl_sim_world *world);
/* Return a line filled with number, with its check. */
bl_entry bl_litmus_line(uint64_t number, uint32_t state);

int bl_litmus_look(const bl_memory *memory, uint64_t offset, bl_entry *line);
int bl_litmus_count(bl_pool *pool, void *argument);
int bl_litmus_stray(bl_pool *pool, void *argument);

#endif
