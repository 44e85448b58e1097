/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The copy engine of the CPU: it executes plans (api/transfer.h) with one thread or several. A plan
 * is cut into parts at line boundaries and, if it has checksums, at chunk boundaries. One thread
 * copies each part: it gathers pieces into the pool, or scatters them out of it.
 */
#include "transfer/cpu.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/minmax.h"
#include "coherence/coherence.h"
#include "coherence/crash_point.h"
#include "coherence/guard.h"
#include "pool/pool.h"
#include "transfer/thread_pool.h"
#include "transfer/plan.h"

/* With software coherence a read has invalidated its lines, so they come from memory: it prefetches
 * the next ones, and invalidates between small steps. With hardware coherence the CPU's own
 * prefetcher suffices. Measured on AMD EPYC: docs/understand/copy-engines.md. */
void bl_copy_defaults(bl_copy_settings *settings, int software)
{
    *settings = (bl_copy_settings){
        .threads = 1,
        .part = 64 << 10,
        .window = 64 << 10,
        .step = software ? 2 << 10 : 4 << 10,
        .ahead = software ? 4 << 10 : 0,
        .past = 256 << 10,
        .head = 2 << 10,
        .direct = 256,
    };
#ifdef BL_SIM /* small, so that the simulator's small blocks have several windows */
    settings->window = 4 * BL_LINE_SIZE;
    settings->ahead = BL_LINE_SIZE;
#endif
}

bl_copy_settings bl_copy_settings_of(const bl_copy_settings *given)
{
    bl_copy_settings settings;
    bl_copy_defaults(&settings, 1);
    if (given != NULL)
        settings = *given;
    uint32_t *least[] = {&settings.window, &settings.step, &settings.direct, &settings.part};
    for (uint32_t i = 0; i < sizeof least / sizeof *least; i++)
        if (*least[i] < BL_LINE_SIZE)
            *least[i] = BL_LINE_SIZE;
    if (settings.step > BL_THROTTLE_STEP)
        settings.step = BL_THROTTLE_STEP;
    return settings;
}

/* ---- Gathering runs of private memory into one range of the pool. Each payload byte is read once:
 * the checksum is computed during the copy. */

enum { BL_STAGE_SIZE = 4 << 10 };   /* small runs are staged before they are streamed */

typedef struct bl_gather {
    const bl_memory *memory;
    uint64_t offset;            /* target of the stage */
    uint32_t direct;            /* runs of at least this size, a line or more, are streamed
                                 * directly */
    uint32_t staged;
    _Alignas(BL_LINE_SIZE) uint8_t stage[BL_STAGE_SIZE];
} bl_gather;

static void bl_gather_begin(bl_gather *gather, const bl_memory *memory, uint64_t offset,
                            uint32_t direct)
{
    gather->memory = memory, gather->offset = offset;
    gather->direct = direct, gather->staged = 0;
}

static void bl_gather_flush(bl_gather *gather)
{
    if (gather->staged > 0)
        bl_stream(gather->memory, gather->offset, gather->stage, gather->staged);
    gather->offset += gather->staged;
    gather->staged = 0;
}

/* *crc, if crc is not NULL, is the CRC of the chunk's preceding bytes and is updated. */
static void bl_gather_direct(bl_gather *gather, const void *source, uint64_t size, uint32_t *crc)
{
    bl_gather_flush(gather);
    if (crc != NULL)
        *crc = bl_stream_crc(gather->memory, gather->offset, source, size, *crc);
    else
        bl_stream(gather->memory, gather->offset, source, size);
    gather->offset += size;
}

static void bl_gather_stage(bl_gather *gather, const void *source, uint32_t size, uint32_t *crc)
{
    uint8_t *target = gather->stage + gather->staged;
    if (crc != NULL)
        *crc = bl_copy_crc(*crc, target, source, size);
    else
        memcpy(target, source, size);
    gather->staged += size;
    if (gather->staged == BL_STAGE_SIZE)
        bl_gather_flush(gather);
}

/* A long run is streamed directly as soon as the stage ends on a line boundary. */
static void bl_gather_put(bl_gather *gather, const uint8_t *next, uint64_t size, uint32_t *crc)
{
    for (uint64_t piece; size > 0; next += piece, size -= piece) {
        uint32_t ragged = gather->staged % BL_LINE_SIZE;
        if (size >= gather->direct && ragged == 0) {
            piece = size & ~(uint64_t)(BL_LINE_SIZE - 1);
            bl_gather_direct(gather, next, piece, crc);
        } else {
            uint32_t room = ragged > 0 ? BL_LINE_SIZE - ragged : BL_STAGE_SIZE - gather->staged;
            piece = bl_min(size, room);
            bl_gather_stage(gather, next, (uint32_t)piece, crc);
        }
    }
}

