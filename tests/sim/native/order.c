/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Records versions, clocks and the knowledge of processes (history.h), for coherence.c and
 * owner.c.
 */
#include "sim/native/world.h"

#include <errno.h>
#include <stdlib.h>

/* Make room for one more element in an array whose first element is unused. Without memory the
 * world aborts, because its run would no longer be determined by its seed. */
static void *bl_sim_grow(void *array, uint32_t *count, uint32_t *room, size_t size)
{
    if (*count == *room) {
        uint32_t more = *room ? 2 * *room : 1024;
        array = realloc(array, more * size);
        if (array == NULL)
            abort();
        memset((uint8_t *)array + *room * size, 0, (more - *room) * size);
        *count += *room == 0;
        *room = more;
    }
    ++*count;
    return array;
}

int bl_sim_history_create(bl_sim_history *history, uint64_t line_count)
{
    history->track_of = calloc(line_count, sizeof *history->track_of);
    return history->track_of ? 0 : -ENOMEM;
}

void bl_sim_history_destroy(bl_sim_history *history)
{
    free(history->versions);
    free(history->snapshots);
    free(history->tracks);
    free(history->track_of);
}

static uint32_t bl_sim_track_number(bl_sim_world *world, uint32_t line)
{
    bl_sim_history *history = &world->history;
    if (history->track_of[line] == 0) {
        history->tracks = bl_sim_grow(history->tracks, &history->track_count,
                                      &history->track_room, sizeof *history->tracks);
        history->track_of[line] = history->track_count - 1;
    }
    return history->track_of[line];
}

bl_sim_track *bl_sim_track_of(bl_sim_world *world, uint32_t line)
{
    uint32_t number = bl_sim_track_number(world, line); /* first, because it may move the array */
    return &world->history.tracks[number];
}

bl_sim_look *bl_sim_look_of(bl_sim_world *world, bl_sim_process *process, uint32_t line)
{
    uint32_t number = bl_sim_track_number(world, line);
    bl_sim_order *order = &process->order;
    if (number >= order->look_count) {
        uint32_t count = world->history.track_room;
        order->looks = realloc(order->looks, count * sizeof *order->looks);
        if (order->looks == NULL)
            abort();
        memset(order->looks + order->look_count, 0,
               (count - order->look_count) * sizeof *order->looks);
        order->look_count = count;
    }
    return &order->looks[number];
}

/* ---- Knowledge: vector clocks of what each process has read. */

uint32_t bl_sim_snapshot_new(bl_sim_world *world, const bl_sim_snapshot *known)
{
    bl_sim_history *history = &world->history;
    history->snapshots = bl_sim_grow(history->snapshots, &history->snapshot_count,
                                     &history->snapshot_room, sizeof *history->snapshots);
    history->snapshots[history->snapshot_count - 1] = *known;
    return history->snapshot_count - 1;
}

uint32_t bl_sim_snapshot_take(bl_sim_world *world, bl_sim_process *process)
{
    if (process->order.snapshot == 0)
        process->order.snapshot = bl_sim_snapshot_new(world, &process->order.known);
    return process->order.snapshot;
}

/* Record that from time at on the process knows what writer wrote up to clock. */
static void bl_sim_raise_to(bl_sim_order *order, uint32_t writer, uint32_t clock, uint32_t at)
{
    order->known.clock[writer] = clock;
    order->raise[writer][order->raises[writer]++ % BL_SIM_RAISE_COUNT] = (bl_sim_raise){clock, at};
    order->snapshot = 0;
}

void bl_sim_learn(bl_sim_world *world, bl_sim_process *process, uint32_t snapshot, uint32_t at)
{
    bl_sim_order *order = &process->order;
    if (snapshot == 0 || snapshot == order->snapshot)
        return;
    const bl_sim_snapshot *news = &world->history.snapshots[snapshot];
    for (uint32_t i = 0; i < world->process_count; i++)
        if (news->clock[i] > order->known.clock[i] && world->process[i] != process)
            bl_sim_raise_to(order, i, news->clock[i], at);
}

void bl_sim_learn_seen(bl_sim_process *process, const bl_sim_version *version, uint32_t at)
{
    bl_sim_order *order = &process->order;
    if (version->clock == order->known.clock[version->process] + 1)
        bl_sim_raise_to(order, version->process, version->clock, at);
}

int bl_sim_knows(const bl_sim_process *process, const bl_sim_version *version)
{
    return version->clock <= process->order.known.clock[version->process];
}

