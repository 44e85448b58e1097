/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The coherence oracle: the bytes that a process uses must have been published before it read them,
 * and its host must have invalidated its copy after the process knew of the publication. The oracle
 * judges the rule and not the result: correct bytes that were read against the rules are a failure,
 * too.
 *
 *   unfenced     streamed before the line that publishes it, without a fence in between
 *   unpublished  in memory when it was read, but no line that the reader accepted published it: a
 *                write too many, or a missing second look
 *   stale        the reader's host had not invalidated its copy since the reader knew of the write
 *   late look    the line that confirms a read was not read again after it
 *
 * A load without bl_believe() is not judged: a polling process may read anything.
 */
#include "sim/native/verdict.h"
#include "sim/native/world.h"

#include <stdio.h>

static const bl_sim_version *bl_sim_version_of(const bl_sim_world *world, uint32_t number)
{
    return number ? &world->history.versions[number] : NULL;
}

/* Return the violation in the use of a line that was read, or NULL. */
static const char *bl_sim_unlawful(const bl_sim_world *world, const bl_sim_process *process,
                                   const bl_sim_look *look, const bl_sim_version **writer)
{
    const bl_sim_version *issued = *writer = bl_sim_version_of(world, look->issued);
    if (issued && issued->process != process->number && !bl_sim_knows(process, issued) &&
        issued->clock <= process->order.streamed[issued->process])
        return "unfenced";
    const bl_sim_version *arrived = *writer = bl_sim_version_of(world, look->arrived);
    if (!arrived || arrived->process == process->number)
        return NULL;
    if (!bl_sim_knows(process, arrived))
        return arrived->clock <= process->order.streamed[arrived->process] ? "unfenced"
                                                                           : "unpublished";
    if (world->process[arrived->process]->pool.memory.host == process->pool.memory.host ||
        bl_sim_coherent(&world->pool.memory, (uint64_t)arrived->line * BL_LINE_SIZE))
        return NULL;
    return look->invalidated_at < bl_sim_known_since(process, arrived) ? "stale" : NULL;
}

void bl_sim_believe(const bl_memory *memory, uint64_t offset, const bl_site *mark)
{
    bl_sim_world *world = memory->world;
    bl_sim_process *process = world->current;
    bl_sim_look *look = bl_sim_look_of(world, process, (uint32_t)(offset / BL_LINE_SIZE));
    const bl_sim_version *version = bl_sim_version_of(world, look->seen);
    (void)mark;
    if (!version || version->process == process->number)
        return;
    look->believed = look->seen;
    bl_sim_learn(world, process, version->released, look->loaded_at);
    bl_sim_learn_seen(process, version, look->loaded_at);
    uint32_t *streamed = &process->order.streamed[version->process];
    if (version->clock != (uint32_t)BL_SIM_UNFLUSHED && version->clock > *streamed)
        *streamed = version->clock;
}

void bl_sim_rely(const bl_memory *memory, uint64_t offset, uint64_t size, const bl_site *mark)
{
    bl_sim_world *world = memory->world;
    bl_sim_process *process = world->current;
    for (uint64_t at = offset & ~(uint64_t)(BL_LINE_SIZE - 1); at < offset + size;
         at += BL_LINE_SIZE) {
        uint32_t line = (uint32_t)(at / BL_LINE_SIZE);
        const bl_sim_look *look = bl_sim_look_of(world, process, line);
        const bl_sim_version *writer;
        const char *wrong = look->loaded_at ? bl_sim_unlawful(world, process, look, &writer) : NULL;
        if (wrong)
            bl_sim_accuse(world, -BL_SIM_COHERENCE, wrong, process, look->site, writer->site,
                          mark, line);
    }
}

void bl_sim_confirm(const bl_memory *memory, uint64_t look_offset, uint64_t offset, uint64_t size,
                    const bl_site *mark)
{
    bl_sim_world *world = memory->world;
    bl_sim_process *process = world->current;
    uint32_t look_line = (uint32_t)(look_offset / BL_LINE_SIZE);
    bl_sim_look look = *bl_sim_look_of(world, process, look_line);
    int coherent = bl_sim_coherent(memory, look_offset);
    for (uint64_t at = offset & ~(uint64_t)(BL_LINE_SIZE - 1); at < offset + size;
         at += BL_LINE_SIZE) {
        uint32_t line = (uint32_t)(at / BL_LINE_SIZE);
        const bl_sim_look *read = bl_sim_look_of(world, process, line);
        uint32_t looked_at = coherent ? look.loaded_at : look.invalidated_at;
        if (read->loaded_at && looked_at < read->loaded_at)
            bl_sim_accuse(world, -BL_SIM_COHERENCE, "late look", process, look.site, read->site,
                          mark, line);
    }
    bl_sim_rely(memory, offset, size, mark);
}

void bl_sim_ordered(const bl_memory *memory, uint64_t look_offset, uint64_t written_offset,
                    const bl_site *mark)
{
    bl_sim_world *world = memory->world;
    bl_sim_process *process = world->current;
    uint32_t line = (uint32_t)(look_offset / BL_LINE_SIZE);
    uint32_t written_at = process->order.streamed_at;
    if (written_offset != BL_ALL_WRITES)
        written_at = bl_sim_look_of(world, process, (uint32_t)(written_offset / BL_LINE_SIZE))
                         ->streamed_at;
    const bl_sim_look *look = bl_sim_look_of(world, process, line);
    uint32_t looked_at = bl_sim_coherent(memory, look_offset) ? look->fenced_at
                                                              : look->invalidated_at;
    if (written_at && looked_at < written_at)
        bl_sim_accuse(world, -BL_SIM_COHERENCE, "early look", process, look->site, NULL, mark,
                      line);
}