/* Pad the last line with zeros and stream the stage. */
static void bl_gather_end(bl_gather *gather)
{
    uint32_t blank = -gather->staged % BL_LINE_SIZE;
    memset(gather->stage + gather->staged, 0, blank);
    gather->staged += blank;
    bl_gather_flush(gather);
}

/* ---- A part of a plan, copied by this thread. */

/* A part has the pieces [first, end), without skip bytes of the first and omit bytes of the last.
 * With checksums, a part has only whole chunks. */
typedef struct bl_plan_part {
    const bl_memory *memory;
    const bl_plan *plan;
    const bl_copy_settings *settings;
    uint32_t first;
    uint32_t end;
    uint32_t skip;
    uint32_t omit;
} bl_plan_part;

/* Returns the offset at which the part begins in piece i, and the length there. By value, because a
 * value that is stored and reloaded in another width would wait for all streamed lines. */
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

/* Gather a run of one piece as a whole, or in steps that the throttle admits. */
static int bl_part_put(bl_gather *gather, uint64_t address, uint64_t offset, uint64_t length,
                       uint32_t *crc, bl_throttle *throttle)
{
    uint64_t most = throttle == NULL ? length : BL_THROTTLE_STEP;
    int status = 0;
    for (uint64_t done = 0, step; done < length && status == 0; done += step) {
        step = bl_min(length - done, most);
        status = bl_throttle_pay(throttle, offset + done, step);
        if (status == 0)
            bl_gather_put(gather, (const uint8_t *)address + done, step, crc);
    }
    return status;
}

static int bl_part_gather(const bl_plan_part *part, bl_throttle *throttle)
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
        if (i + 1 < part->end) /* the hardware prefetches within a piece, but not the next piece */
            bl_prefetch_source((const void *)piece[1].address, bl_min(piece[1].length, head));
        if (piece->offset + skip != at) { /* the next piece belongs to another block */
            bl_gather_end(&gather);
            bl_gather_begin(&gather, part->memory, piece->offset, direct);
        }
        status = bl_part_put(&gather, piece->address + skip, piece->offset + skip, length,
                             plan->checksums ? &crc : NULL, throttle);
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

/* ---- Out of the pool. The lines of the next window are invalidated between the copies of this
 * window's lines, so that the memory works on both at a time. Each window needs a full fence, so
 * windows are large. Lines of this window are prefetched shortly before they are copied. */

/* A position in the bytes of a part. */
typedef struct bl_part_place {
    uint32_t piece;
    uint64_t used;              /* bytes of the piece that are done */
} bl_part_place;

typedef struct bl_scatter {
    const bl_plan_part *part;
    bl_throttle *throttle;
    enum bl_copy_how how;
    uint32_t crc;               /* checksum of the chunk's bytes so far */
    bl_part_place copy;         /* the next byte to copy */
    bl_part_place drop;         /* the next byte to invalidate: a window ahead */
    bl_part_place fetch;        /* the next byte to prefetch */
    uint64_t fetch_left;        /* of this window */
} bl_scatter;

/* The next run of at most size bytes within one piece. */
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
    uint64_t length = bl_min(left, size);
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

static void bl_part_prefetch(bl_scatter *scatter, uint64_t size)
{
    bl_part_run run;
    for (size = bl_min(size, scatter->fetch_left);
         size > 0 && (run = bl_part_take(scatter->part, &scatter->fetch, size)).length > 0;
         size -= run.length, scatter->fetch_left -= run.length)
        bl_prefetch_range(scatter->part->memory, run.offset, run.length);
}

static int bl_chunk_differs(const bl_plan_part *part, uint32_t chunk, uint32_t crc)
{
    return bl_verify(part->memory, crc == part->plan->checksums[chunk]) ? 0 : -EBADMSG;
}

/* Copy one step within one piece and one window. A step has the size of the settings, or less, so
 * that the next one begins at a line. */
static int bl_part_step(bl_scatter *scatter, uint64_t *left)
{
    const bl_plan_part *part = scatter->part;
    bl_part_place *place = &scatter->copy;
    const bl_piece *piece = &part->plan->pieces[place->piece];
    if (place->used == 0 && place->piece + 1 < part->end && scatter->how == BL_COPY_PAST)
        bl_prefetch_edges((const void *)piece[1].address, piece[1].length);
    uint64_t ragged = (piece->address + bl_part_skip(part, place->piece) + place->used) &
                      (BL_LINE_SIZE - 1);
    uint64_t wanted = bl_min(*left, part->settings->step);
    bl_part_run run = bl_part_take(part, place, wanted > ragged ? wanted - ragged : wanted);
    int status = bl_throttle_pay(scatter->throttle, run.offset, run.length);
    if (status < 0)
        return status;
    bl_part_drop(scatter, run.length);
    bl_part_prefetch(scatter, run.length);
    bl_fetch_run(part->memory, run.offset, (void *)run.address, run.length,
                 part->plan->checksums ? &scatter->crc : NULL, scatter->how);
    *left -= run.length;
    return 0;
}

