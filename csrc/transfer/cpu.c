/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The copy engine of the CPU: plans (api/transfer.h) executed by one thread or several. A plan is
 * parted where a line begins and, if it has checksums, a chunk; each part is one thread's.
 */
#include <errno.h>
#include <stdlib.h>

#include "transfer/crew.h"
#include "coherence/guard.h"
#include "pool/pool.h"
#include "transfer/block.h"

void bl_copy_defaults(bl_copy_settings *settings)
{
    *settings = (bl_copy_settings){
        .threads = 1,
        .part = 64 << 10,
        .window = 64 << 10,
        .step = 2 << 10,
        .ahead = 4 << 10,
        .past = 256 << 10,
        .head = 2 << 10,
        .direct = 256,
    };
#ifdef BL_SIM /* its blocks are small, and have several windows too */
    settings->window = 4 * BL_LINE_SIZE;
    settings->ahead = BL_LINE_SIZE;
#endif
}

bl_copy_settings bl_copy_settings_of(const bl_copy_settings *given)
{
    bl_copy_settings settings;
    bl_copy_defaults(&settings);
    if (given != NULL)
        settings = *given;
    uint32_t *least[] = {&settings.window, &settings.step, &settings.direct, &settings.part};
    for (uint32_t i = 0; i < sizeof least / sizeof *least; i++)
        if (*least[i] < BL_LINE_SIZE)
            *least[i] = BL_LINE_SIZE;
    if (settings.step > BL_TOLL_STEP)
        settings.step = BL_TOLL_STEP;
    return settings;
}

/* ---- Is it a plan? */

/* Piece i, and if it is its chunk's first the chunk; at: where the piece before it ended. */
static int bl_plan_piece_valid(const bl_memory *memory, const bl_plan *plan, uint32_t i,
                               uint64_t at)
{
    const bl_piece *piece = &plan->pieces[i];
    uint32_t before = i > 0 ? plan->pieces[i - 1].chunk : plan->chunk_base - 1;
    if (piece->chunk - plan->chunk_base >= plan->chunk_count ||
        (piece->chunk != before && piece->chunk != before + 1))
        return 0;
    const bl_chunk *chunk = bl_plan_chunk(plan, piece);
    if (piece->chunk != before) {
        if (chunk->first - plan->piece_base != i || chunk->offset > memory->size ||
            chunk->length > memory->size - chunk->offset ||
            (chunk->offset % BL_LINE_SIZE > 0 && (i == 0 || chunk->offset != at)))
            return 0;
        at = chunk->offset;
    }
    if (piece->offset < chunk->offset || piece->offset > bl_chunk_end(chunk) ||
        piece->length > bl_chunk_end(chunk) - piece->offset)
        return 0;
    return plan->sparse || (piece->offset == at && (!bl_plan_ends_chunk(plan, i) ||
                                                    bl_piece_end(piece) == bl_chunk_end(chunk)));
}

int bl_plan_valid(const bl_memory *memory, const bl_plan *plan)
{
    for (uint32_t i = 0; i < plan->piece_count; i++)
        if (!bl_plan_piece_valid(memory, plan, i,
                                 i > 0 ? bl_piece_end(&plan->pieces[i - 1]) : UINT64_MAX))
            return 0;
    return plan->piece_count == 0
               ? plan->chunk_count == 0
               : plan->pieces[plan->piece_count - 1].chunk + 1 - plan->chunk_base ==
                     plan->chunk_count;
}

int bl_plan_check(const bl_pool *pool, const bl_plan *plan)
{
    return bl_plan_valid(&pool->memory, plan) ? 0 : -EINVAL;
}

/* ---- The whole plan, by several threads. */

typedef struct bl_plan_run {
    bl_plan_part *parts;
    uint32_t part_count;
    bl_toll *toll;              /* of the calling thread, or NULL */
    bl_toll *tolls;             /* of the others, by hand */
    uint32_t threads;
    uint32_t scratch_size;      /* 0: none is needed */
    enum bl_copy_how how;
    int write;
} bl_plan_run;

typedef struct bl_plan_item {
    const bl_plan_run *run;
    const bl_plan_part *part;
    uint8_t *scratch;
    bl_toll *toll;
} bl_plan_item;

static int bl_plan_item_guarded(void *context)
{
    const bl_plan_item *item = context;
    return item->run->write ? bl_part_gather(item->part, item->toll)
           : item->scratch  ? bl_part_pick(item->part, item->scratch, item->toll)
                            : bl_part_scatter(item->part, item->run->how, item->toll);
}

static int bl_plan_part_do(const bl_plan_run *run, uint32_t number, bl_toll *toll)
{
    bl_plan_item item = {run, &run->parts[number], NULL, toll};
    if (run->scratch_size > 0 && (item.scratch = malloc(run->scratch_size)) == NULL)
        return -ENOMEM;
    int status = bl_guarded(item.part->memory, bl_plan_item_guarded, &item);
    free(item.scratch);
    return status;
}

static uint64_t bl_part_size(const bl_plan_part *part)
{
    uint64_t size = 0;
    for (uint32_t i = part->first; i < part->end; i++)
        size += bl_part_length(part, i);
    return size;
}

/* Several threads have a toll each, which lasts from part to part, to where none may be left. */
static int bl_plan_do(void *context, uint32_t number, uint32_t hand)
{
    const bl_plan_run *run = context;
    if (run->toll == NULL || run->part_count == 1)
        return bl_plan_part_do(run, number, run->toll);
    int last = hand > 0 && number + run->threads >= run->part_count;
    bl_toll *toll = hand > 0 ? &run->tolls[hand] : run->toll;
    bl_toll_begin(toll, bl_part_size(&run->parts[number]), !last);
    int status = bl_plan_part_do(run, number, toll);
    if (last)
        bl_toll_end(toll);
    return status;
}

