/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The simulated memory, private caches, store buffers and pending invalidations, which determine
 * the bytes that a load returns. turns.c schedules the processes.
 *
 * Invariants: place and lines of a host point at each other; a process's stores are in program
 * order, so the first has the lowest fence number; lines of hardware coherence are never cached.
 */
#include "sim/native/world.h"

uint8_t *bl_sim_memory_line(const bl_sim_world *world, uint32_t line)
{
    return world->memory + (uint64_t)line * BL_LINE_SIZE;
}

/* ---- A host's cache. */

bl_sim_line *bl_sim_cached(bl_sim_host *host, uint32_t line)
{
    uint32_t place = host->place[line];
    return place ? &host->lines[place - 1] : NULL;
}

/* Drop a line. As in a real cache, a dirty line is written back as a whole: bytes without a store
 * overwrite memory with old values. */
void bl_sim_cache_drop(bl_sim_world *world, bl_sim_host *host, bl_sim_line *cached)
{
    if (cached->dirty) {
        bl_sim_owner_returns(world, cached);
        memcpy(bl_sim_memory_line(world, cached->line), cached->data, BL_LINE_SIZE);
        memcpy(bl_sim_track_of(world, cached->line)->piece, cached->piece, sizeof cached->piece);
    }
    host->place[cached->line] = 0;
    bl_sim_line *last = &host->lines[--host->line_count];
    if (cached == last)
        return;
    *cached = *last;
    host->place[cached->line] = (uint32_t)(cached - host->lines) + 1;
}

static void bl_sim_evict(bl_sim_world *world, bl_sim_host *host)
{
    if (host->line_count == 0)
        return;
    bl_sim_cache_drop(world, host, &host->lines[bl_sim_below(world, host->line_count)]);
    world->stat.evictions++;
}

bl_sim_line *bl_sim_cache_fill(bl_sim_world *world, bl_sim_host *host, uint32_t line)
{
    if (host->line_count == BL_SIM_CACHE_LINES)
        bl_sim_evict(world, host);
    bl_sim_line *cached = &host->lines[host->line_count++];
    memcpy(cached->data, bl_sim_memory_line(world, line), BL_LINE_SIZE);
    memcpy(cached->piece, bl_sim_track_of(world, line)->piece, sizeof cached->piece);
    cached->dirty = 0;
    cached->by_device = 0;
    cached->fetched_at = world->stat.steps;
    cached->line = line;
    host->place[line] = host->line_count;
    return cached;
}

static void bl_sim_prefetch(bl_sim_world *world, bl_sim_host *host)
{
    uint64_t random = bl_sim_random(world);
    uint32_t line = world->recent[random % BL_SIM_RECENT_COUNT];
    if (random >> 32 & 1)
        line ^= 1; /* the adjacent-line prefetcher */
    else if (random >> 33 & 1)
        line += 1; /* the streamer */
    uint64_t offset = (uint64_t)line * BL_LINE_SIZE;
    if (offset >= world->pool.memory.size || bl_sim_coherent(&world->pool.memory, offset))
        return;
    if (bl_sim_cached(host, line))
        return;
    bl_sim_cache_fill(world, host, line);
    world->stat.prefetches++;
}

/* ---- A process's store buffer. */

static void bl_sim_writer_note(bl_sim_world *world, const bl_sim_process *process, uint32_t line)
{
    uint8_t *writer = &world->writer[line], host = (uint8_t)(process->pool.memory.host + 1);
    if (*writer == host || *writer == BL_SIM_MANY)
        return;
    if (*writer && (uint64_t)line * BL_LINE_SIZE < world->pool.geometry.data_offset)
        world->stat.shared_lines++;
    *writer = *writer ? BL_SIM_MANY : host;
}

/* Deliver one piece to memory; the copy in the writer's own host is dropped. */
static void bl_sim_piece_arrive(bl_sim_world *world, bl_sim_process *process, uint32_t index,
                                uint32_t piece)
{
    bl_sim_store *store = &process->store[index];
    bl_sim_host *host = &world->host[process->pool.memory.host];
    bl_sim_line *cached = bl_sim_cached(host, store->line);
    if (cached)
        bl_sim_cache_drop(world, host, cached);
    uint8_t *target = bl_sim_memory_line(world, store->line) + piece * 8;
    if (memcmp(target, store->data + piece * 8, 8) != 0) /* unchanged bytes need no publication */
        bl_sim_track_of(world, store->line)->piece[piece] = store->version;
    memcpy(target, store->data + piece * 8, 8);
    bl_sim_writer_note(world, process, store->line);
    world->stat.pieces++;
    store->pieces &= (uint8_t) ~(1u << piece);
    if (store->pieces)
        return;
    process->store_count--;
    memmove(store, store + 1, (process->store_count - index) * sizeof *store);
}