uint32_t bl_sim_known_since(const bl_sim_process *process, const bl_sim_version *version)
{
    const bl_sim_order *order = &process->order;
    const bl_sim_raise *raise = order->raise[version->process];
    uint32_t count = order->raises[version->process];
    uint32_t oldest = count > BL_SIM_RAISE_COUNT ? count - BL_SIM_RAISE_COUNT : 0;
    for (uint32_t i = oldest; i < count; i++)
        if (raise[i % BL_SIM_RAISE_COUNT].clock >= version->clock)
            return i == oldest && oldest > 0 ? 0 : raise[i % BL_SIM_RAISE_COUNT].at;
    return 0;
}

/* ---- Events of processes. */

uint32_t bl_sim_version_add(bl_sim_world *world, bl_sim_process *process, uint32_t line, int dirty,
                            const bl_site *site)
{
    bl_sim_history *history = &world->history;
    uint32_t snapshot = bl_sim_snapshot_take(world, process);
    history->versions = bl_sim_grow(history->versions, &history->version_count,
                                    &history->version_room, sizeof *history->versions);
    uint32_t number = history->version_count - 1;
    history->versions[number] = (bl_sim_version){
        .site = site,
        .line = line,
        .process = process->number,
        .clock = dirty ? (uint32_t)BL_SIM_UNFLUSHED : ++process->order.clock,
        .released = snapshot,
    };
    bl_sim_track_of(world, line)->issued = number;
    process->order.streamed_at = (uint32_t)world->stat.steps;
    bl_sim_look_of(world, process, line)->streamed_at = process->order.streamed_at;
    return number;
}

void bl_sim_note_release(bl_sim_process *process)
{
    uint32_t *released = &process->order.known.clock[process->number];
    if (*released == process->order.clock)
        return;
    *released = process->order.clock;
    process->order.snapshot = 0;
}

void bl_sim_note_full_fence(bl_sim_process *process)
{
    process->order.fences++;
    bl_sim_note_release(process);
}

/* Settle the pending invalidation, if a full fence has completed it. */
static void bl_sim_look_settle(bl_sim_look *look, const bl_sim_process *process)
{
    if (look->pending_fence == 0 || look->pending_fence > process->order.fences)
        return;
    look->invalidated_at = look->pending_at;
    look->pending_fence = 0;
}

void bl_sim_note_invalidate(bl_sim_world *world, bl_sim_process *process, uint32_t line)
{
    bl_sim_look *look = bl_sim_look_of(world, process, line);
    process->order.touched_at = (uint32_t)world->stat.steps;
    bl_sim_look_settle(look, process);
    look->pending_at = (uint32_t)process->fenced_at;
    look->pending_fence = process->order.fences + 1;
    uint32_t issued = bl_sim_track_of(world, line)->issued;
    bl_sim_version *version = issued ? &world->history.versions[issued] : NULL;
    if (!version || version->clock != (uint32_t)BL_SIM_UNFLUSHED)
        return;
    const bl_sim_process *writer = world->process[version->process];
    int inherited = bl_sim_gone(writer) && writer->pool.memory.host == process->pool.memory.host;
    if (writer != process && !inherited) /* lines of a dead process belong to its host */
        return;
    version->process = process->number;
    version->clock = ++process->order.clock; /* in transit, like a streamed version */
}

static uint32_t bl_sim_newest(const uint32_t piece[BL_SIM_PIECE_COUNT])
{
    uint32_t newest = 0;
    for (uint32_t i = 0; i < BL_SIM_PIECE_COUNT; i++)
        newest = piece[i] > newest ? piece[i] : newest;
    return newest;
}

void bl_sim_note_load(bl_sim_world *world, bl_sim_process *process, uint32_t line,
                      const uint32_t pieces[BL_SIM_PIECE_COUNT], const bl_site *site)
{
    bl_sim_look *look = bl_sim_look_of(world, process, line);
    const bl_sim_track *track = bl_sim_track_of(world, line);
    process->order.touched_at = (uint32_t)world->stat.steps;
    bl_sim_look_settle(look, process);
    look->site = site;
    look->loaded_at = (uint32_t)world->stat.steps;
    look->seen = bl_sim_newest(pieces);
    look->arrived = bl_sim_newest(track->piece);
    look->issued = track->issued;
    look->fenced_at = (uint32_t)process->fenced_at;
}
