/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The verbs in the simulator: a turn may end before each line, then the line is accessed
 * (cache.c). A skipped verb still takes its turns, so that a seed's run is the same up to the
 * first skip. One site may be changed in other ways, too (change.c).
 */
#include "sim/native/verdict.h"
#include "sim/native/world.h"

#include <errno.h>
#include <stdlib.h>

enum { BL_SIM_CONDITION_COUNT = 20 * 1000 * 1000 }; /* conditions in one step, at most */

/* Return 1 if the site is skipped in this run. */
static int bl_sim_skipped(const bl_memory *memory, const bl_site *site)
{
    memory->world->hits[bl_sim_site_number(site)]++;
    memory->world->last_site = site;
    bl_sim_matters(memory->world, site, BL_SIM_SKIPPED);
    return bl_sim_changed(memory->world, site, BL_SIM_SKIPPED);
}

/* Count, for the economy report, a fence with nothing to order, or the invalidation of a line that
 * is not cached here, or is equal to memory. This is not a failure: a poll must invalidate to find
 * out that nothing has changed. */
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

/* Return 1 if this line of a verb's range is skipped because it is the first or the last of
 * several. */
static int bl_sim_left_out(const bl_memory *memory, const bl_sim_verb *verb, uint64_t offset)
{
    uint64_t line = BL_LINE_SIZE, end = (verb->offset + verb->size - 1) / line;
    int first = offset / line == verb->offset / line, last = offset / line == end;
    if (first == last)
        return 0;
    enum bl_sim_change change = first ? BL_SIM_FIRST_LINE : BL_SIM_LAST_LINE;
    bl_sim_matters(memory->world, verb->site, change);
    return bl_sim_changed(memory->world, verb->site, change);
}

/* Take a turn at an offset in the verb's range. Returns 1 if nothing is to be done there. */
static int bl_sim_enter(const bl_memory *memory, const bl_sim_verb *verb, uint64_t offset)
{
    bl_sim_step(memory->world, (uint32_t)(offset / BL_LINE_SIZE));
    return bl_sim_skipped(memory, verb->site) | bl_sim_left_out(memory, verb, offset);
}

/* Take a turn at offset, then read its line through the host's cache. A skipped site reads
 * zeros. */
static const uint8_t *bl_sim_look_at(const bl_memory *memory, const bl_sim_verb *verb,
                                     uint64_t offset)
{
    static const uint8_t nothing[BL_LINE_SIZE];
    bl_sim_world *world = memory->world;
    if (bl_sim_enter(memory, verb, offset))
        return nothing;
    uint32_t line = (uint32_t)(offset / BL_LINE_SIZE);
    const uint32_t *versions;
    const uint8_t *data = bl_sim_line_read(world, world->current, line,
                                           bl_sim_site_number(verb->site), &versions);
    bl_sim_note_load(world, world->current, line, versions, verb->site);
    return data;
}

static void bl_sim_do_load(const bl_memory *memory, const bl_sim_verb *verb)
{
    uint8_t *next = verb->target;
    uint64_t offset = verb->offset, size = verb->size;
    while (size > 0) {
        uint64_t start = offset % BL_LINE_SIZE;
        uint64_t piece = BL_LINE_SIZE - start < size ? BL_LINE_SIZE - start : size;
        memcpy(next, bl_sim_look_at(memory, verb, offset) + start, piece);
        offset += piece, next += piece, size -= piece;
    }
}

/* Load a line in pieces (A1), sometimes with many events between two of them. */
static void bl_sim_do_load_line(const bl_memory *memory, const bl_sim_verb *verb)
{
    memcpy(verb->target, bl_sim_look_at(memory, verb, verb->offset), BL_LINE_SIZE);
    uint64_t random = bl_sim_random(memory->world);
    if (random % 16 != 0)
        return;
    uint32_t cut = 8 * (1 + (uint32_t)(random >> 32) % 7);
    memcpy((uint8_t *)verb->target + cut, bl_sim_look_at(memory, verb, verb->offset) + cut,
           BL_LINE_SIZE - cut);
}

static void bl_sim_do_prefetch(const bl_memory *memory, const bl_sim_verb *verb)
{
    bl_sim_world *world = memory->world;
    const uint32_t *versions;
    for (uint64_t at = verb->offset & ~(uint64_t)(BL_LINE_SIZE - 1);
         at < verb->offset + verb->size; at += BL_LINE_SIZE)
        if (!bl_sim_enter(memory, verb, at))
            bl_sim_line_read(world, world->current, (uint32_t)(at / BL_LINE_SIZE),
                             bl_sim_site_number(verb->site), &versions);
}

