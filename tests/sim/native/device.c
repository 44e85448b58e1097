/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Simulates DMA, line by line: see device.h. Nothing here takes a turn.
 */
#include "sim/native/device.h"

static void bl_sim_job_end(bl_sim_world *world, uint32_t index)
{
    bl_sim_job *job = &world->jobs[index];
    if (job->out && job->left == 0 && job->owner->state == BL_SIM_READY)
        memcpy(job->out, job->data, job->size);
    job->owner->job_count--;
    *job = world->jobs[--world->job_count];
}

/* Write a line to memory, and drop the copy in the host's cache: the whole line is overwritten. */
static void bl_sim_job_to_memory(bl_sim_world *world, const bl_sim_job *job, uint32_t line,
                                 const uint8_t *data, uint32_t version)
{
    bl_sim_host *host = &world->host[job->owner->pool.memory.host];
    bl_sim_line *cached = bl_sim_cached(host, line);
    if (cached) {
        cached->dirty = 0;
        bl_sim_cache_drop(world, host, cached);
    }
    memcpy(bl_sim_memory_line(world, line), data, BL_LINE_SIZE);
    for (uint32_t i = 0; i < BL_SIM_PIECE_COUNT; i++)
        bl_sim_track_of(world, line)->piece[i] = version;
}

static void bl_sim_job_to_cache(bl_sim_world *world, const bl_sim_job *job, uint32_t line,
                                const uint8_t *data, uint32_t version)
{
    bl_sim_host *host = &world->host[job->owner->pool.memory.host];
    bl_sim_line *cached = bl_sim_cached(host, line);
    if (!cached)
        cached = bl_sim_cache_fill(world, host, line);
    memcpy(cached->data, data, BL_LINE_SIZE);
    for (uint32_t i = 0; i < BL_SIM_PIECE_COUNT; i++)
        cached->piece[i] = version;
    cached->dirty = ~0ull;
    cached->by_device = 1;
    cached->fetched_at = world->stat.steps;
}

static void bl_sim_job_write(bl_sim_world *world, const bl_sim_job *job, uint32_t line,
                             const uint8_t *data)
{
    int coherent = bl_sim_coherent(&world->pool.memory, (uint64_t)line * BL_LINE_SIZE);
    int to_memory = coherent || job->target == BL_SIM_TARGET_MEMORY;
    uint32_t version = bl_sim_note_write(world, job->owner, line, !to_memory, job->site);
    if (to_memory ||
        (job->target == BL_SIM_TARGET_ANY && bl_sim_random(world) >> 63))
        bl_sim_job_to_memory(world, job, line, data, version);
    else
        bl_sim_job_to_cache(world, job, line, data, version);
}

static void bl_sim_job_read(bl_sim_world *world, const bl_sim_job *job, uint32_t line,
                            uint8_t *data)
{
    const bl_sim_line *cached = bl_sim_cached(&world->host[job->owner->pool.memory.host], line);
    const uint8_t *memory = bl_sim_memory_line(world, line);
    if (cached && !cached->dirty && memcmp(cached->data, memory, BL_LINE_SIZE) != 0)
        world->stat.stale_loads++;
    bl_sim_note_load(world, job->owner, line,
                     cached ? cached->piece : bl_sim_track_of(world, line)->piece, job->site);
    memcpy(data, cached ? cached->data : memory, BL_LINE_SIZE);
}

void bl_sim_job_step(bl_sim_world *world, uint32_t index)
{
    bl_sim_job *job = &world->jobs[index];
    if (world->now_ns < job->wake_ns)
        return;
    uint32_t place = (uint32_t)bl_sim_below(world, job->size / BL_LINE_SIZE);
    while (!(job->left >> place & 1))
        place = (place + 1) % BL_SIM_JOB_LINES;
    uint32_t line = (uint32_t)(job->offset / BL_LINE_SIZE) + place;
    uint8_t *data = job->data + place * BL_LINE_SIZE;
    if (job->out)
        bl_sim_job_read(world, job, line, data);
    else
        bl_sim_job_write(world, job, line, data);
    world->stat.device_lines++;
    job->left &= ~(1ull << place);
    if (job->left == 0)
        bl_sim_job_end(world, index);
}

void bl_sim_device_happen(bl_sim_world *world)
{
    if (world->job_count && bl_sim_below(world, 12) == 0)
        bl_sim_job_step(world, (uint32_t)bl_sim_below(world, world->job_count));
}

void bl_sim_device_pass(bl_sim_world *world)
{
    for (uint32_t i = world->job_count; i-- > 0;)
        bl_sim_job_step(world, i);
}

void bl_sim_device_lose(bl_sim_world *world, const bl_sim_process *process)
{
    for (uint32_t i = world->job_count; i-- > 0;) {
        if (world->jobs[i].owner != process)
            continue;
        uint64_t fate = bl_sim_below(world, 4);
        if (fate == 0)
            bl_sim_job_end(world, i);
        else if (fate == 1)
            world->jobs[i].wake_ns = world->now_ns + bl_sim_below(world, BL_SIM_JOB_LATE_NS);
    }
}
