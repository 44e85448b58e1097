/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The verbs as the simulator does them: a turn may end before each line touched, then the line is
 * touched (sim_cache.c). A skipped site still takes its turns, so that a seed's run is the same up
 * to the first thing that was left out.
 */
#include "sim_world.h"

#include <errno.h>

extern bl_site __start_bl_sites[] __attribute__((visibility("hidden")));
extern bl_site __stop_bl_sites[] __attribute__((visibility("hidden")));

uint32_t bl_sim_site_count(void) { return (uint32_t)(__stop_bl_sites - __start_bl_sites); }

static uint32_t bl_sim_site_number(const bl_site *site)
{
    return (uint32_t)(site - __start_bl_sites) + 1;
}

int bl_sim_site_get(uint32_t number, bl_sim_site *out)
{
    if (number == 0 || number > bl_sim_site_count())
        return -EINVAL;
    const bl_site *site = &__start_bl_sites[number - 1];
    *out = (bl_sim_site){site->file, site->function, site->verb, site->line, number};
    return 0;
}

/* The site is about to do something: 1 if it must not. */
static int bl_sim_skipped(const bl_memory *memory, const bl_site *site)
{
    uint32_t number = bl_sim_site_number(site);
    memory->world->hits[number]++;
    memory->world->last_site = site;
    return number == memory->world->config.skip_site;
}

/* The economy: a fence that nothing came before, the invalidation of a line that this host does not
 * have, or has as it is in memory. No failure: who looks for news cannot know there is none. */
static void bl_sim_idle(const bl_memory *memory, const bl_site *site, int idle)
{
    if (idle && memory->world->config.idle)
        memory->world->config.idle[bl_sim_site_number(site)]++;
}

static int bl_sim_current(const bl_memory *memory, uint64_t offset)
{
    bl_sim_world *world = memory->world;
    uint32_t line = (uint32_t)(offset / BL_LINE_SIZE);
    const bl_sim_line *cached = bl_sim_cached(&world->host[memory->host], line);
    return !cached ||
           (!cached->dirty &&
            memcmp(cached->data, world->memory + (uint64_t)line * BL_LINE_SIZE, BL_LINE_SIZE) == 0);
}

/* A turn at offset; 1 if the site is skipped. */
static int bl_sim_enter(const bl_memory *memory, uint64_t offset, const bl_site *site)
{
    bl_sim_step(memory->world, (uint32_t)(offset / BL_LINE_SIZE));
    return bl_sim_skipped(memory, site);
}

/* A turn at offset, then its line through the host's cache. Who skips the load finds zeros. */
static const uint8_t *bl_sim_look_at(const bl_memory *memory, uint64_t offset, const bl_site *site)
{
    static const uint8_t nothing[BL_LINE_SIZE];
    bl_sim_world *world = memory->world;
    if (bl_sim_enter(memory, offset, site))
        return nothing;
    uint32_t line = (uint32_t)(offset / BL_LINE_SIZE);
    const uint32_t *versions;
    const uint8_t *data = bl_sim_line_read(world, world->current, line, bl_sim_site_number(site),
                                           &versions);
    bl_sim_note_load(world, world->current, line, versions, site);
    return data;
}

uint64_t bl_sim_load64(const bl_memory *memory, uint64_t offset, const bl_site *site)
{
    uint64_t word;
    memcpy(&word, bl_sim_look_at(memory, offset, site) + offset % BL_LINE_SIZE, sizeof word);
    return word;
}

void bl_sim_prefetch_line(const bl_memory *memory, uint64_t offset, const bl_site *site)
{
    bl_sim_world *world = memory->world;
    const uint32_t *versions;
    if (bl_sim_enter(memory, offset, site))
        return;
    bl_sim_line_read(world, world->current, (uint32_t)(offset / BL_LINE_SIZE),
                     bl_sim_site_number(site), &versions);
}

void bl_sim_prefetch_range(const bl_memory *memory, uint64_t offset, uint64_t size,
                           const bl_site *site)
{
    for (uint64_t at = offset & ~(uint64_t)(BL_LINE_SIZE - 1); at < offset + size;
         at += BL_LINE_SIZE)
        bl_sim_prefetch_line(memory, at, site);
}

