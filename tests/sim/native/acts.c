/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The actions of a scenario on hosts and processes, in addition to random events (cache.c):
 * pause and resume them, kill them, crash and reboot a host, or move its clock.
 *
 *   paused    does not run and keeps its locks; what it streamed arrives
 *   killed    never runs again; its host's cache stays, and may write lines back later
 *   crashed   all processes of the host and its cache are lost; of what it streamed, each piece has
 *             arrived or is lost; its runtime directory is empty; its next boot has another boot id
 */
#include "sim/native/world.h"

static void bl_sim_pause_all(bl_sim_world *world, uint32_t host, uint32_t paused)
{
    for (uint32_t i = 0; i < world->process_count; i++)
        if (world->process[i]->pool.memory.host == host)
            world->process[i]->paused = paused;
    if (paused && world->current && world->current->pool.memory.host == host)
        bl_sim_sleep(world, 0);
}

void bl_sim_pause_host(bl_sim_world *world, uint32_t host) { bl_sim_pause_all(world, host, 1); }

void bl_sim_resume_host(bl_sim_world *world, uint32_t host) { bl_sim_pause_all(world, host, 0); }

void bl_sim_clock_jump(bl_sim_world *world, uint32_t host, uint64_t ns)
{
    world->host[host].clock_ahead_ns += ns;
}

void bl_sim_clock_rate(bl_sim_world *world, uint32_t host, int32_t fast_1024)
{
    bl_sim_host *clock = &world->host[host];
    clock->clock_ahead_ns = bl_sim_clock(world, host) - world->now_ns;
    clock->clock_since_ns = world->now_ns;
    clock->clock_fast_1024 = fast_1024;
}

void bl_sim_crash_host(bl_sim_world *world, uint32_t number)
{
    bl_sim_host *host = &world->host[number];
    bl_sim_snapshot over = {{0}};
    world->stat.host_crashes++;
    for (uint32_t i = 0; i < world->process_count; i++) {
        bl_sim_process *process = world->process[i];
        if (process->pool.memory.host != number)
            continue;
        over.clock[i] = process->order.clock;
        for (uint64_t pieces = bl_sim_below(world, 8 * BL_SIM_STORE_COUNT);
             pieces && process->store_count; pieces--)
            bl_sim_drain(world, process);
        process->store_count = process->invalidation_count = 0;
        world->stat.deaths += process->state == BL_SIM_READY;
        if (process->state == BL_SIM_READY)
            process->state = BL_SIM_KILLED;
    }
    while (host->line_count) {
        if (bl_sim_below(world, 2))
            host->lines[host->line_count - 1].dirty = 0;
        bl_sim_cache_drop(world, host, &host->lines[host->line_count - 1]);
    }
    for (uint32_t i = 0; i < world->liveness_count; i++)
        world->liveness_lock[i].removed |= world->liveness_lock[i].host == number;
    host->boot++;
    host->over = bl_sim_snapshot_new(world, &over);
    if (world->current && world->current->state != BL_SIM_READY)
        bl_sim_sleep(world, 0);
}
