/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Litmus programs: the rules of coherence/coherence.h, one by one, in a dozen lines of verbs. They
 * hold in every run; with one verb skipped they fail, which shows that the simulated memory is as
 * weak as the hardware may be.
 */
#include "sim/native/scenarios/litmus.h"
#include "pool/message.h"
#include "sim/native/scenarios/scenarios.h"
#include "sim/native/world.h"

#include <errno.h>

bl_litmus bl_litmus_make(bl_sim_world *world)
{
    uint64_t data = world->pool.geometry.data_offset;
    return (bl_litmus){.world = world, .flag = data, .payload = data + BL_PAGE_SIZE};
}

bl_entry bl_litmus_line(uint64_t number, uint32_t state)
{
    bl_entry line = {.key = {number, number}, .generation = number, .offset = number,
                     .fingerprint = number, .state = state};
    line.check = bl_table_check(&line, 0);
    return line;
}

int bl_litmus_look(const bl_memory *memory, uint64_t offset, bl_entry *line)
{
    bl_refetch(memory, offset, BL_LINE_SIZE);
    bl_load_line(memory, offset, line);
    if (!bl_verify(memory, line->check == bl_table_check(line, 0)))
        return 0;
    bl_believe(memory, offset);
    return 1;
}

/* ---- Message passing: a payload is rewritten during reads, and a line describes it. A reader may
 * miss, but must never accept wrong bytes (D2, D6). */

static int bl_litmus_write(bl_pool *pool, void *argument)
{
    bl_litmus *litmus = argument;
    const bl_memory *memory = &pool->memory;
    uint8_t payload[BL_LITMUS_PAYLOAD];
    for (uint32_t number = 1; number <= BL_LITMUS_ROUNDS; number++) {
        bl_entry line = bl_litmus_line(number, BL_ENTRY_FREE);
        bl_publish_line(memory, litmus->flag, &line); /* before the old bytes are overwritten */
        memset(payload, (int)number, sizeof payload);
        bl_stream(memory, litmus->payload, payload, sizeof payload);
        bl_fence_store(memory);
        line = bl_litmus_line(number, BL_ENTRY_COMMITTED);
        bl_publish_line(memory, litmus->flag, &line);
        for (uint64_t wait = bl_sim_below(litmus->world, 30); wait > 0; wait--)
            bl_pause(memory);
    }
    bl_fence_full(memory);
    litmus->finished = 1;
    return 0;
}

static int bl_litmus_read(bl_pool *pool, void *argument)
{
    bl_litmus *litmus = argument;
    const bl_memory *memory = &pool->memory;
    uint8_t payload[BL_LITMUS_PAYLOAD];
    while (!litmus->finished) {
        bl_entry line, again;
        if (!bl_litmus_look(memory, litmus->flag, &line) || line.state != BL_ENTRY_COMMITTED)
            continue;
        bl_refetch(memory, litmus->payload, sizeof payload);
        bl_fetch(memory, litmus->payload, payload, sizeof payload);
        bl_litmus_look(memory, litmus->flag, &again);
        if (!bl_verify(memory, memcmp(&line, &again, sizeof line) == 0))
            continue;
        bl_confirm(memory, litmus->flag, litmus->payload, sizeof payload);
        for (uint32_t i = 0; i < sizeof payload; i++)
            if (payload[i] != line.generation)
                return -EBADMSG;
        litmus->world->stat.results++;
    }
    return 0;
}

int bl_litmus_message_passing(bl_sim_world *world)
{
    bl_litmus litmus = bl_litmus_make(world);
    bl_sim_spawn(world, 0, bl_litmus_write, &litmus);
    bl_sim_spawn(world, 1, bl_litmus_read, &litmus);
    bl_sim_spawn(world, 2, bl_litmus_read, &litmus);
    return bl_sim_world_run(world);
}

/* ---- Torn line: a line is streamed repeatedly; its check rejects a mix of two versions (A1). */

static int bl_litmus_restream(bl_pool *pool, void *argument)
{
    bl_litmus *litmus = argument;
    for (uint32_t number = 1; number <= BL_LITMUS_ROUNDS; number++) {
        bl_entry line = bl_litmus_line(number, BL_ENTRY_COMMITTED);
        bl_publish_line(&pool->memory, litmus->flag, &line);
    }
    bl_fence_full(&pool->memory);
    litmus->finished = 1;
    return 0;
}

static int bl_litmus_reject(bl_pool *pool, void *argument)
{
    bl_litmus *litmus = argument;
    while (!litmus->finished) {
        bl_entry line, whole;
        if (!bl_litmus_look(&pool->memory, litmus->flag, &line)) {
            litmus->world->stat.torn_lines += line.generation != 0;
            continue;
        }
        whole = bl_litmus_line(line.generation, line.state);
        if (memcmp(&line, &whole, sizeof line) != 0)
            return -EBADMSG;
        litmus->world->stat.results++;
    }
    return 0;
}

