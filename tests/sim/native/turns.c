/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Turns, time and death in the simulated world. Processes are coroutines of one thread, so nothing
 * here races, and a run depends on its seed alone.
 */
#include "sim/native/device.h"
#include "sim/native/verdict.h"
#include "sim/native/world.h"

#include <errno.h>

enum {
    BL_SIM_STALL_BITS_MIN = 10, /* a process pauses for less than 2^10 ns */
    BL_SIM_STALL_BITS = 15      /* to less than 2^24 ns: the number of such limits */
};

/* ---- Turns. */

/* Return the process that runs next: one that is awake. If all sleep, time jumps, and all buffers
 * have drained meanwhile. NULL: no process is left, or the run is stopped. */
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
        if (world->now_ns >= world->heartbeat_ns)
            bl_sim_heartbeats(world);
    }
}

void bl_sim_end_turn(bl_sim_world *world) { bl_sim_switch_to(world, bl_sim_next(world)); }

/* Return for how long a process is not scheduled: mostly a short time, sometimes as long as a
 * takeover. */
static uint64_t bl_sim_stall(bl_sim_world *world)
{
    uint64_t bits = BL_SIM_STALL_BITS_MIN + bl_sim_below(world, BL_SIM_STALL_BITS);
    return bl_sim_below(world, 1ull << bits);
}

/* Return 1 if a process that may be delayed has just read an epoch line: its value will be old when
 * the process resumes, which takeovers must handle. */
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
        bl_sim_end_turn(world);
    }
    if (world->now_ns >= world->heartbeat_ns)
        bl_sim_heartbeats(world);
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
    bl_sim_end_turn(world);
}

void bl_sim_rest(bl_sim_world *world, uint64_t ns)
{
    world->now_ns += 32;
    if (++world->stat.steps > world->config.step_limit)
        bl_sim_stop(world, -ETIME);
    bl_sim_device_happen(world);
    world->current->wake_ns = world->now_ns + ns;
    bl_sim_end_turn(world);
}

uint64_t bl_sim_clock(const bl_sim_world *world, uint32_t host)
{
    const bl_sim_host *clock = &world->host[host];
    int64_t passed = (int64_t)(world->now_ns - clock->clock_since_ns);
    return world->now_ns + clock->clock_ahead_ns +
           (uint64_t)(passed / 1024 * clock->clock_fast_1024);
}

/* ---- Deaths. */

static void bl_sim_lose_thread(bl_sim_world *world, bl_sim_process *process)
{
    uint32_t stored = (uint32_t)bl_sim_below(world, process->store_count + 1);
    process->state = BL_SIM_KILLED;
    if (stored < process->store_count) { /* the process dies in the middle of this line (A1) */
        process->store[stored].pieces &= (uint8_t)bl_sim_random(world);
        stored += process->store[stored].pieces != 0;
    }
    process->store_count = stored;
    bl_sim_device_lose(world, process);
}

void bl_sim_lose(bl_sim_world *world, bl_sim_process *process)
{
    world->stat.deaths++;
    for (uint32_t i = 0; i < world->process_count; i++)
        if (world->process[i]->leader == process->leader &&
            world->process[i]->state == BL_SIM_READY)
            bl_sim_lose_thread(world, world->process[i]);
}

void bl_sim_kill(bl_sim_world *world, uint32_t process)
{
    if (world->process[process]->state == BL_SIM_READY)
        bl_sim_lose(world, world->process[process]);
    if (world->current && world->current->state != BL_SIM_READY)
        bl_sim_end_turn(world);
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