/* A line is loaded in pieces (A1): now and then much happens between two of them. */
void bl_sim_load_line(const bl_memory *memory, uint64_t offset, void *line, const bl_site *site)
{
    memcpy(line, bl_sim_look_at(memory, offset, site), BL_LINE_SIZE);
    uint64_t random = bl_sim_random(memory->world);
    if (random % 16 != 0)
        return;
    uint32_t cut = 8 * (1 + (uint32_t)(random >> 32) % 7);
    memcpy((uint8_t *)line + cut, bl_sim_look_at(memory, offset, site) + cut, BL_LINE_SIZE - cut);
}

void bl_sim_stream(const bl_memory *memory, uint64_t offset, const void *source, uint64_t size,
                   const bl_site *site)
{
    bl_sim_world *world = memory->world;
    /* one line on a coherent device is stored plainly; bulk goes round the cache everywhere */
    int plain = size == BL_LINE_SIZE && bl_sim_coherent(memory, offset);
    for (uint64_t at = 0; at < size; at += BL_LINE_SIZE)
        if (!bl_sim_enter(memory, offset + at, site))
            bl_sim_line_stream(world, world->current, (uint32_t)((offset + at) / BL_LINE_SIZE),
                               (const uint8_t *)source + at, plain, site);
}

void bl_sim_fetch(const bl_memory *memory, uint64_t offset, void *target, uint64_t size,
                  const bl_site *site)
{
    uint8_t *next = target;
    while (size > 0) {
        uint64_t start = offset % BL_LINE_SIZE;
        uint64_t piece = BL_LINE_SIZE - start < size ? BL_LINE_SIZE - start : size;
        memcpy(next, bl_sim_look_at(memory, offset, site) + start, piece);
        offset += piece, next += piece, size -= piece;
    }
}

void bl_sim_invalidate(const bl_memory *memory, uint64_t offset, uint64_t size,
                       const bl_site *site)
{
    bl_sim_world *world = memory->world;
    uint64_t end = offset + size;
    for (offset -= offset % BL_LINE_SIZE; offset < end; offset += BL_LINE_SIZE)
        if (!bl_sim_enter(memory, offset, site)) {
            bl_sim_idle(memory, site, world->config.idle && bl_sim_current(memory, offset));
            bl_sim_line_invalidate(world, world->current, (uint32_t)(offset / BL_LINE_SIZE));
        }
}

void bl_sim_fence_store(const bl_memory *memory, const bl_site *site)
{
    bl_sim_step(memory->world, memory->world->near_line);
    if (bl_sim_skipped(memory, site))
        return;
    bl_sim_process *process = memory->world->current;
    bl_sim_idle(memory, site, process->order.known.clock[process->number] == process->order.clock);
    process->fence_number++;
    bl_sim_note_release(process);
}

/* Takes its time: others see what is half out. */
void bl_sim_fence_full(const bl_memory *memory, const bl_site *site)
{
    bl_sim_world *world = memory->world;
    bl_sim_step(world, world->near_line);
    if (bl_sim_skipped(memory, site))
        return;
    const bl_sim_order *order = &world->current->order;
    bl_sim_idle(memory, site, order->touched_at <= world->current->fenced_at &&
                                  order->streamed_at <= world->current->fenced_at);
    while (world->current->store_count) {
        bl_sim_drain(world, world->current);
        if (bl_sim_below(world, 4) == 0)
            bl_sim_step(world, world->near_line);
    }
    bl_sim_fence(world, world->current);
}

int bl_sim_verify(const bl_memory *memory, int condition, const bl_site *site)
{
    return condition || bl_sim_skipped(memory, site);
}

void bl_sim_store_here(const bl_memory *memory, uint64_t offset, const void *source,
                       uint32_t size, const bl_site *site)
{
    bl_sim_world *world = memory->world;
    bl_sim_step(world, (uint32_t)(offset / BL_LINE_SIZE));
    bl_sim_line_dirty(world, world->current, offset, source, size, site);
}

uint64_t bl_sim_now_ns(const bl_memory *memory)
{
    bl_sim_world *world = memory->world;
    bl_sim_step(world, world->near_line);
    return bl_sim_clock(world, memory->host);
}

void bl_sim_pause(const bl_memory *memory) { bl_sim_sleep(memory->world, 0); }

void bl_sim_nap(const bl_memory *memory, uint64_t ns) { bl_sim_sleep(memory->world, ns); }