/* Deliver a random piece that may be next: of any store before the first fence; plain stores in
 * order. */
void bl_sim_drain(bl_sim_world *world, bl_sim_process *process)
{
    uint32_t count = 0;
    while (count < process->store_count &&
           process->store[count].fence_number == process->store[0].fence_number)
        count++;
    uint32_t index = (uint32_t)bl_sim_below(world, count), piece;
    if (process->store[index].plain) {
        for (index = 0; !process->store[index].plain; index++)
            ;
        piece = (uint32_t)__builtin_ctz(process->store[index].pieces);
    } else {
        piece = (uint32_t)bl_sim_below(world, 8);
        while (!(process->store[index].pieces >> piece & 1))
            piece = (piece + 1) % 8;
    }
    bl_sim_piece_arrive(world, process, index, piece);
}

int bl_sim_drains(const bl_sim_world *world, const bl_sim_process *process)
{
    const bl_sim_store *first = &process->store[0];
    return process->store_count > 0 &&
           (!world->keeps_unfenced || process->state != BL_SIM_READY || first->plain ||
            first->fence_number != process->fence_number);
}

void bl_sim_drain_all(bl_sim_world *world, bl_sim_process *process)
{
    while (process->store_count)
        bl_sim_drain(world, process);
}

static bl_sim_store *bl_sim_stored(bl_sim_process *process, uint32_t line)
{
    for (uint32_t i = process->store_count; i-- > 0;)
        if (process->store[i].line == line)
            return &process->store[i];
    return NULL;
}

/* Deliver the stores of a line before a load of it: a process reads its own stores. */
void bl_sim_settle(bl_sim_world *world, bl_sim_process *process, uint32_t line)
{
    while (bl_sim_stored(process, line))
        bl_sim_drain(world, process);
}

void bl_sim_line_stream(bl_sim_world *world, bl_sim_process *process, uint32_t line,
                        const void *source, int plain, const bl_site *site)
{
    bl_sim_store *store = bl_sim_stored(process, line);
    if (store && store->plain != plain)
        bl_sim_settle(world, process, line), store = NULL;
    if (!store || plain || store->fence_number != process->fence_number) {
        while (process->store_count == BL_SIM_STORE_COUNT)
            bl_sim_drain(world, process);
        store = &process->store[process->store_count++];
    }
    memcpy(store->data, source, BL_LINE_SIZE);
    store->fence_number = process->fence_number;
    store->line = line;
    store->version = bl_sim_note_write(world, process, line, 0, site);
    store->pieces = 0xff;
    store->plain = (uint8_t)plain;
}

/* Deliver a whole line to memory. */
void bl_sim_line_arrive(bl_sim_world *world, const bl_sim_process *process, uint32_t line,
                        const void *source, uint32_t version)
{
    bl_sim_host *host = &world->host[process->pool.memory.host];
    bl_sim_line *cached = bl_sim_cached(host, line);
    if (cached)
        bl_sim_cache_drop(world, host, cached);
    memcpy(bl_sim_memory_line(world, line), source, BL_LINE_SIZE);
    for (uint32_t i = 0; i < BL_SIM_PIECE_COUNT; i++)
        bl_sim_track_of(world, line)->piece[i] = version;
}

int bl_sim_underway(const bl_sim_world *world, uint64_t offset, uint64_t size)
{
    for (uint32_t i = 0; i < world->process_count; i++)
        for (uint32_t k = 0; k < world->process[i]->store_count; k++)
            if ((uint64_t)world->process[i]->store[k].line * BL_LINE_SIZE - offset < size)
                return 1;
    return 0;
}

/* ---- Loads, invalidations, fences. */

const uint8_t *bl_sim_line_read(bl_sim_world *world, bl_sim_process *process, uint32_t line,
                                uint32_t site_number, const uint32_t **versions)
{
    const uint8_t *memory = bl_sim_memory_line(world, line);
    bl_sim_settle(world, process, line);
    if (bl_sim_coherent(&world->pool.memory, (uint64_t)line * BL_LINE_SIZE)) {
        *versions = bl_sim_track_of(world, line)->piece;
        return memory;
    }
    bl_sim_host *host = &world->host[process->pool.memory.host];
    bl_sim_line *cached = bl_sim_cached(host, line);
    if (!cached)
        cached = bl_sim_cache_fill(world, host, line);
    *versions = cached->piece;
    if (!cached->dirty && memcmp(cached->data, memory, BL_LINE_SIZE) != 0) {
        world->stat.stale_loads++;
        world->stale[site_number]++;
    }
    return cached->data;
}

