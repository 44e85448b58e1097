/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Turns, time, life and death in the simulated world. Processes are coroutines of one thread, so
 * nothing here races and a run depends on its seed alone.
 *
 * Every run has a temper, drawn from its seed: how often processes are switched and how busy caches
 * and buffers are. Some bugs show when much happens, others when one process stands still for long.
 */
#include "sim/device.h"
#include "sim/world.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    BL_SIM_STEP_LIMIT = 4 * 1000 * 1000,
    BL_SIM_STALL_BITS_MIN = 10, /* how long a process is left standing: a microsecond, */
    BL_SIM_STALL_BITS = 15      /* doubled less often than this */
};

/* ---- Worlds. */

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
    memory->map = bl_interleave_make(geometry->device_count, geometry->device_size,
                                     geometry->interleaved);
    memory->size = geometry->size;
    memory->world = world;
    for (uint32_t i = 0; i < geometry->device_count; i++)
        memory->coherent[i] = config->coherent == BL_SIM_MIXED ? (i + config->seed) % 2
                                                               : config->coherent;
    world->random = (config->seed + 1) * 0x9e3779b97f4a7c15u; /* xorshift must not start at zero */
    world->random ^= world->random == 0;
    for (int i = 0; i < 4; i++)
        bl_sim_random(world);
    world->switch_mask = (1ull << (1 + bl_sim_below(world, 6))) - 1;
    world->chance_mask = (1ull << bl_sim_below(world, 4)) - 1;
    if (bl_sim_below(world, 4) == 0)
        world->chance_mask = UINT64_MAX; /* caches keep what they have: who does not ask sees old */
    world->keeps_unfenced = bl_sim_below(world, 4) == 0;
    world->memory = calloc(1, geometry->size);
    world->writer = calloc(1, line_count);
    world->stale = calloc(bl_sim_site_count() + 1, sizeof *world->stale);
    world->hits = calloc(bl_sim_site_count() + 1, sizeof *world->hits);
    world->proof = calloc(BL_SIM_PROOF_COUNT, sizeof *world->proof);
    int whole = world->memory && world->writer && world->stale && world->hits && world->proof &&
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
    free(world->proof);
    free(world->jobs);
    bl_sim_history_destroy(&world->history);
    bl_sim_raw_release(world);
    free(world);
    bl_heap_sweep();
}

/* ---- Turns. */

/* Who runs next: one of those awake. When all sleep, time jumps, and no buffer holds for so long.
 * NULL: nobody is left, or the run is stopped. */
static bl_sim_process *bl_sim_next(bl_sim_world *world)
{
    if (world->stopped)
        return NULL;
    for (;;) {
        bl_sim_process *awake[BL_SIM_PROCESS_COUNT];
        uint32_t count = 0;
        uint64_t wake_ns = UINT64_MAX;
        for (uint32_t i = 0; i < world->process_count; i++) {
            bl_sim_process *process = world->process[i];
            if (process->state != BL_SIM_READY || process->paused)
                continue;
            if (process->wake_ns <= world->now_ns)
                awake[count++] = process;
            else if (process->wake_ns < wake_ns)
                wake_ns = process->wake_ns;
        }
        if (count)
            return awake[bl_sim_below(world, count)];
        if (wake_ns == UINT64_MAX)
            return NULL;
        for (uint32_t i = 0; i < world->process_count; i++)
            while (bl_sim_drains(world, world->process[i]))
                bl_sim_drain(world, world->process[i]);
        bl_sim_device_pass(world);
        world->now_ns = wake_ns;
        if (world->now_ns >= world->beat_ns)
            bl_sim_beats(world);
    }
}

static void bl_sim_switch(bl_sim_world *world)
{
    bl_sim_process *from = world->current, *to = bl_sim_next(world);
    if (from == to)
        return;
    world->current = to;
    world->stat.switches++;
    swapcontext(from ? &from->context : &world->outside, to ? &to->context : &world->outside);
}

static void bl_sim_stop(bl_sim_world *world, int32_t result)
{
    if (!world->stopped)
        world->result = result;
    world->stopped = 1;
    bl_sim_switch(world);
}

void bl_sim_fail(bl_sim_world *world, int32_t error, const char *report)
{
    if (!world->stopped)
        snprintf(world->stat.report, sizeof world->stat.report, "%s", report);
    bl_sim_stop(world, error);
}