/* Deal the parts out. */
static int bl_plan_deal(bl_plan_run *run)
{
    bl_toll tolls[BL_CREW_HANDS];
    uint32_t hands = run->threads < BL_CREW_HANDS ? run->threads : BL_CREW_HANDS;
    for (uint32_t i = 1; i < hands && run->toll != NULL; i++)
        tolls[i] = bl_toll_other(run->toll);
    run->tolls = tolls;
    int status = bl_crew_run(run->threads, run->part_count, bl_plan_do, run);
    for (uint32_t i = 1; i < hands && run->toll != NULL; i++)
        bl_toll_end(&tolls[i]);
    return status;
}

/* The first place, from used on, where piece i may be cut: a line begins there and, if there are
 * checksums, a chunk. Its length if there is none. */
static uint32_t bl_plan_cut_at(const bl_plan *plan, uint32_t i, uint64_t used)
{
    const bl_piece *piece = &plan->pieces[i];
    uint64_t at = used + (-(piece->offset + used) & (BL_LINE_SIZE - 1));
    if (plan->checksums && (at > 0 || i == 0 || !bl_plan_ends_chunk(plan, i - 1)))
        return piece->length;
    return (uint32_t)bl_least(at, piece->length);
}

/* Deal a whole plan out in parts of about size bytes, as many as there is room for: how many. */
static uint32_t bl_plan_cut(const bl_plan_part *whole, uint64_t size, bl_plan_part *parts,
                            uint32_t room)
{
    uint32_t count = 1;
    uint64_t done = 0;          /* of the last part so far */
    parts[0] = *whole;
    for (uint32_t i = 0; i < whole->end; i++) {
        uint32_t length = whole->plan->pieces[i].length, used = 0;
        while (count < room && used + size < length + done) {
            uint64_t wanted = used + (size > done ? size - done : 0);
            uint32_t at = bl_plan_cut_at(whole->plan, i, wanted);
            if (at == length)
                break;
            parts[count - 1].end = at > 0 ? i + 1 : i;
            parts[count - 1].omit = at > 0 ? length - at : 0;
            parts[count] = *whole;
            parts[count].first = i, parts[count].skip = at;
            count++, used = at, done = 0;
        }
        done += length - used;
    }
    return count;
}

/* Of a sparse plan whose chunks are verified the longest one's, else 0. */
static uint32_t bl_plan_scratch_size(const bl_plan *plan)
{
    uint32_t size = 0;
    for (uint32_t i = 0; plan->sparse && plan->checksums && i < plan->chunk_count; i++)
        if (plan->chunks[i].length > size)
            size = plan->chunks[i].length;
    return size;
}

int bl_plan_execute(const bl_memory *memory, const bl_plan *plan, const bl_copy_settings *given,
                    int write, bl_toll *toll)
{
    enum { ROOM = BL_PARTS_PER_THREAD * (BL_CREW_MAX + 1) };
    bl_copy_settings settings = bl_copy_settings_of(given);
    bl_plan_part parts[ROOM], whole = {memory, plan, &settings, 0, plan->piece_count, 0, 0};
    if (!bl_plan_valid(memory, plan) || (write && plan->sparse))
        return -EINVAL;
    uint64_t size = bl_part_size(&whole);
    bl_plan_run run = {parts, 1, toll, NULL, settings.threads, bl_plan_scratch_size(plan),
                       plan->sparse || size < settings.past ? BL_COPY_CACHED : BL_COPY_PAST, write};
    if (size == 0)
        return 0;
    parts[0] = whole;
    if (settings.threads <= 1 || size < 2 * (uint64_t)settings.part)
        return bl_plan_do(&run, 0, 0);
    uint64_t share = size / settings.threads / BL_PARTS_PER_THREAD;
    share = share < settings.part ? settings.part : share;
    run.part_count = bl_plan_cut(&whole, share, parts, ROOM);
    return bl_plan_deal(&run);
}

/* By a toll of its own. */
static int bl_plan_pass(const bl_pool *pool, const bl_plan *plan, const bl_copy_settings *given,
                        int write, bl_port *port, uint32_t transfer_class)
{
    bl_copy_settings settings = bl_copy_settings_of(given);
    bl_plan_part whole = {&pool->memory, plan, &settings, 0, plan->piece_count, 0, 0};
    if (port == NULL)
        return bl_plan_execute(&pool->memory, plan, &settings, write, NULL);
    bl_toll toll = bl_toll_make(port, write, transfer_class, bl_part_size(&whole),
                                settings.threads);
    int status = bl_plan_execute(&pool->memory, plan, &settings, write, &toll);
    bl_toll_end(&toll);
    return status;
}

int bl_plan_write(const bl_pool *pool, const bl_plan *plan, const bl_copy_settings *settings,
                  bl_port *port, uint32_t transfer_class)
{
    int status = bl_plan_pass(pool, plan, settings, 1, port, transfer_class);
    bl_fence_store(&pool->memory);
    return status;
}

int bl_plan_read(const bl_pool *pool, const bl_plan *plan, const bl_copy_settings *settings,
                 bl_port *port, uint32_t transfer_class)
{
    return bl_plan_pass(pool, plan, settings, 0, port, transfer_class);
}
