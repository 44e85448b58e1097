/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Ends a run and formats the report of an oracle: see verdict.h.
 */
#include "sim/native/verdict.h"

#include <stdio.h>

void bl_sim_switch_to(bl_sim_world *world, bl_sim_process *to)
{
    bl_sim_process *from = world->current;
    if (from == to)
        return;
    world->current = to;
    world->stat.switches++;
    swapcontext(from ? &from->context : &world->outside, to ? &to->context : &world->outside);
}

void bl_sim_stop(bl_sim_world *world, int32_t result)
{
    if (!world->stopped)
        world->result = result;
    world->stopped = 1;
    bl_sim_switch_to(world, NULL);
}

void bl_sim_fail(bl_sim_world *world, int32_t error, const char *report)
{
    if (!world->stopped)
        snprintf(world->stat.report, sizeof world->stat.report, "%s", report);
    bl_sim_stop(world, error);
}

void bl_sim_accuse(bl_sim_world *world, int32_t error, const char *what,
                   const bl_sim_process *process, const bl_site *reader, const bl_site *writer,
                   const bl_site *mark, uint32_t line)
{
    char report[sizeof world->stat.report];
    int size = snprintf(report, sizeof report, "%s: line 0x%llx, process %u of host %u: ", what,
                        (unsigned long long)line * BL_LINE_SIZE, process->number,
                        process->pool.memory.host);
    if (reader)
        size += snprintf(report + size, sizeof report - (size_t)size, "%s:%u %s",
                         reader->file, reader->line, reader->verb);
    if (mark)
        size += snprintf(report + size, sizeof report - (size_t)size, ", judged at %s:%u",
                         mark->file, mark->line);
    if (writer)
        snprintf(report + size, sizeof report - (size_t)size, ", written at %s:%u %s",
                 writer->file, writer->line, writer->verb);
    bl_sim_fail(world, error, report);
}