int bl_litmus_torn_line(bl_sim_world *world)
{
    bl_litmus litmus = bl_litmus_make(world);
    bl_sim_spawn(world, 0, bl_litmus_restream, &litmus);
    bl_sim_spawn(world, 1, bl_litmus_reject, &litmus);
    return bl_sim_world_run(world);
}

/* ---- Store buffering: each of two processes writes its own line, then reads the other's: they
 * cannot both miss the other's write. A store fence would not suffice: it does not complete a write
 * before a load. Takeover depends on this (D5). */

static int bl_litmus_store_load(bl_litmus *litmus, const bl_memory *memory, uint32_t mine)
{
    for (uint32_t round = 0; round < BL_LITMUS_ROUNDS; round++) {
        uint64_t flags = litmus->flag + round * 2 * BL_POLL_STRIDE;
        uint64_t other = flags + (1 - mine) * BL_POLL_STRIDE;
        bl_entry line = bl_litmus_line(1, BL_ENTRY_COMMITTED);
        bl_publish_line(memory, flags + mine * BL_POLL_STRIDE, &line);
        bl_fence_full(memory);
        bl_invalidate(memory, other, BL_LINE_SIZE);
        bl_fence_full(memory);
        uint64_t found = bl_load64(memory, other);
        bl_ordered(memory, other, flags + mine * BL_POLL_STRIDE);
        if (found == 0)
            litmus->missed[round]++;
        if (litmus->missed[round] == 2)
            return -EBADMSG;
        litmus->arrived[mine] = round + 1;
        while (litmus->arrived[1 - mine] <= round)
            bl_pause(memory);
    }
    return 0;
}

static int bl_litmus_store_load_0(bl_pool *pool, void *argument)
{
    return bl_litmus_store_load(argument, &pool->memory, 0);
}

static int bl_litmus_store_load_1(bl_pool *pool, void *argument)
{
    return bl_litmus_store_load(argument, &pool->memory, 1);
}

int bl_litmus_store_buffering(bl_sim_world *world)
{
    bl_litmus litmus = bl_litmus_make(world);
    bl_sim_spawn(world, 0, bl_litmus_store_load_0, &litmus);
    bl_sim_spawn(world, 1, bl_litmus_store_load_1, &litmus);
    return bl_sim_world_run(world);
}

/* ---- Stray store: a program stores into a line that another host streams. Its dirty copy is
 * written back as a whole and restores old bytes (D4): the one litmus program that must fail. */

int bl_litmus_stray(bl_pool *pool, void *argument)
{
    bl_litmus *litmus = argument;
    uint64_t word = 1;
    bl_sim_store_cached(&pool->memory, litmus->flag + 48, &word, sizeof word);
    for (int i = 0; i < 50; i++)
        bl_pause(&pool->memory);
    bl_refetch(&pool->memory, litmus->flag, BL_LINE_SIZE);
    return 0;
}

int bl_litmus_count(bl_pool *pool, void *argument)
{
    bl_litmus *litmus = argument;
    const bl_memory *memory = &pool->memory;
    for (uint64_t number = 1; number <= BL_LITMUS_ROUNDS; number++) {
        bl_entry line = bl_litmus_line(number, BL_ENTRY_COMMITTED);
        bl_publish_line(memory, litmus->flag, &line);
        bl_refetch(memory, litmus->flag, BL_LINE_SIZE);
        if (bl_load64(memory, litmus->flag) != number)
            return -EBADMSG;
    }
    return 0;
}

int bl_litmus_stray_store(bl_sim_world *world)
{
    bl_litmus litmus = bl_litmus_make(world);
    world->lawless = 1;
    bl_sim_spawn(world, 0, bl_litmus_count, &litmus);
    bl_sim_spawn(world, 1, bl_litmus_stray, &litmus);
    return bl_sim_world_run(world);
}

/* ---- Raw access: a program that uses an address instead of the verbs must fault. */

static int bl_litmus_raw(bl_pool *pool, void *argument)
{
    bl_litmus *litmus = argument;
    const uint8_t *device = pool->memory.base[1];
    bl_litmus_look(&pool->memory, litmus->flag, &(bl_entry){.state = 0});
    return ((const volatile uint8_t *)device)[3 * BL_PAGE_SIZE] ? -EBADMSG : 0;
}

int bl_litmus_raw_access(bl_sim_world *world)
{
    bl_litmus litmus = bl_litmus_make(world);
    bl_sim_spawn(world, 0, bl_litmus_raw, &litmus);
    return bl_sim_world_run(world);
}
