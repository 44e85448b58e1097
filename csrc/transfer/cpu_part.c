/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A part of a plan, copied by this thread (transfer/cpu.c deals them out): pieces gathered into the
 * pool, or scattered out of it.
 */
#include <errno.h>

#include "coherence/coherence.h"
#include "coherence/crash_point.h"
#include "transfer/block.h"

/* Pieces [first, end), without skip bytes of the first and omit bytes of the last: not whole ones,
 * and of chunks that have a checksum none. */
typedef struct bl_plan_part {
    const bl_memory *memory;
    const bl_plan *plan;
    const bl_copy_settings *settings;
    uint32_t first;
    uint32_t end;
    uint32_t skip;
    uint32_t omit;
} bl_plan_part;

static const bl_chunk *bl_plan_chunk(const bl_plan *plan, const bl_piece *piece)
{
    return &plan->chunks[piece->chunk - plan->chunk_base];
}

static uint64_t bl_piece_end(const bl_piece *piece) { return piece->offset + piece->length; }

static uint64_t bl_chunk_end(const bl_chunk *chunk) { return chunk->offset + chunk->length; }

static int bl_plan_ends_chunk(const bl_plan *plan, uint32_t i)
{
    return i + 1 == plan->piece_count || plan->pieces[i + 1].chunk != plan->pieces[i].chunk;
}

/* Where what the part has of piece i begins in it, and how long that is. By value: what is stored
 * here and loaded again in another width waits behind every streamed line. */
static inline uint32_t bl_part_skip(const bl_plan_part *part, uint32_t i)
{
    return i == part->first ? part->skip : 0;
}

static inline uint32_t bl_part_length(const bl_plan_part *part, uint32_t i)
{
    uint32_t omit = i + 1 == part->end ? part->omit : 0;
    return part->plan->pieces[i].length - bl_part_skip(part, i) - omit;
}

/* ---- Into the pool. */

/* A run of one piece: as a whole, or in steps that are paid for. */
static int bl_part_put(bl_gather *gather, uint64_t address, uint64_t offset, uint64_t length,
                       uint32_t *crc, bl_toll *toll)
{
    uint64_t most = toll == NULL ? length : BL_TOLL_STEP;
    int status = 0;
    for (uint64_t done = 0, step; done < length && status == 0; done += step) {
        step = bl_least(length - done, most);
        status = bl_toll_pay(toll, offset + done, step);
        if (status == 0)
            bl_gather_put(gather, (const uint8_t *)address + done, step, crc);
    }
    return status;
}

static int bl_part_gather(const bl_plan_part *part, bl_toll *toll)
{
    const bl_plan *plan = part->plan;
    uint32_t head = part->settings->head, direct = part->settings->direct, crc = 0;
    bl_gather gather;
    int status = 0;
    uint64_t at = plan->pieces[part->first].offset + part->skip;
    bl_gather_begin(&gather, part->memory, at, direct);
    for (uint32_t i = part->first; i < part->end && status == 0; i++) {
        const bl_piece *piece = &plan->pieces[i];
        uint32_t skip = bl_part_skip(part, i), length = bl_part_length(part, i);
        if (i + 1 < part->end) /* the hardware finds the rest, but not where the next one begins */
            bl_prefetch_source((const void *)piece[1].address, bl_least(piece[1].length, head));
        if (piece->offset + skip != at) { /* another block's */
            bl_gather_end(&gather);
            bl_gather_begin(&gather, part->memory, piece->offset, direct);
        }
        status = bl_part_put(&gather, piece->address + skip, piece->offset + skip, length,
                             plan->checksums ? &crc : NULL, toll);
        at = piece->offset + skip + length;
        if (plan->checksums && bl_plan_ends_chunk(plan, i)) {
            plan->checksums[piece->chunk - plan->chunk_base] = crc;
            crc = 0;
            bl_crash_point("payload.chunk_streamed");
        }
    }
    bl_gather_end(&gather);
    return status;
}

