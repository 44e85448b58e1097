/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A scenario of ranges of the pool that tools and engines write and read without the index
 * (pool/pool.c, transfer/cpu.c). A reader that has read a flag must find what was written before
 * it.
 */
#include <errno.h>

#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"
#include "sim/native/world.h"
#include "transfer/cpu.h"

enum {
    BL_RANGE_VERSIONS = 24,
    BL_RANGE_READERS = 2,       /* hosts 1 and on */
    BL_RANGE_LINES = 5,
    BL_RANGE_SIZE = BL_RANGE_LINES * BL_LINE_SIZE,
    BL_RANGE_WORDS = BL_RANGE_SIZE / 8
};

typedef struct bl_range {
    bl_sim_world *world;
    uint64_t seen[BL_RANGE_READERS]; /* version that each has read; the next version waits for
                                      * all */
} bl_range;

static uint64_t bl_range_flag_offset(const bl_pool *pool)
{
    return pool->geometry.data_offset + BL_PAGE_SIZE;
}

/* Read or write the whole range by a plan. */
static int bl_range_move(const bl_pool *pool, uint64_t *words, int write)
{
    bl_piece piece = {(uintptr_t)words, pool->geometry.data_offset, BL_RANGE_SIZE, 0};
    bl_chunk chunk = {piece.offset, BL_RANGE_SIZE, 0};
    bl_plan plan = {.pieces = &piece, .chunks = &chunk, .piece_count = 1, .chunk_count = 1};
    return write ? bl_plan_write(pool, &plan, NULL, NULL, 0)
                 : bl_plan_read(pool, &plan, NULL, NULL, 0);
}

static int bl_range_write(bl_pool *pool, void *argument)
{
    bl_range *range = argument;
    uint64_t offset = pool->geometry.data_offset, words[BL_RANGE_WORDS];
    int status = 0;
    for (uint64_t version = 1; version <= BL_RANGE_VERSIONS && status == 0; version++) {
        for (uint32_t i = 0; i < BL_RANGE_WORDS; i++)
            words[i] = version;
        if (bl_sim_below(range->world, 2))
            status = bl_pool_write(pool, offset, words, sizeof words);
        else
            status = bl_range_move(pool, words, 1);
        if (status == 0)
            status = bl_pool_write(pool, bl_range_flag_offset(pool), words, BL_LINE_SIZE);
        for (uint32_t i = 0; i < BL_RANGE_READERS; i++)
            while (status == 0 && range->seen[i] < version)
                bl_nap(&pool->memory, 1000);
    }
    return status;
}

static int bl_range_read(bl_pool *pool, void *argument)
{
    bl_range *range = argument;
    uint64_t flag[BL_LINE_SIZE / 8] = {0}, words[BL_RANGE_WORDS];
    uint64_t offset = pool->geometry.data_offset, flag_offset = bl_range_flag_offset(pool);
    uint64_t *seen = &range->seen[pool->memory.host - 1];
    while (*seen < BL_RANGE_VERSIONS) {
        int status = bl_pool_read(pool, flag_offset, flag, sizeof flag);
        if (status < 0)
            return status;
        bl_nap(&pool->memory, bl_sim_below(range->world, 1000));
        if (flag[0] == *seen || flag[7] != flag[0])
            continue;
        bl_believe(&pool->memory, flag_offset);
        if (bl_sim_below(range->world, 2))
            status = bl_pool_read(pool, offset, words, sizeof words);
        else
            status = bl_range_move(pool, words, 0);
        for (uint32_t i = 0; i < BL_RANGE_WORDS && status == 0; i++)
            if (words[i] != flag[0])
                status = -EBADMSG;
        if (status < 0)
            return status;
        bl_rely(&pool->memory, offset, sizeof words);
        *seen = flag[0];
        range->world->stat.results++;
    }
    return 0;
}

/* Check that the bytes between the range and the flag, and after the flag, are unchanged. */
static int bl_range_clean(const bl_sim_world *world)
{
    uint64_t start = world->pool.geometry.data_offset, flag = bl_range_flag_offset(&world->pool);
    for (uint64_t at = start + BL_RANGE_SIZE; at < flag + BL_PAGE_SIZE; at++)
        if (world->memory[at] != 0 && at - flag >= BL_LINE_SIZE)
            return 0;
    return 1;
}

/* ---- range: one host writes, two read. */

int bl_path_range(bl_sim_world *world)
{
    bl_range range = {.world = world};
    bl_sim_spawn(world, 0, bl_range_write, &range);
    for (uint32_t i = 0; i < BL_RANGE_READERS; i++)
        bl_sim_spawn(world, 1 + i, bl_range_read, &range);
    int status = bl_sim_world_run(world);
    return status == 0 && !bl_range_clean(world) ? -EBADMSG : status;
}
