/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Creates, runs and destroys worlds and their processes.
 *
 * Every run draws its rates from its seed: how often processes are switched, and how often caches
 * and buffers act. Some bugs need many events, others a process that is paused for a long time.
 */
#include "sim/native/verdict.h"
#include "sim/native/world.h"

#include <errno.h>
#include <stdlib.h>

#include "sim/native/heap.h"

enum { BL_SIM_STEP_LIMIT = 4 * 1000 * 1000 };

int bl_sim_world_create(bl_sim_world **out, const bl_sim_config *config,
                        const bl_geometry *geometry)
{
    bl_sim_world *world = calloc(1, sizeof *world);
    if (world == NULL)
        return -ENOMEM;
    uint64_t line_count = geometry->size / BL_LINE_SIZE;
    world->config = *config;
    if (world->config.step_limit == 0)
        world->config.step_limit = BL_SIM_STEP_LIMIT;
    bl_memory *memory = &world->pool.memory;
    world->pool.geometry = *geometry;
    memory->map = bl_interleave_of(geometry);
    memory->size = geometry->size;
    memory->world = world;
    for (uint32_t i = 0; i < geometry->device_count; i++)
        memory->coherent[i] = config->coherent == BL_SIM_MIXED      ? (i + config->seed) % 2
                              : config->coherent == BL_SIM_METADATA ? i < memory->map.data_device
                                                                    : config->coherent;
    world->random = (config->seed + 1) * 0x9e3779b97f4a7c15u; /* xorshift must not start at zero */
    world->random ^= world->random == 0;
    for (int i = 0; i < 4; i++)
        bl_sim_random(world);
    world->switch_mask = (1ull << (1 + bl_sim_below(world, 6))) - 1;
    world->chance_mask = (1ull << bl_sim_below(world, 4)) - 1;
    if (bl_sim_below(world, 4) == 0)
        world->chance_mask = UINT64_MAX; /* caches evict nothing */
    world->keeps_unfenced = bl_sim_below(world, 4) == 0;
    world->memory = calloc(1, geometry->size);
    world->writer = calloc(1, line_count);
    world->stale = calloc(bl_sim_site_count() + 1, sizeof *world->stale);
    world->hits = calloc(bl_sim_site_count() + 1, sizeof *world->hits);
    world->liveness_lock = calloc(BL_SIM_LIVENESS_COUNT, sizeof *world->liveness_lock);
    int whole = world->memory && world->writer && world->stale && world->hits &&
        world->liveness_lock &&
                bl_sim_history_create(&world->history, line_count) == 0 &&
                bl_sim_raw_reserve(world) == 0;
    for (uint32_t i = 0; i < BL_SIM_HOST_COUNT; i++) {
        bl_sim_host *host = &world->host[i];
        host->place = calloc(line_count, sizeof *host->place);
        host->lines = malloc(BL_SIM_CACHE_LINES * sizeof *host->lines);
        host->clock_ahead_ns = bl_sim_below(world, 1ull << 40);
        host->clock_fast_1024 = (int32_t)bl_sim_below(world, 64) - 32;
        whole = whole && host->place && host->lines;
    }
    *out = world;
    if (!whole)
        bl_sim_world_destroy(world);
    return whole ? 0 : -ENOMEM;
}

void bl_sim_world_destroy(bl_sim_world *world)
{
    for (uint32_t i = 0; i < world->process_count; i++) {
        free(world->process[i]->stack);
        free(world->process[i]->order.looks);
        free(world->process[i]);
    }
    for (uint32_t i = 0; i < BL_SIM_HOST_COUNT; i++) {
        free(world->host[i].place);
        free(world->host[i].lines);
    }
    free(world->memory);
    free(world->writer);
    free(world->stale);
    free(world->hits);
    free(world->liveness_lock);
    free(world->jobs);
    bl_sim_history_destroy(&world->history);
    bl_sim_raw_release(world);
    free(world);
    bl_heap_sweep();
}

/* The outermost function of a process. The world's address is passed in halves, because makecontext
 * passes only ints. */
static void bl_sim_main(uint32_t high, uint32_t low)
{
    bl_sim_world *world = (bl_sim_world *)((uintptr_t)high << 32 | low);
    bl_sim_process *process = world->current;
    int result = process->body(&process->pool, process->argument);
    bl_sim_catch_up(world);
    process->state = BL_SIM_EXITED;
    if (result < 0)
        bl_sim_stop(world, result);
    bl_sim_end_turn(world);
}

int bl_sim_spawn(bl_sim_world *world, uint32_t host, bl_sim_body *body, void *argument)
{
    if (world->process_count == BL_SIM_PROCESS_COUNT)
        return -ENOSPC;
    bl_sim_process *process = calloc(1, sizeof *process);
    if (process == NULL)
        return -ENOMEM;
    process->stack = malloc(BL_SIM_STACK_SIZE);
    if (process->stack == NULL) {
        free(process);
        return -ENOMEM;
    }
    process->pool = world->pool;
    process->pool.memory.host = host;
    process->number = process->leader = world->process_count;
    process->body = body;
    process->argument = argument;
    getcontext(&process->context);
    process->context.uc_stack.ss_sp = process->stack;
    process->context.uc_stack.ss_size = BL_SIM_STACK_SIZE;
    makecontext(&process->context, (void (*)(void))bl_sim_main, 2,
                (uint32_t)((uintptr_t)world >> 32), (uint32_t)(uintptr_t)world);
    world->process[world->process_count] = process;
    return (int)world->process_count++;
}

int bl_sim_thread(bl_sim_world *world, bl_sim_body *body, void *argument)
{
    const bl_sim_process *leader = bl_sim_leader(world, world->current);
    int number = bl_sim_spawn(world, leader->pool.memory.host, body, argument);
    if (number >= 0)
        world->process[number]->leader = leader->number;
    return number;
}

int bl_sim_world_run(bl_sim_world *world)
{
    bl_sim_raw_watch(world);
    bl_heap_open = 1;
    bl_sim_end_turn(world);
    bl_heap_open = 0;
    bl_sim_raw_ignore(world);
    return world->result;
}
