/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Which server speaks for the pool: the valid epoch line with the greater number (D5).
 */
#ifndef BL_EPOCH_H
#define BL_EPOCH_H

#include "message.h"
#include "pool.h"

/* The line of one half: 1 if it is whole, 0 if nothing was ever written there or it is torn. */
static inline int bl_epoch_line_read(const bl_pool *pool, uint32_t half, bl_epoch_line *out)
{
    const bl_memory *memory = &pool->memory;
    for (int tries = 0; tries < 4; tries++) {
        bl_refetch(memory, bl_epoch_offset(half), BL_LINE_SIZE); /* SYNC epoch.line */
        bl_load_line(memory, bl_epoch_offset(half), out);
        if (bl_verify(memory, bl_table_whole(out, half)) && out->epoch % BL_HALF_COUNT == half)
            return 1;
        if (out->epoch == 0 && out->check == 0)
            return 0;
        bl_pause(memory);
    }
    return 0;
}

/* The pool's epoch line; its epoch is 0 if nobody ever served the pool. */
static inline void bl_epoch_read(const bl_pool *pool, bl_epoch_line *out)
{
    bl_epoch_line line[BL_HALF_COUNT];
    memset(out, 0, sizeof *out);
    for (uint32_t half = 0; half < BL_HALF_COUNT; half++)
        if (bl_epoch_line_read(pool, half, &line[half]) && line[half].epoch > out->epoch)
            *out = line[half];
}

#endif
