/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Litmus programs of the actions on hosts and processes (acts.c), and of the ownership of lines
 * (owner.c): they test that the world behaves as world.h specifies.
 */
#include <errno.h>

#include "liveness/heartbeat.h"
#include "liveness/lock.h"
#include "sim/native/scenarios/litmus.h"
#include "sim/native/scenarios/scenarios.h"
#include "sim/native/world.h"

enum {
    BL_ACTS_LINES = 16,
    BL_ACTS_NAP_NS = 1000 * 1000
};

/* ---- Two writers: a stray store that the ownership oracle must report. */

int bl_litmus_two_writers(bl_sim_world *world)
{
    bl_litmus litmus = bl_litmus_make(world);
    bl_sim_spawn(world, 0, bl_litmus_count, &litmus);
    bl_sim_spawn(world, 1, bl_litmus_stray, &litmus);
    return bl_sim_world_run(world);
}

/* ---- Stale store: the line was handed over by the rules, but its new owner stores into an old
 * cached copy. The write-back of that line restores old bytes. */

static int bl_litmus_hand_over(bl_pool *pool, void *argument)
{
    const bl_litmus *litmus = argument;
    bl_entry line = bl_litmus_line(1, BL_ENTRY_COMMITTED);
    bl_publish_line(&pool->memory, litmus->payload, &line);
    bl_publish_line(&pool->memory, litmus->flag, &line);
    bl_fence_full(&pool->memory);
    return 0;
}

static int bl_litmus_store_into_old(bl_pool *pool, void *argument)
{
    const bl_litmus *litmus = argument;
    const bl_memory *memory = &pool->memory;
    uint64_t word = bl_load64(memory, litmus->payload);
    bl_entry line;
    while (!bl_litmus_look(memory, litmus->flag, &line) || line.generation != 1)
        bl_pause(memory);
    bl_sim_store_cached(memory, litmus->payload + 48, &word, sizeof word);
    bl_refetch(memory, litmus->payload, BL_LINE_SIZE);
    return 0;
}

int bl_litmus_stale_store(bl_sim_world *world)
{
    bl_litmus litmus = bl_litmus_make(world);
    bl_sim_spawn(world, 1, bl_litmus_store_into_old, &litmus);
    bl_sim_spawn(world, 0, bl_litmus_hand_over, &litmus);
    return bl_sim_world_run(world);
}

/* ---- Crash: any part of a host's unfenced writes may be lost; fenced writes are in memory;
 * nothing arrives later. The last boot has then provably ended. */

typedef struct bl_acts {
    bl_litmus litmus;
    uint32_t sure;              /* lines that a full fence covers */
    uint32_t process;
    uint64_t boot_id[2];
} bl_acts;

static int bl_acts_write(bl_pool *pool, void *argument)
{
    bl_acts *acts = argument;
    const bl_memory *memory = &pool->memory;
    bl_boot_id(memory, acts->boot_id);
    bl_liveness_hold(memory, "", 1);
    for (uint32_t i = 0; i < BL_ACTS_LINES; i++) {
        bl_entry line = bl_litmus_line(i + 1, BL_ENTRY_COMMITTED);
        bl_stream_line(memory, acts->litmus.flag + i * BL_LINE_SIZE, &line);
        if (bl_sim_below(acts->litmus.world, 2))
            continue;
        bl_fence_full(memory);
        acts->sure = i + 1;
    }
    for (uint64_t word = 1; !acts->litmus.finished; word++)
        bl_sim_store_cached(memory, acts->litmus.payload, &word, sizeof word);
    return -EBADMSG; /* the loop must not end by itself */
}

/* Run after the crash, on the same host: the lines may be written again. */
static int bl_acts_boot(bl_pool *pool, void *argument)
{
    bl_acts *acts = argument;
    const bl_memory *memory = &pool->memory;
    uint64_t boot_id[2], words[2][BL_ACTS_LINES];
    bl_boot_id(memory, boot_id);
    if (boot_id[0] == acts->boot_id[0] && boot_id[1] == acts->boot_id[1])
        return -EBADMSG;
    if (bl_liveness_watch(memory, "", 1) >= 0)
        return -EBADMSG;
    for (uint32_t look = 0; look < 2; look++, bl_nap(memory, BL_ACTS_NAP_NS))
        for (uint32_t i = 0; i < BL_ACTS_LINES; i++) {
            bl_refetch(memory, acts->litmus.flag + i * BL_LINE_SIZE, BL_LINE_SIZE);
            words[look][i] = bl_load64(memory, acts->litmus.flag + i * BL_LINE_SIZE);
            if (words[look][i] != i + 1 && (words[look][i] != 0 || i < acts->sure))
                return -EBADMSG;
            acts->litmus.world->stat.results += words[look][i] == 0;
        }
    if (memcmp(words[0], words[1], sizeof words[0]) != 0)
        return -EBADMSG; /* a write arrived later */
    bl_entry line = bl_litmus_line(99, BL_ENTRY_COMMITTED);
    bl_publish_line(memory, acts->litmus.flag, &line);
    return 0;
}

