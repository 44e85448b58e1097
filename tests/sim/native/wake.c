/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Sleeping servers in the simulator: liveness/wake.h without files. Only in scenarios that set
 * world.wakes do servers sleep. There only a ring ends a sleep, so a lost ring makes a call time
 * out.
 */
#include "liveness/wake.h"

#include <errno.h>

#include "sim/native/world.h"

#define BL_SIM_ASLEEP_NS 100000000000ull /* longer than any call waits */

int bl_sleeper_open(const bl_memory *memory, const char *directory, uint64_t nonce,
                    bl_sleeper **out)
{
    (void)directory;
    bl_sim_world *world = memory->world;
    *out = NULL;
    if (!world->wakes)
        return 0;
    if (world->sleeper_count == BL_SIM_SLEEPER_COUNT)
        return -ENFILE;
    bl_sleeper *sleeper = &world->sleeper[world->sleeper_count++];
    *sleeper = (bl_sleeper){.nonce = nonce, .host = memory->host, .process = world->current};
    *out = sleeper;
    return 0;
}

void bl_sleeper_close(bl_sleeper *sleeper) { (void)sleeper; }

int bl_sleeper_announced(const bl_sleeper *sleeper) { return (sleeper->word | sleeper->held) != 0; }

void bl_sleeper_rise(bl_sleeper *sleeper) { sleeper->word = sleeper->held = 0; }

/* The store of the word may stay in the store buffer until the server's next full fence. */
void bl_sim_announce(const bl_memory *memory, bl_sleeper *sleeper, const bl_site *site)
{
    if (bl_sim_left(memory, site))
        return;
    sleeper->held = bl_sim_below(memory->world, 2) != 0;
    sleeper->word = !sleeper->held;
}

int bl_sleeper_wait(const bl_memory *memory, bl_sleeper *sleeper, int also, uint64_t ns)
{
    (void)also, (void)ns;
    sleeper->word |= sleeper->held; /* a system call empties the store buffer */
    sleeper->held = 0;
    sleeper->sleeps = 1;
    if (!sleeper->rung)
        bl_sim_sleep(memory->world, BL_SIM_ASLEEP_NS);
    sleeper->sleeps = 0;
    int woken = (int)sleeper->rung;
    sleeper->rung = 0;
    return woken;
}

static void bl_sim_awaken(const bl_sim_world *world, bl_sleeper *sleeper)
{
    sleeper->rung = 1;
    if (sleeper->sleeps)
        sleeper->process->wake_ns = world->now_ns;
}

void bl_sleeper_wake(const bl_sleeper *sleeper)
{
    bl_sim_world *world = sleeper->process->pool.memory.world;
    if (sleeper->word)
        bl_sim_awaken(world, &world->sleeper[sleeper - world->sleeper]);
}

void bl_waker_open(const bl_memory *memory, const char *directory, uint64_t nonce,
                   bl_waker *waker)
{
    (void)directory;
    const bl_sim_world *world = memory->world;
    bl_waker_close(waker);
    for (uint32_t i = 0; i < world->sleeper_count; i++)
        if (world->sleeper[i].nonce == nonce && world->sleeper[i].host == memory->host)
            *waker = (bl_waker){&world->sleeper[i].word, nonce};
}

uint64_t bl_sim_quiet_ns(const bl_memory *memory)
{
    uint64_t quiet_ns = memory->world->quiet_ns;
    return quiet_ns ? quiet_ns : UINT64_MAX;
}

void bl_waker_close(bl_waker *waker) { waker->word = NULL; }

void bl_sim_wake(const bl_memory *memory, const bl_waker *waker, const bl_site *site)
{
    bl_sim_world *world = memory->world;
    if (bl_sim_left(memory, site))
        return;
    for (uint32_t i = 0; i < world->sleeper_count; i++)
        if (&world->sleeper[i].word == waker->word)
            bl_sim_awaken(world, &world->sleeper[i]);
}
