/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Ranges of the pool in the simulator: what tools and engines write and read without the index
 * (pool.c, cpu_engine.c). Versions only grow: whoever has read a flag finds nothing older than it
 * in what was written before the flag.
 */
#include <errno.h>

#include "sim_world.h"
#include "transfer.h"

enum {
    BL_RANGE_VERSIONS = 24,
    BL_RANGE_LINES = 5,
    BL_RANGE_SIZE = BL_RANGE_LINES * BL_LINE_SIZE,
    BL_RANGE_WORDS = BL_RANGE_SIZE / 8
};

static uint64_t bl_range_flag_offset(const bl_pool *pool)
{
    return pool->geometry.data_offset + BL_PAGE_SIZE;
}

static int bl_range_write(bl_pool *pool, void *argument)
{
    bl_sim_world *world = argument;
    uint64_t offset = pool->geometry.data_offset, words[BL_RANGE_WORDS];
    bl_fragment fragment = {(uintptr_t)words, sizeof words};
    int status = 0;
    for (uint64_t version = 1; version <= BL_RANGE_VERSIONS && status == 0; version++) {
        for (uint32_t i = 0; i < BL_RANGE_WORDS; i++)
            words[i] = version;
        if (bl_sim_below(world, 2))
            status = bl_pool_write(pool, offset, words, sizeof words);
        else
            status = bl_transfer_write(pool, offset, &fragment, 1, sizeof words, 0, NULL);
        if (status == 0)
            status = bl_pool_write(pool, bl_range_flag_offset(pool), words, BL_LINE_SIZE);
        bl_nap(&pool->memory, bl_sim_below(world, 2000));
    }
    return status;
}

static int bl_range_read(bl_pool *pool, void *argument)
{
    bl_sim_world *world = argument;
    uint64_t flag[BL_LINE_SIZE / 8] = {0}, words[BL_RANGE_WORDS];
    bl_fragment fragment = {(uintptr_t)words, sizeof words};
    while (flag[0] < BL_RANGE_VERSIONS) {
        int status = bl_pool_read(pool, bl_range_flag_offset(pool), flag, sizeof flag);
        if (status == 0 && bl_sim_below(world, 2))
            status = bl_pool_read(pool, pool->geometry.data_offset, words, sizeof words);
        else if (status == 0)
            status = bl_transfer_read(pool, pool->geometry.data_offset, &fragment, 1, sizeof words,
                                      0, NULL);
        for (uint32_t i = 0; i < BL_RANGE_WORDS && status == 0; i++)
            if (words[i] < flag[0])
                status = -EBADMSG;
        if (status < 0)
            return status;
        world->stat.results++;
        bl_nap(&pool->memory, bl_sim_below(world, 1000));
    }
    return 0;
}

/* ---- range: one host writes, two read. */

static int bl_path_range(bl_sim_world *world)
{
    bl_sim_spawn(world, 0, bl_range_write, world);
    bl_sim_spawn(world, 1, bl_range_read, world);
    bl_sim_spawn(world, 2, bl_range_read, world);
    return bl_sim_world_run(world);
}
