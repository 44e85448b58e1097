/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Beats in the simulator, which real processes have a thread for: see liveness/beat.h.
 */
#include <errno.h>

#include "liveness/beat.h"
#include "pool/message.h"
#include "sim/world.h"

int bl_beat_start(bl_beat *beat, const bl_memory *memory, uint64_t offset, uint64_t nonce)
{
    bl_sim_process *process = memory->world->current;
    *beat = (bl_beat){.memory = memory, .offset = offset, .nonce = nonce};
    bl_beat_once(beat);
    for (uint32_t i = 0; i < BL_SIM_BEAT_COUNT; i++)
        if (!process->beat[i]) {
            process->beat[i] = beat;
            beat->running = 1;
            return 0;
        }
    return -ENOSPC;
}

void bl_beat_stop(bl_beat *beat)
{
    if (!beat->running)
        return;
    bl_sim_process *process = beat->memory->world->current;
    for (uint32_t i = 0; i < BL_SIM_BEAT_COUNT; i++)
        if (process->beat[i] == beat)
            process->beat[i] = NULL;
    beat->running = 0;
}

/* The thread that beats has buffers of its own and nothing else to do: its line is out at once. */
static void bl_sim_beat_tick(bl_sim_world *world, bl_sim_process *process, bl_beat *beat)
{
    uint32_t number = (uint32_t)(beat->offset / BL_LINE_SIZE);
    bl_sim_order *order = &process->order;
    uint32_t written_at = order->streamed_at, clock = order->clock;
    bl_beat_line line = {.count = ++beat->count, .nonce = beat->nonce};
    bl_table_seal(&line, beat->nonce);
    bl_sim_settle(world, process, number);
    uint32_t version = bl_sim_note_write(world, process, number, 0, BL_MARK("beat"));
    world->history.versions[version].clock = order->known.clock[process->number];
    order->streamed_at = written_at; /* no fence of the program has to cover it */
    order->clock = clock;
    bl_sim_line_arrive(world, process, number, &line, version);
}

void bl_sim_beats(bl_sim_world *world)
{
    for (uint32_t i = 0; i < world->process_count; i++) {
        bl_sim_process *process = world->process[i];
        if (process->state != BL_SIM_READY || process->paused || process->faint)
            continue;
        for (uint32_t k = 0; k < BL_SIM_BEAT_COUNT; k++)
            if (process->beat[k])
                bl_sim_beat_tick(world, process, process->beat[k]);
    }
    world->beat_ns = world->now_ns + BL_BEAT_PERIOD_NS;
}