void bl_sim_line_dirty(bl_sim_world *world, bl_sim_process *process, uint64_t offset,
                       const void *source, uint32_t size, const bl_site *site)
{
    uint32_t line = (uint32_t)(offset / BL_LINE_SIZE), start = (uint32_t)(offset % BL_LINE_SIZE);
    bl_sim_host *host = &world->host[process->pool.memory.host];
    int coherent = bl_sim_coherent(&world->pool.memory, offset);
    bl_sim_settle(world, process, line);
    uint32_t version = bl_sim_note_write(world, process, line, !coherent, site);
    uint32_t first = start / 8, last = (start + size - 1) / 8;
    if (coherent) {
        memcpy(world->memory + offset, source, size);
        for (uint32_t i = first; i <= last; i++)
            bl_sim_track_of(world, line)->piece[i] = version;
        return;
    }
    bl_sim_line *cached = bl_sim_cached(host, line);
    if (!cached)
        cached = bl_sim_cache_fill(world, host, line);
    memcpy(cached->data + start, source, size);
    for (uint32_t i = first; i <= last; i++)
        cached->piece[i] = version;
    cached->dirty |= (size < 64 ? (1ull << size) - 1 : ~0ull) << start;
}

static void bl_sim_invalidation_complete(bl_sim_world *world, bl_sim_process *process,
                                         uint32_t index)
{
    bl_sim_host *host = &world->host[process->pool.memory.host];
    bl_sim_line *cached = bl_sim_cached(host, process->invalidation[index]);
    process->invalidation[index] = process->invalidation[--process->invalidation_count];
    if (cached)
        bl_sim_cache_drop(world, host, cached);
}

/* Invalidate a line. This is not ordered after earlier loads: a copy cached since the last full
 * fence may stay, as if the invalidation had come first. An uncached line needs no invalidation. */
void bl_sim_line_invalidate(bl_sim_world *world, bl_sim_process *process, uint32_t line)
{
    bl_sim_line *cached = bl_sim_cached(&world->host[process->pool.memory.host], line);
    bl_sim_note_invalidate(world, process, line);
    if (!cached || bl_sim_coherent(&world->pool.memory, (uint64_t)line * BL_LINE_SIZE))
        return;
    if (cached->dirty && !cached->by_device)
        world->stat.dirty_invalidations++;
    else if (cached->fetched_at > process->fenced_at && bl_sim_random(world) & 1)
        return;
    if (process->invalidation_count == BL_SIM_INVALIDATION_COUNT)
        bl_sim_invalidation_complete(world, process,
                                     (uint32_t)bl_sim_below(world, BL_SIM_INVALIDATION_COUNT));
    process->invalidation[process->invalidation_count++] = line;
}

/* Let other processes see what this one stored into its sleeper's word (wake.c). */
static void bl_sim_words_fence(bl_sim_world *world, const bl_sim_process *process)
{
    for (uint32_t i = 0; i < world->sleeper_count; i++) {
        struct bl_sleeper *sleeper = &world->sleeper[i];
        if (sleeper->process == process && sleeper->held)
            sleeper->word = 1, sleeper->held = 0;
    }
}

void bl_sim_fence(bl_sim_world *world, bl_sim_process *process)
{
    bl_sim_drain_all(world, process);
    while (process->invalidation_count)
        bl_sim_invalidation_complete(world, process, process->invalidation_count - 1);
    process->fenced_at = world->stat.steps;
    bl_sim_words_fence(world, process);
    bl_sim_note_full_fence(process);
}

void bl_sim_happen(bl_sim_world *world)
{
    uint64_t random = bl_sim_random(world);
    bl_sim_process *process = world->process[(random >> 8) % world->process_count];
    bl_sim_host *host = &world->host[process->pool.memory.host];
    switch (random % 4) {
    case 0:
        bl_sim_evict(world, host);
        break;
    case 1:
        bl_sim_prefetch(world, host);
        break;
    case 2:
        for (uint64_t pieces = bl_sim_below(world, 17); pieces && bl_sim_drains(world, process);
             pieces--)
            bl_sim_drain(world, process);
        break;
    default:
        if (process->invalidation_count)
            bl_sim_invalidation_complete(
                world, process, (uint32_t)bl_sim_below(world, process->invalidation_count));
    }
}
