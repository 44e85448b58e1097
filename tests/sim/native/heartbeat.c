/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Heartbeats in the simulator; real processes have a thread for them: see liveness/heartbeat.h.
 */
#include <errno.h>

#include "liveness/heartbeat.h"
#include "pool/message.h"
#include "sim/native/world.h"

/* A thread starts or joins the heartbeat's, which is that of its process. */
static void bl_sim_heartbeat_meet(bl_sim_world *world, bl_sim_process *one, bl_sim_process *other)
{
    bl_sim_learn(world, one, bl_sim_snapshot_take(world, other), (uint32_t)world->stat.steps);
}

int bl_heartbeat_start(bl_heartbeat *heartbeat, const bl_memory *memory, uint64_t offset,
                       uint64_t nonce)
{
    bl_sim_process *process = bl_sim_leader(memory->world, memory->world->current);
    *heartbeat = (bl_heartbeat){.memory = memory, .offset = offset, .nonce = nonce};
    bl_heartbeat_once(heartbeat);
    bl_sim_heartbeat_meet(memory->world, process, memory->world->current);
    for (uint32_t i = 0; i < BL_SIM_HEARTBEAT_COUNT; i++)
        if (!process->heartbeat[i]) {
            process->heartbeat[i] = heartbeat;
            heartbeat->running = 1;
            return 0;
        }
    return -ENOSPC;
}

void bl_heartbeat_stop(bl_heartbeat *heartbeat)
{
    if (!heartbeat->running)
        return;
    bl_sim_world *world = heartbeat->memory->world;
    bl_sim_process *process = bl_sim_leader(world, world->current);
    bl_sim_heartbeat_meet(world, world->current, process);
    for (uint32_t i = 0; i < BL_SIM_HEARTBEAT_COUNT; i++)
        if (process->heartbeat[i] == heartbeat)
            process->heartbeat[i] = NULL;
    heartbeat->running = 0;
}

/* Write one heartbeat. Its thread has its own store buffer and nothing else to do, so the line
 * arrives at once. */
static void bl_sim_heartbeat_tick(bl_sim_world *world, bl_sim_process *process,
                                  bl_heartbeat *heartbeat)
{
    uint32_t number = (uint32_t)(heartbeat->offset / BL_LINE_SIZE);
    bl_sim_order *order = &process->order;
    uint32_t written_at = order->streamed_at, clock = order->clock;
    bl_heartbeat_line line = {.count = ++heartbeat->count, .nonce = heartbeat->nonce};
    bl_table_seal(&line, heartbeat->nonce);
    bl_sim_settle(world, process, number);
    uint32_t version = bl_sim_note_write(world, process, number, 0, BL_MARK("heartbeat"));
    world->history.versions[version].clock = order->known.clock[process->number];
    order->streamed_at = written_at; /* needs no fence of the program */
    order->clock = clock;
    bl_sim_line_arrive(world, process, number, &line, version);
}

void bl_sim_heartbeats(bl_sim_world *world)
{
    for (uint32_t i = 0; i < world->process_count; i++) {
        bl_sim_process *process = world->process[i];
        if (process->state != BL_SIM_READY || process->paused || process->faint)
            continue;
        for (uint32_t k = 0; k < BL_SIM_HEARTBEAT_COUNT; k++)
            if (process->heartbeat[k])
                bl_sim_heartbeat_tick(world, process, process->heartbeat[k]);
    }
    world->heartbeat_ns = world->now_ns + BL_HEARTBEAT_PERIOD_NS;
}