/* Copy size bytes, or the rest, step by step. */
static int bl_part_window(bl_scatter *scatter, uint64_t size)
{
    const bl_plan_part *part = scatter->part;
    const bl_plan *plan = part->plan;
    int status = 0;
    scatter->fetch = scatter->copy, scatter->fetch_left = part->settings->ahead > 0 ? size : 0;
    bl_part_prefetch(scatter, part->settings->ahead);
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

static int bl_part_scatter(const bl_plan_part *part, enum bl_copy_how how, bl_throttle *throttle)
{
    bl_part_place first = {part->first, 0};
    bl_scatter scatter = {.part = part, .throttle = throttle, .how = how, .copy = first,
                          .drop = first};
    int status = 0;
    bl_fence_full(part->memory); /* no invalidation before the caller's read of the entry */
    bl_part_drop(&scatter, part->settings->window);
    while (scatter.copy.piece < part->end && status == 0) {
        bl_fence_full(part->memory); /* the lines are invalid: the loads below read memory */
        status = bl_part_window(&scatter, part->settings->window);
    }
    if (how == BL_COPY_PAST)
        bl_copy_settle();
    return status;
}

/* ---- A sparse plan with checksums: each chunk is copied whole into the scratch buffer, and the
 * requested bytes from there. */

static int bl_chunk_pick(const bl_plan_part *part, uint32_t c, uint8_t *scratch,
                         bl_throttle *throttle)
{
    const bl_plan *plan = part->plan;
    const bl_chunk *chunk = &plan->chunks[c];
    uint32_t crc = 0;
    int status = bl_throttle_pay(throttle, chunk->offset, chunk->length);
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

/* Copy a part of a sparse plan with checksums; a window is a few chunks. */
static int bl_part_pick(const bl_plan_part *part, uint8_t *scratch, bl_throttle *throttle)
{
    const bl_plan *plan = part->plan;
    uint32_t c = plan->pieces[part->first].chunk - plan->chunk_base;
    uint32_t end = plan->pieces[part->end - 1].chunk - plan->chunk_base + 1, next = c;
    int status = 0;
    bl_fence_full(part->memory); /* no invalidation before the caller's read of the entry */
    for (uint64_t size = 0; next < end && size < part->settings->window; next++)
        size += bl_chunk_drop(part, next);
    while (c < end && status == 0) {
        bl_fence_full(part->memory); /* the lines are invalid: the loads below read memory */
        for (uint32_t stop = next; c < stop && status == 0; c++) {
            if (next < end)
                bl_chunk_drop(part, next++);
            status = bl_chunk_pick(part, c, scratch, throttle);
        }
    }
    return status;
}

/* ---- The whole plan, by several threads. */

typedef struct bl_plan_run {
    bl_plan_part *parts;
    uint32_t part_count;
    bl_throttle *throttle;      /* of the calling thread, or NULL */
    bl_throttle *throttles;     /* of the other workers, by worker number */
    uint32_t threads;
    uint32_t scratch_size;      /* 0: none is needed */
    enum bl_copy_how how;
    int write;
} bl_plan_run;

typedef struct bl_plan_item {
    const bl_plan_run *run;
    const bl_plan_part *part;
    uint8_t *scratch;
    bl_throttle *throttle;
} bl_plan_item;

static int bl_plan_item_guarded(void *context)
{
    const bl_plan_item *item = context;
    return item->run->write ? bl_part_gather(item->part, item->throttle)
           : item->scratch  ? bl_part_pick(item->part, item->scratch, item->throttle)
                            : bl_part_scatter(item->part, item->run->how, item->throttle);
}

static int bl_plan_part_do(const bl_plan_run *run, uint32_t number, bl_throttle *throttle)
{
    bl_plan_item item = {run, &run->parts[number], NULL, throttle};
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

/* Each worker has its own throttle, which stays open between parts until no part can follow. */
static int bl_plan_run_item(void *context, uint32_t number, uint32_t worker)
{
    const bl_plan_run *run = context;
    if (run->throttle == NULL || run->part_count == 1)
        return bl_plan_part_do(run, number, run->throttle);
    int last = worker > 0 && number + run->threads >= run->part_count;
    bl_throttle *throttle = worker > 0 ? &run->throttles[worker] : run->throttle;
    bl_throttle_begin(throttle, bl_part_size(&run->parts[number]), !last);
    int status = bl_plan_part_do(run, number, throttle);
    if (last)
        bl_throttle_end(throttle);
    return status;
}

/* Distribute the parts over the thread pool. */
static int bl_plan_run_threads(bl_plan_run *run)
{
    bl_throttle throttles[BL_THREAD_POOL_WORKERS];
    uint32_t workers = run->threads < BL_THREAD_POOL_WORKERS ? run->threads
        : BL_THREAD_POOL_WORKERS;
    for (uint32_t i = 1; i < workers && run->throttle != NULL; i++)
        throttles[i] = bl_throttle_other(run->throttle);
    run->throttles = throttles;
    int status = bl_thread_pool_run(run->threads, run->part_count, bl_plan_run_item, run);
    for (uint32_t i = 1; i < workers && run->throttle != NULL; i++)
        bl_throttle_end(&throttles[i]);
    return status;
}

/* Returns the first position, from used on, where piece i may be cut (at a line and, with
 * checksums, at a chunk), or the piece's length if there is none. */
static uint32_t bl_plan_cut_at(const bl_plan *plan, uint32_t i, uint64_t used)
{
    const bl_piece *piece = &plan->pieces[i];
    uint64_t at = used + (-(piece->offset + used) & (BL_LINE_SIZE - 1));
    if (plan->checksums && (at > 0 || i == 0 || !bl_plan_ends_chunk(plan, i - 1)))
        return piece->length;
    return (uint32_t)bl_min(at, piece->length);
}

/* Cut a whole plan into parts of about size bytes, at most room parts. Returns how many. */
static uint32_t bl_plan_cut(const bl_plan_part *whole, uint64_t size, bl_plan_part *parts,
                            uint32_t room)
{
    uint32_t count = 1;
    uint64_t done = 0;          /* of the last part, so far */
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

/* Returns the length of the longest chunk of a sparse plan with checksums, or 0 for other plans. */
static uint32_t bl_plan_scratch_size(const bl_plan *plan)
{
    uint32_t size = 0;
    for (uint32_t i = 0; plan->sparse && plan->checksums && i < plan->chunk_count; i++)
        if (plan->chunks[i].length > size)
            size = plan->chunks[i].length;
    return size;
}

int bl_plan_execute(const bl_memory *memory, const bl_plan *plan, const bl_copy_settings *given,
                    int write, bl_throttle *throttle)
{
    enum { ROOM = BL_PARTS_PER_THREAD * (BL_THREAD_POOL_MAX + 1) };
    bl_copy_settings settings = bl_copy_settings_of(given);
    bl_plan_part parts[ROOM], whole = {memory, plan, &settings, 0, plan->piece_count, 0, 0};
    if (!bl_plan_valid(memory, plan) || (write && plan->sparse))
        return -EINVAL;
    uint64_t size = bl_part_size(&whole);
    bl_plan_run run = {parts, 1, throttle, NULL, settings.threads, bl_plan_scratch_size(plan),
                       plan->sparse || size < settings.past ? BL_COPY_CACHED : BL_COPY_PAST, write};
    if (size == 0)
        return 0;
    parts[0] = whole;
    if (settings.threads <= 1 || size < 2 * (uint64_t)settings.part)
        return bl_plan_run_item(&run, 0, 0);
    uint64_t share = size / settings.threads / BL_PARTS_PER_THREAD;
    share = share < settings.part ? settings.part : share;
    run.part_count = bl_plan_cut(&whole, share, parts, ROOM);
    return bl_plan_run_threads(&run);
}

/* Execute a plan with its own throttle. */
static int bl_plan_run_throttled(const bl_pool *pool, const bl_plan *plan,
                                 const bl_copy_settings *given, int write, bl_io_queue *io_queue,
                                 uint32_t transfer_class)
{
    bl_copy_settings settings = bl_copy_settings_of(given);
    bl_plan_part whole = {&pool->memory, plan, &settings, 0, plan->piece_count, 0, 0};
    if (io_queue == NULL)
        return bl_plan_execute(&pool->memory, plan, &settings, write, NULL);
    bl_throttle throttle = bl_throttle_make(io_queue, write, transfer_class, bl_part_size(&whole),
                                            settings.threads);
    int status = bl_plan_execute(&pool->memory, plan, &settings, write, &throttle);
    bl_throttle_end(&throttle);
    return status;
}

int bl_plan_write(const bl_pool *pool, const bl_plan *plan, const bl_copy_settings *settings,
                  bl_io_queue *io_queue, uint32_t transfer_class)
{
    int status = bl_plan_run_throttled(pool, plan, settings, 1, io_queue, transfer_class);
    bl_fence_store(&pool->memory);
    return status;
}

int bl_plan_read(const bl_pool *pool, const bl_plan *plan, const bl_copy_settings *settings,
                 bl_io_queue *io_queue, uint32_t transfer_class)
{
    return bl_plan_run_throttled(pool, plan, settings, 0, io_queue, transfer_class);
}