static int bl_acts_crash(bl_pool *pool, void *argument)
{
    bl_acts *acts = argument;
    bl_sim_world *world = acts->litmus.world;
    for (uint64_t wait = bl_sim_below(world, 200); wait > 0; wait--)
        bl_pause(&pool->memory);
    while (acts->boot_id[0] == 0) /* wait for its start */
        bl_pause(&pool->memory);
    bl_sim_crash_host(world, 0);
    if (bl_sim_alive(world, acts->process))
        return -EBADMSG;
    bl_sim_spawn(world, 0, bl_acts_boot, acts);
    return 0;
}

int bl_litmus_crash(bl_sim_world *world)
{
    bl_acts acts = {.litmus = bl_litmus_make(world)};
    acts.process = (uint32_t)bl_sim_spawn(world, 0, bl_acts_write, &acts);
    bl_sim_spawn(world, 1, bl_acts_crash, &acts);
    return bl_sim_world_run(world);
}

/* ---- Pause: a process's heartbeat advances while it runs, stops while it is paused, and advances
 * again. Clocks jump and drift apart. */

static int bl_acts_live(bl_pool *pool, void *argument)
{
    bl_acts *acts = argument;
    bl_heartbeat heartbeat;
    bl_heartbeat_start(&heartbeat, &pool->memory, acts->litmus.flag, 7);
    while (!acts->litmus.finished)
        bl_nap(&pool->memory, 100 * BL_ACTS_NAP_NS);
    bl_heartbeat_stop(&heartbeat);
    return 0;
}

static uint64_t bl_acts_heartbeat(const bl_memory *memory, const bl_acts *acts)
{
    bl_refetch(memory, acts->litmus.flag, BL_LINE_SIZE);
    return bl_heartbeat_read(memory, acts->litmus.flag, 7);
}

/* Return 1 if the heartbeat advances within a second. */
static int bl_acts_heartbeats(const bl_memory *memory, const bl_acts *acts)
{
    uint64_t count = bl_acts_heartbeat(memory, acts);
    bl_nap(memory, 1000ull * BL_ACTS_NAP_NS);
    return bl_acts_heartbeat(memory, acts) > count;
}

static int bl_acts_stop_and_go(bl_pool *pool, void *argument)
{
    bl_acts *acts = argument;
    bl_sim_world *world = acts->litmus.world;
    const bl_memory *memory = &pool->memory;
    bl_nap(memory, BL_ACTS_NAP_NS);
    int before = bl_acts_heartbeats(memory, acts);
    bl_sim_pause_host(world, 0);
    bl_nap(memory, BL_ACTS_NAP_NS); /* the streamed lines reach memory */
    int paused = bl_acts_heartbeats(memory, acts);
    bl_sim_resume_host(world, 0);
    int after = bl_acts_heartbeats(memory, acts);
    uint64_t clock = bl_now_ns(memory);
    bl_sim_clock_jump(world, 1, 1000ull * BL_ACTS_NAP_NS);
    int jumped = bl_now_ns(memory) - clock >= 1000ull * BL_ACTS_NAP_NS;
    bl_sim_clock_rate(world, 1, 512); /* half as fast again */
    clock = bl_now_ns(memory);
    bl_nap(memory, 1000ull * BL_ACTS_NAP_NS);
    int faster = bl_now_ns(memory) - clock >= 1499ull * BL_ACTS_NAP_NS;
    acts->litmus.finished = 1;
    return before && !paused && after && jumped && faster ? 0 : -EBADMSG;
}

int bl_litmus_pause(bl_sim_world *world)
{
    bl_acts acts = {.litmus = bl_litmus_make(world)};
    bl_sim_spawn(world, 0, bl_acts_live, &acts);
    bl_sim_spawn(world, 1, bl_acts_stop_and_go, &acts);
    return bl_sim_world_run(world);
}