static void bl_sim_do_stream(const bl_memory *memory, const bl_sim_verb *verb)
{
    bl_sim_world *world = memory->world;
    int plain = bl_sim_plain(memory, verb);
    const uint8_t *source = verb->source;
    uint64_t at = 0;
    for (; at < verb->size; at += BL_LINE_SIZE)
        if (!bl_sim_enter(memory, verb, verb->offset + at))
            bl_sim_line_stream(world, world->current,
                               (uint32_t)((verb->offset + at) / BL_LINE_SIZE), source + at, plain,
                               verb->site);
    if (at == 0 || verb->offset + at >= memory->size)
        return;
    bl_sim_matters(world, verb->site, BL_SIM_LINE_MORE);
    if (bl_sim_changed(world, verb->site, BL_SIM_LINE_MORE))
        bl_sim_line_stream(world, world->current, (uint32_t)((verb->offset + at) / BL_LINE_SIZE),
                           source + at - BL_LINE_SIZE, plain, verb->site);
}

static void bl_sim_do_invalidate(const bl_memory *memory, const bl_sim_verb *verb)
{
    bl_sim_world *world = memory->world;
    uint64_t end = verb->offset + verb->size;
    for (uint64_t at = verb->offset - verb->offset % BL_LINE_SIZE; at < end; at += BL_LINE_SIZE)
        if (!bl_sim_enter(memory, verb, at)) {
            bl_sim_idle(memory, verb->site, world->config.idle && bl_sim_current(memory, at));
            bl_sim_line_invalidate(world, world->current, (uint32_t)(at / BL_LINE_SIZE));
        }
}

static void bl_sim_do_fence_store(const bl_memory *memory, const bl_sim_verb *verb)
{
    bl_sim_step(memory->world, memory->world->near_line);
    if (bl_sim_skipped(memory, verb->site))
        return;
    bl_sim_process *process = memory->world->current;
    bl_sim_idle(memory, verb->site,
                process->order.known.clock[process->number] == process->order.clock);
    process->fence_number++;
    bl_sim_note_release(process);
}

/* A full fence takes several turns, in which others see partial writes. */
static void bl_sim_do_fence_full(const bl_memory *memory, const bl_sim_verb *verb)
{
    bl_sim_world *world = memory->world;
    bl_sim_step(world, world->near_line);
    if (bl_sim_skipped(memory, verb->site))
        return;
    const bl_sim_order *order = &world->current->order;
    bl_sim_idle(memory, verb->site, order->touched_at <= world->current->fenced_at &&
                                        order->streamed_at <= world->current->fenced_at);
    while (world->current->store_count) {
        bl_sim_drain(world, world->current);
        if (bl_sim_below(world, 4) == 0)
            bl_sim_step(world, world->near_line);
    }
    bl_sim_fence(world, world->current);
}

static void bl_sim_do(const bl_memory *memory, const bl_sim_verb *verb)
{
    switch (verb->kind) {
    case BL_SIM_LOAD:
        return bl_sim_do_load(memory, verb);
    case BL_SIM_LOAD_LINE:
        return bl_sim_do_load_line(memory, verb);
    case BL_SIM_PREFETCH:
        return bl_sim_do_prefetch(memory, verb);
    case BL_SIM_STREAM:
        return bl_sim_do_stream(memory, verb);
    case BL_SIM_INVALIDATE:
        return bl_sim_do_invalidate(memory, verb);
    case BL_SIM_FENCE_STORE:
        return bl_sim_do_fence_store(memory, verb);
    case BL_SIM_FENCE_FULL:
        return bl_sim_do_fence_full(memory, verb);
    case BL_SIM_NO_VERB:
        break;
    }
}

void bl_sim_catch_up(bl_sim_world *world)
{
    bl_sim_process *process = world->current;
    bl_sim_verb late = process->deferred;
    process->last_verb.kind = process->deferred.kind = BL_SIM_NO_VERB;
    if (late.kind == BL_SIM_NO_VERB)
        return;
    bl_sim_do(&process->pool.memory, &late);
    free((void *)(uintptr_t)late.source);
}

int bl_sim_left(const bl_memory *memory, const bl_site *site)
{
    bl_sim_catch_up(memory->world);
    bl_sim_step(memory->world, memory->world->near_line);
    return bl_sim_skipped(memory, site);
}

void bl_sim_sleep(bl_sim_world *world, uint64_t ns)
{
    bl_sim_catch_up(world);
    bl_sim_rest(world, ns);
}