/* ---- Out of the pool: the lines of the next window are dropped between the copies of this one's,
 * so that the memory always has both to do; and it takes a full fence to have lines dropped, so a
 * window is not small. This window's lines are asked for a little before they are copied. */

/* A place in a part's bytes. */
typedef struct bl_part_place {
    uint32_t piece;
    uint64_t used;              /* bytes of it that are behind */
} bl_part_place;

typedef struct bl_scatter {
    const bl_plan_part *part;
    bl_toll *toll;
    enum bl_copy_how how;
    uint32_t crc;               /* of this chunk's bytes before */
    bl_part_place copy;         /* what is not copied yet */
    bl_part_place drop;         /* what is not dropped yet: a window ahead */
    bl_part_place ask;          /* what is not asked for yet */
    uint64_t ask_left;          /* of this window */
} bl_scatter;

/* The next run of at most size bytes, in one piece. */
typedef struct bl_part_run {
    uint64_t address;
    uint64_t offset;
    uint64_t length;            /* 0: there is none */
} bl_part_run;

static inline bl_part_run bl_part_take(const bl_plan_part *part, bl_part_place *place,
                                       uint64_t size)
{
    if (place->piece == part->end)
        return (bl_part_run){0, 0, 0};
    const bl_piece *piece = &part->plan->pieces[place->piece];
    uint64_t at = bl_part_skip(part, place->piece) + place->used;
    uint64_t left = bl_part_length(part, place->piece) - place->used;
    uint64_t length = bl_least(left, size);
    if (length == left)
        place->piece++, place->used = 0;
    else
        place->used += length;
    return (bl_part_run){piece->address + at, piece->offset + at, length};
}

static void bl_part_drop(bl_scatter *scatter, uint64_t size)
{
    bl_part_run run;
    for (; size > 0 && (run = bl_part_take(scatter->part, &scatter->drop, size)).length > 0;
         size -= run.length)
        bl_invalidate(scatter->part->memory, run.offset, run.length);
}

static void bl_part_ask(bl_scatter *scatter, uint64_t size)
{
    bl_part_run run;
    for (size = bl_least(size, scatter->ask_left);
         size > 0 && (run = bl_part_take(scatter->part, &scatter->ask, size)).length > 0;
         size -= run.length, scatter->ask_left -= run.length)
        bl_prefetch_range(scatter->part->memory, run.offset, run.length);
}

static int bl_chunk_differs(const bl_plan_part *part, uint32_t chunk, uint32_t crc)
{
    return bl_verify(part->memory, crc == part->plan->checksums[chunk]) ? 0 : -EBADMSG;
}

/* A step in one piece, of what is left of a window: as long as the settings say, or so that the
 * next one goes to whole lines. */
static int bl_part_step(bl_scatter *scatter, uint64_t *left)
{
    const bl_plan_part *part = scatter->part;
    bl_part_place *place = &scatter->copy;
    const bl_piece *piece = &part->plan->pieces[place->piece];
    if (place->used == 0 && place->piece + 1 < part->end && scatter->how == BL_COPY_PAST)
        bl_prefetch_edges((const void *)piece[1].address, piece[1].length);
    uint64_t ragged = (piece->address + bl_part_skip(part, place->piece) + place->used) &
                      (BL_LINE_SIZE - 1);
    uint64_t wanted = bl_least(*left, part->settings->step);
    bl_part_run run = bl_part_take(part, place, wanted > ragged ? wanted - ragged : wanted);
    int status = bl_toll_pay(scatter->toll, run.offset, run.length);
    if (status < 0)
        return status;
    bl_part_drop(scatter, run.length);
    bl_part_ask(scatter, run.length);
    bl_fetch_run(part->memory, run.offset, (void *)run.address, run.length,
                 part->plan->checksums ? &scatter->crc : NULL, scatter->how);
    *left -= run.length;
    return 0;
}

