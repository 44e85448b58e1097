/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Scenarios of plans (transfer/cpu.c): whole blocks are written, and rewritten during reads of some
 * of their rows on other hosts, with and without checksums.
 */
#include <errno.h>

#include "api/transfer.h"
#include "sim/native/scenarios/litmus.h"
#include "sim/native/scenarios/scenarios.h"
#include "sim/native/world.h"

enum {
    BL_ROWS_ROUNDS = 20,
    BL_ROWS_CHUNKS = 3,
    BL_ROWS_CHUNK_SIZE = 4 * BL_LINE_SIZE,
    BL_ROWS_SIZE = BL_ROWS_CHUNKS * BL_ROWS_CHUNK_SIZE,
    BL_ROWS_CUT = 72,           /* bytes of each chunk in the first of its two pieces */
    BL_ROWS_ROW = 40            /* bytes of a row; two are read of each chunk */
};

typedef struct bl_rows {
    bl_litmus litmus;
    uint8_t payload[BL_ROWS_SIZE];
    bl_piece pieces[2 * BL_ROWS_CHUNKS];
    bl_chunk chunks[BL_ROWS_CHUNKS];
    uint32_t checksums[BL_ROWS_CHUNKS];
    bl_plan plan;
} bl_rows;

/* Make two pieces of each chunk: one at its start, and one at second, of these sizes. */
static void bl_rows_plan(bl_rows *rows, uint32_t first_size, uint32_t second, uint32_t second_size)
{
    for (uint32_t c = 0; c < BL_ROWS_CHUNKS; c++) {
        uint64_t start = c * BL_ROWS_CHUNK_SIZE, offset = rows->litmus.payload + start;
        uint64_t address = (uintptr_t)rows->payload + start;
        rows->chunks[c] = (bl_chunk){offset, BL_ROWS_CHUNK_SIZE, 2 * c};
        rows->pieces[2 * c] = (bl_piece){address, offset, first_size, c};
        rows->pieces[2 * c + 1] = (bl_piece){address + second, offset + second, second_size, c};
    }
    rows->plan = (bl_plan){
        .pieces = rows->pieces,
        .chunks = rows->chunks,
        .checksums = rows->checksums,
        .piece_count = 2 * BL_ROWS_CHUNKS,
        .chunk_count = BL_ROWS_CHUNKS,
        .sparse = first_size + second_size < BL_ROWS_CHUNK_SIZE,
    };
}

static int bl_rows_write(bl_pool *pool, void *argument)
{
    bl_litmus *litmus = argument;
    const bl_memory *memory = &pool->memory;
    bl_rows rows = {.litmus = *litmus};
    int status = 0;
    bl_rows_plan(&rows, BL_ROWS_CUT, BL_ROWS_CUT, BL_ROWS_CHUNK_SIZE - BL_ROWS_CUT);
    for (uint32_t number = 1; number <= BL_ROWS_ROUNDS && status == 0; number++) {
        bl_entry line = bl_litmus_line(number, BL_ENTRY_FREE);
        bl_publish_line(memory, litmus->flag, &line); /* before the old bytes are overwritten */
        memset(rows.payload, (int)number, sizeof rows.payload);
        status = bl_plan_write(pool, &rows.plan, NULL, NULL, 0);
        line = bl_litmus_line(number, BL_ENTRY_COMMITTED);
        bl_publish_line(memory, litmus->flag, &line);
        for (uint64_t wait = bl_sim_below(litmus->world, 30); wait > 0; wait--)
            bl_pause(memory);
    }
    bl_fence_full(memory);
    litmus->finished = 1;
    return status;
}

/* Try one read. Returns 1 if rows were read and confirmed, 0 if not, or -EBADMSG. */
static int bl_rows_look(bl_rows *rows, bl_pool *pool, int summed)
{
    const bl_memory *memory = &pool->memory;
    uint64_t flag = rows->litmus.flag;
    uint8_t whole[BL_ROWS_CHUNK_SIZE];
    bl_entry line, again;
    if (!bl_litmus_look(memory, flag, &line) || line.state != BL_ENTRY_COMMITTED)
        return 0;
    memset(whole, (int)line.generation, sizeof whole);
    for (uint32_t c = 0; c < BL_ROWS_CHUNKS; c++)
        rows->checksums[c] = bl_crc32c(0, whole, sizeof whole);
    rows->plan.checksums = summed ? rows->checksums : NULL;
    if (bl_plan_read(pool, &rows->plan, NULL, NULL, 0) < 0)
        return 0;
    bl_litmus_look(memory, flag, &again);
    if (memcmp(&line, &again, sizeof line) != 0)
        return 0;
    for (uint32_t i = 0; i < rows->plan.piece_count; i++) {
        const bl_piece *piece = &rows->pieces[i];
        bl_confirm(memory, flag, piece->offset, piece->length);
        if (memcmp((const void *)piece->address, whole, piece->length) != 0)
            return -EBADMSG;
    }
    rows->litmus.world->stat.results++;
    return 1;
}

/* Read until the writer has finished, and once more: then the rows must be found. */
static int bl_rows_read(bl_pool *pool, bl_litmus *litmus, int summed)
{
    bl_rows rows = {.litmus = *litmus};
    int status = 0;
    bl_rows_plan(&rows, BL_ROWS_ROW, BL_ROWS_CHUNK_SIZE / 2, BL_ROWS_ROW);
    while (!litmus->finished && status >= 0)
        status = bl_rows_look(&rows, pool, summed);
    if (status >= 0)
        status = bl_rows_look(&rows, pool, summed);
    return status < 0 ? status : status == 1 ? 0 : -ENODATA;
}

static int bl_rows_read_summed(bl_pool *pool, void *argument)
{
    return bl_rows_read(pool, argument, 1);
}

static int bl_rows_read_bare(bl_pool *pool, void *argument)
{
    return bl_rows_read(pool, argument, 0);
}

int bl_rows_run(bl_sim_world *world)
{
    bl_litmus litmus = bl_litmus_make(world);
    bl_sim_spawn(world, 0, bl_rows_write, &litmus);
    bl_sim_spawn(world, 1, bl_rows_read_summed, &litmus);
    bl_sim_spawn(world, 2, bl_rows_read_bare, &litmus);
    return bl_sim_world_run(world);
}