/* Run a verb of a process. */
static void bl_sim_verb_run(const bl_memory *memory, bl_sim_verb verb)
{
    bl_sim_world *world = memory->world;
    bl_sim_process *process = world->current;
    uint64_t other = bl_sim_other_half(&world->pool.geometry, verb.offset, verb.size);
    if (other != verb.offset) {
        bl_sim_matters(world, verb.site, BL_SIM_OTHER_HALF);
        if (bl_sim_changed(world, verb.site, BL_SIM_OTHER_HALF))
            verb.offset = other;
    }
    if (bl_sim_ordered_pair(memory, &process->last_verb, &verb))
        bl_sim_matters(world, process->last_verb.site, BL_SIM_DEFERRED);
    bl_sim_verb late = process->deferred;
    process->last_verb = verb;
    if (late.kind == BL_SIM_NO_VERB && !bl_sim_is_load(&verb) &&
        bl_sim_changed(world, verb.site, BL_SIM_DEFERRED) && bl_sim_defer(process, &verb) == 0)
        return;
    bl_sim_do(memory, &verb);
    bl_sim_catch_up(world);
    process->last_verb = verb;
}

uint64_t bl_sim_load64(const bl_memory *memory, uint64_t offset, const bl_site *site)
{
    uint64_t word;
    bl_sim_verb_run(memory, (bl_sim_verb){BL_SIM_LOAD, offset, sizeof word, NULL, &word, site});
    return word;
}

void bl_sim_prefetch_line(const bl_memory *memory, uint64_t offset, const bl_site *site)
{
    bl_sim_verb_run(memory, (bl_sim_verb){BL_SIM_PREFETCH, offset, 1, NULL, NULL, site});
}

void bl_sim_prefetch_range(const bl_memory *memory, uint64_t offset, uint64_t size,
                           const bl_site *site)
{
    bl_sim_verb_run(memory, (bl_sim_verb){BL_SIM_PREFETCH, offset, size, NULL, NULL, site});
}

void bl_sim_load_line(const bl_memory *memory, uint64_t offset, void *line, const bl_site *site)
{
    bl_sim_verb_run(memory,
                    (bl_sim_verb){BL_SIM_LOAD_LINE, offset, BL_LINE_SIZE, NULL, line, site});
}

void bl_sim_stream(const bl_memory *memory, uint64_t offset, const void *source, uint64_t size,
                   const bl_site *site)
{
    bl_sim_verb_run(memory, (bl_sim_verb){BL_SIM_STREAM, offset, size, source, NULL, site});
}

void bl_sim_fetch(const bl_memory *memory, uint64_t offset, void *target, uint64_t size,
                  const bl_site *site)
{
    bl_sim_verb_run(memory, (bl_sim_verb){BL_SIM_LOAD, offset, size, NULL, target, site});
}

void bl_sim_invalidate(const bl_memory *memory, uint64_t offset, uint64_t size,
                       const bl_site *site)
{
    bl_sim_verb_run(memory, (bl_sim_verb){BL_SIM_INVALIDATE, offset, size, NULL, NULL, site});
}

void bl_sim_fence_store(const bl_memory *memory, const bl_site *site)
{
    bl_sim_verb_run(memory, (bl_sim_verb){BL_SIM_FENCE_STORE, 0, 0, NULL, NULL, site});
}

void bl_sim_fence_full(const bl_memory *memory, const bl_site *site)
{
    bl_sim_verb_run(memory, (bl_sim_verb){BL_SIM_FENCE_FULL, 0, 0, NULL, NULL, site});
}

int bl_sim_verify(const bl_memory *memory, int condition, const bl_site *site)
{
    return condition || bl_sim_skipped(memory, site);
}

/* Evaluate a condition, inside or outside of a run. This also ends endless loops without verbs. */
int bl_sim_condition(int condition, const bl_site *site)
{
    bl_sim_world *world = bl_sim_running;
    if (world == NULL || world->current == NULL)
        return condition;
    if (world->condition_step != world->stat.steps)
        world->condition_step = world->stat.steps, world->condition_count = 0;
    if (++world->condition_count > BL_SIM_CONDITION_COUNT)
        bl_sim_fail(world, -ETIME, "no verb");
    bl_sim_matters(world, site, condition ? BL_SIM_FALSE : BL_SIM_TRUE);
    if (bl_sim_changed(world, site, BL_SIM_TRUE))
        return 1;
    return condition && !bl_sim_changed(world, site, BL_SIM_FALSE);
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
