/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The ownership oracle (D4): a line has one writer at a time. A process that writes a line must
 * know that the last writer's last write is complete: from a line that it accepted, a lock, a proof
 * of death, or a new boot of the writer's host. And a dirty line that is written back must not
 * overwrite newer bytes in memory.
 *
 * All processes of a host may write its doorbell at any time: they write whole lines past the cache
 * or through one cache, and the server reads one word of it (rpc/doorbell.h).
 *
 * As for reads, the oracle judges the rule and not the harm. A scenario that breaks it on purpose
 * sets the world's lawless.
 */
#include "sim/native/verdict.h"
#include "sim/native/world.h"

#include <stdio.h>

static int bl_sim_is_doorbell(uint32_t line, uint32_t host)
{
    return line == bl_doorbell_offset(host) / BL_LINE_SIZE;
}

static void bl_sim_owner_writes(bl_sim_world *world, bl_sim_process *process, uint32_t line,
                                const bl_site *site)
{
    const bl_sim_track *track = bl_sim_track_of(world, line);
    if (track->issued == 0 || world->lawless)
        return;
    const bl_sim_version *last = &world->history.versions[track->issued];
    if (last->process == process->number || bl_sim_knows(process, last) ||
        bl_sim_look_of(world, process, line)->believed == track->issued)
        return;
    static const char *const states[] = {"alive", "at its end", "killed"};
    const bl_sim_process *other = world->process[last->process];
    if (other->pool.memory.host == process->pool.memory.host &&
        bl_sim_is_doorbell(line, process->pool.memory.host))
        return;
    char what[80];
    snprintf(what, sizeof what, "two writers, the other is process %u of host %u, %s",
             other->number, other->pool.memory.host, states[other->state]);
    bl_sim_accuse(world, -BL_SIM_OWNERSHIP, what, process, site, last->site, NULL, line);
}

uint32_t bl_sim_note_write(bl_sim_world *world, bl_sim_process *process, uint32_t line, int dirty,
                           const bl_site *site)
{
    bl_sim_owner_writes(world, process, line, site);
    return bl_sim_version_add(world, process, line, dirty, site);
}

void bl_sim_owner_returns(bl_sim_world *world, const bl_sim_line *cached)
{
    const bl_sim_track *track = bl_sim_track_of(world, cached->line);
    uint32_t newest = 0; /* the dirty version in the cache: its writer is reported */
    for (uint32_t i = 0; i < BL_SIM_PIECE_COUNT; i++)
        if (cached->dirty >> (8 * i) & 0xff && cached->piece[i] > newest)
            newest = cached->piece[i];
    for (uint32_t i = 0; i < BL_SIM_PIECE_COUNT && !world->lawless; i++) {
        if (track->piece[i] <= cached->piece[i])
            continue;
        const bl_sim_version *dirty = &world->history.versions[newest];
        const bl_sim_version *lost = &world->history.versions[track->piece[i]];
        bl_sim_accuse(world, -BL_SIM_OWNERSHIP, "newer bytes overwritten by a dirty line",
                      world->process[dirty->process], dirty->site, lost->site, NULL, cached->line);
        return;
    }
}
