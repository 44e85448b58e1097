/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The process's side of DMA jobs: starting one, and waiting for its completion.
 */
#include <stdlib.h>

#include "sim/native/device.h"
#include "sim/native/world.h"

static int bl_sim_job_find(const bl_sim_world *world, uint64_t ticket)
{
    for (uint32_t i = 0; i < world->job_count; i++)
        if (world->jobs[i].ticket == ticket)
            return (int)i;
    return -1;
}

uint64_t bl_sim_device_start(const bl_memory *memory, uint64_t offset, const void *source,
                             void *out, uint64_t size, enum bl_sim_target target,
                             const bl_site *site)
{
    bl_sim_world *world = memory->world;
    if (world->jobs == NULL)
        world->jobs = calloc(BL_SIM_JOB_COUNT, sizeof *world->jobs);
    if (world->jobs == NULL || size % BL_LINE_SIZE || size > sizeof world->jobs->data)
        abort(); /* a bug of the scenario */
    while (world->job_count == BL_SIM_JOB_COUNT)
        bl_sim_device_wait(memory, world->jobs[0].ticket);
    bl_sim_step(world, (uint32_t)(offset / BL_LINE_SIZE));
    bl_sim_job *job = &world->jobs[world->job_count++];
    *job = (bl_sim_job){
        .left = ~0ull >> (BL_SIM_JOB_LINES - size / BL_LINE_SIZE),
        .offset = offset,
        .size = size,
        .ticket = ++world->job_ticket,
        .out = out,
        .owner = world->current,
        .site = site,
        .target = target,
    };
    if (source)
        memcpy(job->data, source, size);
    world->current->job_count++;
    return job->ticket;
}

void bl_sim_device_wait(const bl_memory *memory, uint64_t ticket)
{
    bl_sim_world *world = memory->world;
    for (int index; (index = bl_sim_job_find(world, ticket)) >= 0;) {
        if (bl_sim_below(world, 2))
            bl_sim_job_step(world, (uint32_t)index);
        bl_sim_step(world, world->near_line);
    }
}