/* So many bytes, or what is left, step by step. */
static int bl_part_window(bl_scatter *scatter, uint64_t size)
{
    const bl_plan_part *part = scatter->part;
    const bl_plan *plan = part->plan;
    int status = 0;
    scatter->ask = scatter->copy, scatter->ask_left = part->settings->ahead > 0 ? size : 0;
    bl_part_ask(scatter, part->settings->ahead);
    while (size > 0 && scatter->copy.piece < part->end && status == 0) {
        uint32_t i = scatter->copy.piece;
        status = bl_part_step(scatter, &size);
        int ended = status == 0 && scatter->copy.piece > i;
        if (ended && plan->checksums && bl_plan_ends_chunk(plan, i)) {
            bl_crash_point("payload.chunk_fetched");
            status = bl_chunk_differs(part, plan->pieces[i].chunk - plan->chunk_base, scatter->crc);
            scatter->crc = 0;
        }
    }
    return status;
}

static int bl_part_scatter(const bl_plan_part *part, enum bl_copy_how how, bl_toll *toll)
{
    bl_part_place first = {part->first, 0};
    bl_scatter scatter = {.part = part, .toll = toll, .how = how, .copy = first, .drop = first};
    int status = 0;
    bl_fence_full(part->memory); /* no drop before the look that told the caller to read */
    bl_part_drop(&scatter, part->settings->window);
    while (scatter.copy.piece < part->end && status == 0) {
        bl_fence_full(part->memory); /* what was dropped is gone; the loads below go to memory */
        status = bl_part_window(&scatter, part->settings->window);
    }
    if (how == BL_COPY_PAST)
        bl_copy_settle();
    return status;
}

/* ---- Some bytes of chunks that are verified: each comes whole, into the scratch, and is picked
 * from there. */

static int bl_chunk_pick(const bl_plan_part *part, uint32_t c, uint8_t *scratch, bl_toll *toll)
{
    const bl_plan *plan = part->plan;
    const bl_chunk *chunk = &plan->chunks[c];
    uint32_t crc = 0;
    int status = bl_toll_pay(toll, chunk->offset, chunk->length);
    if (status < 0)
        return status;
    bl_fetch_run(part->memory, chunk->offset, scratch, chunk->length, &crc, BL_COPY_CACHED);
    status = bl_chunk_differs(part, c, crc);
    for (uint32_t i = chunk->first - plan->piece_base; status == 0; i++) {
        const bl_piece *piece = &plan->pieces[i];
        memcpy((void *)piece->address, scratch + (piece->offset - chunk->offset), piece->length);
        if (bl_plan_ends_chunk(plan, i))
            break;
    }
    return status;
}

static uint64_t bl_chunk_drop(const bl_plan_part *part, uint32_t c)
{
    const bl_chunk *chunk = &part->plan->chunks[c];
    bl_invalidate(part->memory, chunk->offset, chunk->length);
    return chunk->length;
}

/* As above, a window being some chunks. */
static int bl_part_pick(const bl_plan_part *part, uint8_t *scratch, bl_toll *toll)
{
    const bl_plan *plan = part->plan;
    uint32_t c = plan->pieces[part->first].chunk - plan->chunk_base;
    uint32_t end = plan->pieces[part->end - 1].chunk - plan->chunk_base + 1, next = c;
    int status = 0;
    bl_fence_full(part->memory); /* no drop before the look that told the caller to read */
    for (uint64_t size = 0; next < end && size < part->settings->window; next++)
        size += bl_chunk_drop(part, next);
    while (c < end && status == 0) {
        bl_fence_full(part->memory); /* what was dropped is gone; the loads below go to memory */
        for (uint32_t stop = next; c < stop && status == 0; c++) {
            if (next < end)
                bl_chunk_drop(part, next++);
            status = bl_chunk_pick(part, c, scratch, toll);
        }
    }
    return status;
}