/* A process's first breath and last. The world comes in halves: makecontext knows only ints. */
static void bl_sim_main(uint32_t high, uint32_t low)
{
    bl_sim_world *world = (bl_sim_world *)((uintptr_t)high << 32 | low);
    bl_sim_process *process = world->current;
    int result = process->body(&process->pool, process->argument);
    bl_sim_catch_up(world);
    process->state = BL_SIM_EXITED;
    if (result < 0)
        bl_sim_stop(world, result);
    bl_sim_switch(world);
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
    process->number = world->process_count;
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

int bl_sim_world_run(bl_sim_world *world)
{
    bl_sim_raw_watch(world);
    bl_heap_open = 1;
    bl_sim_switch(world);
    bl_heap_open = 0;
    bl_sim_raw_ignore(world);
    return world->result;
}

/* How long the scheduler forgets a process: mostly short, now and then as long as a takeover. */
static uint64_t bl_sim_stall(bl_sim_world *world)
{
    uint64_t bits = BL_SIM_STALL_BITS_MIN + bl_sim_below(world, BL_SIM_STALL_BITS);
    return bl_sim_below(world, 1ull << bits);
}

/* Has a process that is sometimes late just looked who is server? What it saw is old news when it
 * goes on: the moment that takeovers are about. */
static int bl_sim_late(const bl_sim_process *process, uint32_t line, uint64_t random)
{
    enum { EPOCH_LINES = BL_HALF_COUNT * BL_SERVER_STRIDE / BL_LINE_SIZE };
    return process->late_ns && process->line < EPOCH_LINES && line >= EPOCH_LINES &&
           (random >> 40) % 4 == 0;
}

void bl_sim_step(bl_sim_world *world, uint32_t line)
{
    bl_sim_process *process = world->current;
    uint64_t random = bl_sim_random(world);
    int late = bl_sim_late(process, line, random);
    world->now_ns += 16 + (random & 31);
    if (++world->stat.steps > world->config.step_limit)
        bl_sim_stop(world, -ETIME);
    if (process->verbs_left && --process->verbs_left == 0) {
        bl_sim_lose(world, process);
        bl_sim_switch(world);
    }
    if (world->now_ns >= world->beat_ns)
        bl_sim_beats(world);
    world->near_line = process->line = line;
    world->recent[world->stat.steps % BL_SIM_RECENT_COUNT] = line;
    if ((random >> 8 & world->chance_mask) == 0)
        bl_sim_happen(world);
    bl_sim_device_happen(world);
    if (!late && (random >> 16 & world->switch_mask) != 0)
        return;
    if (late)
        process->wake_ns = world->now_ns + bl_sim_below(world, process->late_ns);
    else if ((random >> 32) % 64 == 0)
        process->wake_ns = world->now_ns + bl_sim_stall(world);
    bl_sim_switch(world);
}

void bl_sim_sleep(bl_sim_world *world, uint64_t ns)
{
    bl_sim_catch_up(world);
    world->now_ns += 32;
    if (++world->stat.steps > world->config.step_limit)
        bl_sim_stop(world, -ETIME);
    bl_sim_device_happen(world);
    world->current->wake_ns = world->now_ns + ns;
    bl_sim_switch(world);
}

/* ---- Deaths. */

void bl_sim_lose(bl_sim_world *world, bl_sim_process *process)
{
    uint32_t stored = (uint32_t)bl_sim_below(world, process->store_count + 1);
    process->state = BL_SIM_KILLED;
    if (stored < process->store_count) { /* it died in the middle of this line (A1) */
        process->store[stored].pieces &= (uint8_t)bl_sim_random(world);
        stored += process->store[stored].pieces != 0;
    }
    process->store_count = stored;
    world->stat.deaths++;
    bl_sim_device_lose(world, process);
}

void bl_sim_kill(bl_sim_world *world, uint32_t process)
{
    if (world->process[process]->state == BL_SIM_READY)
        bl_sim_lose(world, world->process[process]);
    if (world->current == world->process[process])
        bl_sim_switch(world);
}

void bl_sim_kill_after(bl_sim_world *world, uint32_t process, uint64_t verbs)
{
    world->process[process]->verbs_left = verbs;
}

uint32_t bl_sim_self(const bl_sim_world *world)
{
    return world->current->number;
}

int bl_sim_alive(const bl_sim_world *world, uint32_t process)
{
    return world->process[process]->state == BL_SIM_READY;
}
