/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The changes of one site in a run (bl_sim_change), with which scripts/mutants tests whether an
 * oracle detects them. This file defines the changes; verbs.c applies them.
 */
#include "sim/native/world.h"

#include <errno.h>
#include <stdlib.h>

extern bl_site __start_bl_sites[] __attribute__((visibility("hidden")));
extern bl_site __stop_bl_sites[] __attribute__((visibility("hidden")));

uint32_t bl_sim_site_count(void) { return (uint32_t)(__stop_bl_sites - __start_bl_sites); }

uint32_t bl_sim_site_number(const bl_site *site)
{
    return (uint32_t)(site - __start_bl_sites) + 1;
}

int bl_sim_site_get(uint32_t number, bl_sim_site *out)
{
    if (number == 0 || number > bl_sim_site_count())
        return -EINVAL;
    const bl_site *site = &__start_bl_sites[number - 1];
    *out = (bl_sim_site){site->file, site->function, site->verb,
                         site->line, site->order, number};
    return 0;
}

/* ---- Changes. */

int bl_sim_changed(const bl_sim_world *world, const bl_site *site, enum bl_sim_change change)
{
    return bl_sim_site_number(site) == world->config.skip_site && world->config.change == change;
}

void bl_sim_matters(bl_sim_world *world, const bl_site *site, enum bl_sim_change change)
{
    if (world->config.matters)
        world->config.matters[bl_sim_site_number(site) * BL_SIM_CHANGE_COUNT + change]++;
}

/* ---- The other half of a structure with two halves. */

/* Return the corresponding offset in the other of two halves of half_size bytes, the first of which
 * begins at start. */
static uint64_t bl_sim_flip(uint64_t offset, uint64_t start, uint64_t half_size)
{
    if (offset - start >= 2 * half_size) /* or below start */
        return offset;
    return offset - start < half_size ? offset + half_size : offset - half_size;
}

static uint64_t bl_sim_flip_any(const bl_geometry *g, uint64_t offset)
{
    uint64_t replies = (uint64_t)g->slot_count * BL_POLL_STRIDE;
    if (offset < BL_HALF_COUNT * BL_SERVER_STRIDE)
        return bl_sim_flip(offset, bl_epoch_offset(0), BL_SERVER_STRIDE);
    if (offset - BL_LOBBY_OFFSET < BL_LOBBY_END - BL_LOBBY_OFFSET) {
        uint32_t host = (uint32_t)((offset - BL_LOBBY_OFFSET) / BL_LOBBY_STRIDE);
        return bl_sim_flip(offset, bl_lobby_reply_offset(host, 0), BL_POLL_STRIDE);
    }
    if (offset - g->lane_offset < g->lane_count * g->lane_stride) {
        uint32_t lane = (uint32_t)((offset - g->lane_offset) / g->lane_stride);
        uint64_t other = bl_sim_flip(offset, bl_reply_offset(g, lane, 0, 0), replies);
        return other != offset
                   ? other
                   : bl_sim_flip(offset, bl_bulk_out_offset(g, lane, 0), g->bulk_size);
    }
    uint64_t other = bl_sim_flip(offset, g->session_offset, g->lane_count * BL_LINE_SIZE);
    if (other == offset)
        other = bl_sim_flip(offset, g->table_offset, g->block_count_max * BL_LINE_SIZE);
    if (other == offset)
        other = bl_sim_flip(offset, g->name_offset, g->block_count_max * BL_LINE_SIZE);
    if (other == offset)
        other = bl_sim_flip(offset, g->extent_offset, g->stripe_count * BL_LINE_SIZE);
    return other;
}

uint64_t bl_sim_other_half(const bl_geometry *g, uint64_t offset, uint64_t size)
{
    uint64_t other = bl_sim_flip_any(g, offset);
    int whole = size > 0 && bl_sim_flip_any(g, offset + size - 1) == other + size - 1;
    return whole ? other : offset;
}

/* ---- The order of neighbors. */

static int bl_sim_overlap(const bl_sim_verb *a, const bl_sim_verb *b)
{
    uint64_t line = BL_LINE_SIZE;
    return a->offset / line <= (b->offset + b->size - 1) / line &&
           b->offset / line <= (a->offset + a->size - 1) / line;
}

static int bl_sim_is_fence(const bl_sim_verb *verb)
{
    return verb->kind == BL_SIM_FENCE_STORE || verb->kind == BL_SIM_FENCE_FULL;
}

int bl_sim_is_load(const bl_sim_verb *verb)
{
    return verb->kind == BL_SIM_LOAD || verb->kind == BL_SIM_LOAD_LINE ||
           verb->kind == BL_SIM_PREFETCH;
}

/* On a device of hardware coherence, a single line is written by plain stores; bulk data always
 * bypasses the cache. */
int bl_sim_plain(const bl_memory *memory, const bl_sim_verb *verb)
{
    return verb->size == BL_LINE_SIZE && bl_sim_coherent(memory, verb->offset);
}

int bl_sim_ordered_pair(const bl_memory *memory, const bl_sim_verb *first,
                        const bl_sim_verb *second)
{
    switch (first->kind) {
    case BL_SIM_STREAM:
        if (bl_sim_is_fence(second))
            return 1;
        if (second->kind == BL_SIM_STREAM && bl_sim_plain(memory, first) &&
            bl_sim_plain(memory, second))
            return 1;
        return bl_sim_overlap(first, second);
    case BL_SIM_INVALIDATE:
        if (bl_sim_coherent(memory, first->offset) || second->kind == BL_SIM_INVALIDATE ||
            second->kind == BL_SIM_FENCE_STORE)
            return 0;
        return second->kind == BL_SIM_FENCE_FULL || bl_sim_overlap(first, second);
    case BL_SIM_FENCE_STORE:
        return second->kind == BL_SIM_STREAM;
    case BL_SIM_FENCE_FULL:
        return !bl_sim_is_fence(second);
    default:
        return 0;
    }
}

int bl_sim_defer(bl_sim_process *process, const bl_sim_verb *verb)
{
    void *bytes = NULL;
    if (verb->kind == BL_SIM_STREAM) {
        bytes = malloc(verb->size);
        if (bytes == NULL)
            return -ENOMEM;
        memcpy(bytes, verb->source, verb->size);
    }
    process->deferred = *verb;
    process->deferred.source = bytes;
    return 0;
}
