/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The CUDA engine copies between GPU memory and the pool. A plan is cut into parts; each is one
 * launch on a stream, and ends with an event. The GPU accesses registered windows of the pool in
 * place. Chunks in other windows are bounced: the CPU copies them between the pool and a pinned
 * buffer, before the launch of a read or after the end of a write, and the same launch accesses
 * that buffer. So a copy never waits for a registration.
 *
 * A part is as large as the CPU can maintain cache lines for while the GPU copies another one, and
 * has at most a quarter of the bounce buffers. Its spans, and the checksums that the kernel writes
 * beside them, lie in pinned memory: a launch copies no tables.
 *
 * Kernels may still write after an error. So memory is reused only after an event, or the end of
 * all work on a stream, has shown that they have ended. If that cannot be shown, nothing of the
 * copy is ever freed.
 */
#include "cuda/windows.h"

#ifndef BL_SIM

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/host_atomic.h"
#include "base/minmax.h"
#include "pool/pool.h"
#include "transfer/plan.h"

enum {
    BL_CUDA_HALF_BELOW = 2048,      /* half a warp copies spans of plans with shorter pieces */
    BL_CUDA_SPIN_NS = 50 * 1000,    /* a kernel takes tens of microseconds */
    BL_CUDA_NAP_NS = 20 * 1000,
    BL_CUDA_NAP_MAX_NS = 1000 * 1000,
    BL_CUDA_URGENT = -5             /* CUDA clamps it to the GPU's range */
};

enum {
    BL_CUDA_CLASSES = 48,       /* of buffers, by powers of two */
    BL_CUDA_CLASS_MIN = 16      /* 64 KiB */
};

/* Pinned memory, which is reused: an allocation would stop the GPU. */
typedef struct bl_cuda_buffer {
    struct bl_cuda_buffer *next;
    uint8_t *host;
    uint64_t address;           /* of the GPU */
    uint64_t event;             /* of a part whose spans lie here; 0: not made yet */
    uint32_t class;
} bl_cuda_buffer;

/* A launch, and the CPU's work after its event. */
typedef struct bl_cuda_part {
    bl_cuda_mark mark;
    struct bl_cuda_part *next;
    bl_plan plan;               /* over the arrays of the copy */
    bl_cuda_buffer *table;      /* spans, and their checksums */
    bl_cuda_buffer *bounce;     /* the chunks that the GPU does not reach; or NULL */
    uint32_t *sums;
    uint64_t span_count;
    uint64_t bounce_size;
    uint32_t direct;            /* chunks that the GPU reaches */
    int64_t bad;                /* chunks whose checksum differs */
    int status;
    int settled;                /* the CPU's work is done, and the buffers are free */
} bl_cuda_part;

struct bl_cuda_copy {
    bl_cuda_hold hold;
    bl_cuda_copy *next;         /* of its engine */
    bl_cuda_engine *engine;
    bl_plan plan;
    bl_plan given;              /* the caller's plan, if plan has a chunk for each of its pieces */
    bl_piece *pieces;           /* of that plan; or NULL */
    bl_chunk *chunks;
    uint8_t *reached;           /* chunks that the GPU reaches; NULL: all */
    bl_cuda_part *parts, **end;
    uint32_t part_count;
    uint32_t write;
    uint64_t stream;
};

struct bl_cuda_engine {
    bl_cuda *cuda;
    bl_cuda_windows *windows;
    const bl_pool *pool;
    bl_cuda_settings settings;
    bl_cuda_stat stat;
    pthread_mutex_t lock;       /* of all that follows, the copies and their parts; taken before the
                                 * windows' lock */
    bl_cuda_copy *copies, **end;
    bl_cuda_buffer *free[BL_CUDA_CLASSES];
    uint64_t bounce_used;       /* bytes */
    uint64_t streams[2];        /* for reads and for writes */
    uint8_t *touched;           /* scratch: a byte for each window */
    bl_row_runs runs;           /* scratch */
    uint64_t users;             /* the owner, and the copies that are not dropped */
    int closed;
    int lost;                   /* kernels may run for ever: nothing is freed */
};

/* ---- Buffers */

static void bl_cuda_give(bl_cuda_engine *engine, bl_cuda_buffer **buffer)
{
    if (*buffer == NULL)
        return;
    (*buffer)->next = engine->free[(*buffer)->class];
    engine->free[(*buffer)->class] = *buffer;
    engine->stat.buffers--;
    *buffer = NULL;
}

static int bl_cuda_take(bl_cuda_engine *engine, uint64_t size, bl_cuda_buffer **out)
{
    uint32_t class = BL_CUDA_CLASS_MIN;
    while (1ull << class < size)
        class++;
    bl_cuda_buffer *buffer = engine->free[class];
    if (buffer != NULL) {
        engine->free[class] = buffer->next;
    } else {
        buffer = calloc(1, sizeof *buffer);
        if (buffer == NULL)
            return -ENOMEM;
        int status = bl_cuda_pin(engine->cuda, 1ull << class, (void **)&buffer->host,
                                 &buffer->address);
        if (status < 0) {
            free(buffer);
            return status;
        }
        buffer->class = class;
    }
    engine->stat.buffers++;
    *out = buffer;
    return 0;
}

/* ---- Ends of parts */

static uint64_t bl_align_line(uint64_t size)
{
    return (size + BL_LINE_SIZE - 1) & ~(uint64_t)(BL_LINE_SIZE - 1);
}

/* Copy the bounced chunks of a part between the pool and the buffer. Adjacent ones are one run. */
static int bl_cuda_bounce(const bl_cuda_copy *copy, const bl_cuda_part *part)
{
    const bl_plan *plan = &part->plan;
    const uint8_t *reached = copy->reached + (plan->chunk_base - copy->plan.chunk_base);
    const bl_pool *pool = copy->engine->pool;
    uint64_t place = 0, offset = 0, size = 0;
    int status = 0;
    for (uint32_t c = 0; c <= plan->chunk_count && status == 0; c++) {
        int more = c < plan->chunk_count;
        if (more && reached[c])
            continue;
        if (more && plan->chunks[c].offset == offset + size) {
            size += bl_align_line(plan->chunks[c].length);
            continue;
        }
        uint8_t *host = part->bounce->host + place;
        if (size > 0)
            status = copy->write ? bl_pool_write(pool, offset, host, size)
                                 : bl_pool_read(pool, offset, host, size);
        place += size;
        if (more) {
            offset = plan->chunks[c].offset;
            size = bl_align_line(plan->chunks[c].length);
        }
    }
    return status;
}

/* Do the CPU's work after a part. */
static int bl_cuda_complete(const bl_cuda_copy *copy, bl_cuda_part *part)
{
    const bl_cuda_settings *settings = &copy->engine->settings;
    int status = 0;
    if (copy->write && part->direct > 0)
        status = bl_plan_maintenance(copy->engine->pool, &part->plan, settings->after_write,
                                     settings->threads);
    if (copy->write && status == 0 && part->bounce != NULL)
        status = bl_cuda_bounce(copy, part);
    if (status == 0 && part->plan.checksums != NULL)
        part->bad = bl_spans_sum((const bl_span *)part->table->host, part->sums, part->span_count,
                                 &part->plan, (int)copy->write);
    return status;
}

/* Settle a part whose mark has ended, and free its buffers. An error is stored for the waits of its
 * copy, because a copy that needs the buffers may call this. */
static void bl_cuda_settle(bl_cuda_copy *copy, bl_cuda_part *part, int cancelled)
{
    bl_cuda_engine *engine = copy->engine;
    if (part->settled)
        return;
    part->settled = 1;
    part->status = cancelled || bl_host_load(&copy->hold.dropped) ? -ECANCELED
                                                                  : bl_cuda_complete(copy, part);
    engine->bounce_used -= part->bounce_size;
    bl_cuda_give(engine, &part->table);
    bl_cuda_give(engine, &part->bounce);
}

/* Settle a part if it has ended. Returns 1 if it is settled, 0 if not, or an error. */
static int bl_cuda_poll_part(bl_cuda_copy *copy, bl_cuda_part *part)
{
    if (part->settled)
        return 1;
    int status = bl_cuda_hold_poll(copy->engine->windows, &copy->hold, &part->mark);
    if (status == 1)
        bl_cuda_settle(copy, part, 0);
    return status;
}

/* Wait for a part without a limit, and settle it. */
static int bl_cuda_await(bl_cuda_copy *copy, bl_cuda_part *part, int cancelled)
{
    bl_cuda_engine *engine = copy->engine;
    if (part->settled)
        return 0;
    int status = part->mark.ended ? 0 : bl_cuda_wait(engine->cuda, part->mark.event);
    if (status < 0)
        return status;
    bl_cuda_hold_end(engine->windows, &copy->hold, &part->mark);
    bl_cuda_settle(copy, part, cancelled);
    return 0;
}

static void bl_cuda_free_copy(bl_cuda_copy *copy)
{
    for (bl_cuda_part *part = copy->parts, *next; part != NULL; part = next) {
        next = part->next;
        free(part);
    }
    free(copy->hold.windows);
    free(copy->pieces);
    free(copy->chunks);
    free(copy->reached);
    free(copy);
}

/* Remove a copy from its engine. */
static void bl_cuda_unlink(bl_cuda_engine *engine, const bl_cuda_copy *copy)
{
    bl_cuda_copy **link = &engine->copies;
    while (*link != copy)
        link = &(*link)->next;
    *link = copy->next;
    if (engine->end == &copy->next)
        engine->end = link;
}

/* Free the dropped copies that have ended. */
static void bl_cuda_reap(bl_cuda_engine *engine)
{
    for (bl_cuda_copy *copy = engine->copies, *next; copy != NULL; copy = next) {
        int ended = bl_host_load(&copy->hold.dropped) != 0;
        next = copy->next;
        for (bl_cuda_part *part = copy->parts; part != NULL && ended; part = part->next)
            ended = bl_cuda_poll_part(copy, part) == 1;
        if (ended) {
            bl_cuda_hold_close(engine->windows, &copy->hold);
            bl_cuda_unlink(engine, copy);
            bl_cuda_free_copy(copy);
        }
    }
}

/* ---- Starts of parts */

/* Take a bounce buffer, after waiting for the oldest parts that have one. */
static int bl_cuda_take_bounce(bl_cuda_engine *engine, bl_cuda_part *part, uint64_t size)
{
    int status = 0;
    for (bl_cuda_copy *copy = engine->copies; copy != NULL; copy = copy->next)
        for (bl_cuda_part *old = copy->parts; old != NULL; old = old->next)
            if (old != part && old->bounce != NULL && status == 0 && engine->bounce_used > 0 &&
                engine->bounce_used + size > engine->settings.bounce_size)
                status = bl_cuda_await(copy, old, 0);
    if (status == 0)
        status = bl_cuda_take(engine, size, &part->bounce);
    if (status == 0)
        engine->bounce_used += part->bounce_size = size;
    return status;
}

/* Place the bounced chunks of a part in its buffer. Returns the addresses for bl_spans_make(), or
 * NULL without memory. */
static uint64_t *bl_cuda_places(const bl_plan *plan, const uint8_t *reached, uint64_t *size)
{
    uint64_t *places = calloc(plan->chunk_count, sizeof *places);
    *size = 0;
    for (uint32_t c = 0; places != NULL && c < plan->chunk_count; c++)
        if (!reached[c]) {
            places[c] = *size + 1; /* 0 means none */
            *size += bl_align_line(plan->chunks[c].length);
        }
    return places;
}

/* Write the spans of a part. */
static int bl_cuda_describe(bl_cuda_copy *copy, bl_cuda_part *part, const uint64_t *bounced)
{
    bl_cuda_engine *engine = copy->engine;
    bl_plan plan = part->plan;
    const int64_t *shared = NULL;
    int status = 0;
    if (plan.sparse && plan.checksums != NULL) {
        if ((status = bl_row_runs_make(&plan, &engine->runs)) < 0)
            return status;
        plan.pieces = engine->runs.pieces, plan.piece_count = engine->runs.count;
        shared = engine->runs.shared;
    }
    uint64_t room = plan.piece_count;
    for (uint32_t i = 0; i < plan.piece_count; i++)
        room += plan.pieces[i].length / BL_SPAN_SIZE;
    status = bl_cuda_take(engine, room * (sizeof(bl_span) + sizeof(uint32_t)), &part->table);
    if (status < 0)
        return status;
    bl_windows windows = bl_cuda_windows_of(engine->windows, engine->pool);
    part->sums = (uint32_t *)(part->table->host + room * sizeof(bl_span));
    int64_t count = bl_spans_make(&windows, &plan, bounced, shared, (int)copy->write,
                                  (bl_span *)part->table->host);
    part->span_count = count > 0 ? (uint64_t)count : 0;
    return count < 0 ? (int)count : 0;
}

/* Describe a part to the GPU, and do the CPU's work before it. */
static int bl_cuda_ready(bl_cuda_copy *copy, bl_cuda_part *part)
{
    const bl_cuda_settings *settings = &copy->engine->settings;
    uint64_t *places = NULL, size = 0;
    int status = 0;
    part->direct = part->plan.chunk_count;
    if (copy->reached != NULL) {
        const uint8_t *reached = copy->reached + (part->plan.chunk_base - copy->plan.chunk_base);
        if ((places = bl_cuda_places(&part->plan, reached, &size)) == NULL)
            return -ENOMEM;
        if (size > 0)
            status = bl_cuda_take_bounce(copy->engine, part, size);
        for (uint32_t c = 0; c < part->plan.chunk_count && status == 0; c++)
            if (places[c]) {
                places[c] += part->bounce->address - 1;
                part->direct--;
            }
    }
    if (status == 0)
        status = bl_cuda_describe(copy, part, places);
    free(places);
    if (status == 0 && !copy->write && part->direct > 0)
        status = bl_plan_maintenance(copy->engine->pool, &part->plan, settings->before_read,
                                     settings->threads);
    if (status == 0 && !copy->write && part->bounce != NULL)
        status = bl_cuda_bounce(copy, part);
    return status;
}

/* The arguments of a kernel (cuda/job.cuh). */
typedef struct bl_cuda_job {
    uint64_t spans, sums, tables, count;
} bl_cuda_job;

static int bl_cuda_launch(bl_cuda_copy *copy, const bl_cuda_part *part)
{
    bl_cuda_engine *engine = copy->engine;
    const bl_plan *plan = &part->plan;
    uint64_t size = 0, address = part->table->address;
    for (uint32_t i = 0; i < plan->piece_count; i++)
        size += plan->pieces[i].length;
    int half = size < (uint64_t)BL_CUDA_HALF_BELOW * plan->piece_count;
    int summed = plan->checksums != NULL;
    uint64_t kernel = engine->cuda->kernels[(copy->write ? 0 : 4) + 2 * half + summed];
    bl_cuda_job job = {address, address + (uint64_t)((uint8_t *)part->sums - part->table->host),
                       engine->cuda->tables[half], part->span_count};
    void *arguments[] = {&job};
    engine->stat.launches++;
    return bl_cuda_status(engine->cuda->api.cuLaunchKernel(
        kernel, engine->settings.blocks << summed, 1, 1, BL_CUDA_THREADS, 1, 1, 0, copy->stream,
        arguments, NULL));
}

/* Start a part, with an event unless the stream is being captured. launched is set to 1 if the GPU
 * may have work of it. */
static int bl_cuda_start_part(bl_cuda_copy *copy, bl_cuda_part *part, int captured, int *launched)
{
    bl_cuda_engine *engine = copy->engine;
    const bl_cuda_api *api = &engine->cuda->api;
    int status = bl_cuda_ready(copy, part);
    if (status == 0 && !part->table->event)
        status = bl_cuda_status(api->cuEventCreate(&part->table->event, BL_CUDA_EVENT_PLAIN));
    if (status == 0 && (status = bl_cuda_launch(copy, part)) == 0) {
        *launched = 1;
        part->mark.event = part->table->event;
        if (!captured)
            status = bl_cuda_status(api->cuEventRecord(part->mark.event, copy->stream));
    }
    if (status == 0 && !captured)
        bl_cuda_hold_add(engine->windows, &copy->hold, &part->mark);
    return status;
}

/* Return the bytes of a chunk that cross the link. */
static uint64_t bl_cuda_link_bytes(const bl_plan *plan, uint32_t c)
{
    uint64_t size = 0;
    if (!plan->sparse || plan->checksums != NULL)
        return plan->chunks[c].length;
    for (uint32_t i = plan->chunks[c].first - plan->piece_base;
         i < plan->piece_count && plan->pieces[i].chunk - plan->chunk_base == c; i++)
        size += plan->pieces[i].length;
    return size;
}

/* Return the chunk after the last one of a part that starts with a chunk. */
static uint32_t bl_cuda_cut(const bl_cuda_copy *copy, uint32_t first, uint32_t end)
{
    const bl_plan *plan = &copy->plan;
    const bl_cuda_settings *settings = &copy->engine->settings;
    uint64_t range = settings->range_size[copy->write], size = 0, bounced = 0;
    if (range >= UINT32_MAX && copy->reached == NULL)
        return end;
    for (uint32_t c = first; c < end; c++) {
        size += bl_cuda_link_bytes(plan, c);
        if (copy->reached != NULL && !copy->reached[c])
            bounced += bl_align_line(plan->chunks[c].length);
        if (c > first && (size > range || bounced > settings->bounce_size / 4))
            return c;
    }
    return end;
}

/* Return a range of a plan's chunks, with their pieces. */
static bl_plan bl_cuda_range(const bl_plan *plan, uint32_t first, uint32_t end)
{
    uint32_t start = plan->chunks[first].first - plan->piece_base;
    uint32_t until = end < plan->chunk_count ? plan->chunks[end].first - plan->piece_base
                                             : plan->piece_count;
    bl_plan range = *plan;
    range.pieces += start, range.chunks += first;
    if (plan->checksums != NULL)
        range.checksums += first;
    range.piece_count = until - start, range.chunk_count = end - first;
    range.piece_base += start, range.chunk_base += first;
    return range;
}

static bl_cuda_part *bl_cuda_add_part(bl_cuda_copy *copy, uint32_t first, uint32_t end)
{
    bl_cuda_part *part = calloc(1, sizeof *part);
    if (part == NULL)
        return NULL;
    part->plan = bl_cuda_range(&copy->plan, first, end);
    part->mark.ended = 1;       /* until it is held */
    *copy->end = part;
    copy->end = &part->next;
    copy->part_count++;
    return part;
}

/* Undo a failed start: cancel its parts, of which some may run, and whose last one may have no
 * event. Returns -EINPROGRESS if the end of its work cannot be shown. */
static int bl_cuda_undo(bl_cuda_copy *copy, bl_cuda_part *first, int launched)
{
    bl_cuda_engine *engine = copy->engine;
    if (launched && engine->cuda->api.cuStreamSynchronize(copy->stream) != 0) {
        bl_cuda_unlink(engine, copy); /* no other copy gets its buffers */
        engine->lost = 1;
        return -EINPROGRESS;
    }
    for (bl_cuda_part *part = first; part != NULL; part = part->next) {
        bl_cuda_hold_end(engine->windows, &copy->hold, &part->mark);
        bl_cuda_settle(copy, part, 1);
    }
    return 0;
}

static int bl_cuda_start_parts(bl_cuda_copy *copy, uint32_t first, uint32_t end, int captured)
{
    bl_cuda_part **begun = copy->end;
    int status = 0, launched = 0;
    bl_cuda_scope scope;
    if ((status = bl_cuda_enter(copy->engine->cuda, &scope)) < 0)
        return status;
    for (uint32_t until; first < end && status == 0; first = until) {
        until = captured ? end : bl_cuda_cut(copy, first, end);
        bl_cuda_part *part = bl_cuda_add_part(copy, first, until);
        status = part ? bl_cuda_start_part(copy, part, captured, &launched) : -ENOMEM;
    }
    if (status < 0 && bl_cuda_undo(copy, *begun, launched) < 0)
        status = -EINPROGRESS;
    bl_cuda_leave(copy->engine->cuda, &scope);
    return status;
}

int bl_cuda_start(bl_cuda_copy *copy, uint32_t first, uint32_t end, uint32_t last, uint32_t *parts)
{
    bl_cuda_engine *engine = copy->engine;
    const bl_plan *given = &copy->given;
    if (copy->pieces != NULL) {
        first = given->chunks[first].first - given->piece_base;
        end = end < given->chunk_count ? given->chunks[end].first - given->piece_base
                                       : given->piece_count;
    }
    pthread_mutex_lock(&engine->lock);
    parts[0] = copy->part_count;
    int status = engine->closed ? -ESHUTDOWN : bl_cuda_start_parts(copy, first, end, 0);
    parts[1] = copy->part_count;
    if (last && status != -EINPROGRESS)
        bl_cuda_hold_close(engine->windows, &copy->hold);
    pthread_mutex_unlock(&engine->lock);
    return status;
}

/* ---- Copies */

/* Make each piece of a plan of rows without checksums a chunk of its own: only the lines of rows
 * are bounced, not those between them. */
static int bl_cuda_split_rows(bl_cuda_copy *copy)
{
    bl_plan *plan = &copy->plan;
    uint64_t line = BL_LINE_SIZE - 1;
    copy->pieces = malloc((plan->piece_count + 1ull) * sizeof *copy->pieces);
    copy->chunks = malloc((plan->piece_count + 1ull) * sizeof *copy->chunks);
    if (copy->pieces == NULL || copy->chunks == NULL)
        return -ENOMEM;
    for (uint32_t i = 0; i < plan->piece_count; i++) {
        const bl_piece *piece = &plan->pieces[i];
        uint64_t start = piece->offset & ~line;
        copy->pieces[i] = *piece;
        copy->pieces[i].chunk = i;
        copy->chunks[i] = (bl_chunk){start, (uint32_t)(bl_piece_end(piece) - start), i};
    }
    plan->pieces = copy->pieces, plan->chunks = copy->chunks;
    plan->chunk_count = plan->piece_count;
    plan->piece_base = plan->chunk_base = 0;
    return 0;
}

/* Find the chunks that the GPU does not reach, because these windows are missing. */
static int bl_cuda_divide(bl_cuda_copy *copy, const uint8_t *missing)
{
    bl_cuda_engine *engine = copy->engine;
    bl_windows windows = bl_cuda_windows_of(engine->windows, engine->pool);
    uint64_t bounced = 0;
    int status = copy->plan.sparse && copy->plan.checksums == NULL ? bl_cuda_split_rows(copy) : 0;
    const bl_plan *plan = &copy->plan;
    if (status == 0 && (copy->reached = malloc(plan->chunk_count)) == NULL)
        status = -ENOMEM;
    if (status < 0)
        return status;
    bl_spans_reach(&windows, plan, missing, copy->reached);
    for (uint32_t i = 0; i < plan->piece_count; i++)
        if (!copy->reached[plan->pieces[i].chunk - plan->chunk_base])
            bounced += plan->pieces[i].length;
    engine->stat.direct_bytes -= bounced;
    engine->stat.bounced_bytes += bounced;
    engine->stat.bounced_copies++;
    bl_cuda_windows_missed(engine->windows, missing, bounced);
    return 0;
}

/* Check a copy's plan, and hold its windows. */
static int bl_cuda_admit(bl_cuda_copy *copy)
{
    bl_cuda_engine *engine = copy->engine;
    const bl_plan *plan = &copy->plan;
    bl_windows windows = bl_cuda_windows_of(engine->windows, engine->pool);
    if (bl_plan_check(engine->pool, plan) < 0 || (copy->write && plan->sparse))
        return -EINVAL;
    memset(engine->touched, 0, engine->windows->total);
    if (bl_spans_touch(&windows, plan, engine->touched) < 0)
        return -EXDEV;
    int64_t missing = bl_cuda_hold_take(engine->windows, &copy->hold, engine->touched);
    if (missing < 0)
        return (int)missing;
    for (uint32_t i = 0; i < plan->piece_count; i++)
        engine->stat.direct_bytes += plan->pieces[i].length;
    return missing > 0 ? bl_cuda_divide(copy, engine->touched) : 0;
}

/* Make a copy for a stream that is being captured, or is not. The engine is locked. */
static int bl_cuda_copy_make(bl_cuda_engine *engine, const bl_plan *plan, uint32_t write,
                             uint64_t stream, int captured, bl_cuda_copy **out)
{
    int32_t capturing = 0;
    int status = 0;
    if (engine->closed)
        return -ESHUTDOWN;
    bl_cuda_reap(engine);
    if (stream == UINT64_MAX)
        stream = engine->settings.stream;
    if (stream == UINT64_MAX)
        stream = engine->streams[write];
    else if (stream != 0)
        status = bl_cuda_capturing(engine->cuda, stream, &capturing);
    if (status < 0 || (capturing != 0) != captured)
        return status < 0 ? status : -EBUSY;
    bl_cuda_copy *copy = calloc(1, sizeof *copy);
    if (copy == NULL)
        return -ENOMEM;
    copy->hold.cuda = engine->cuda;
    copy->engine = engine;
    copy->plan = copy->given = *plan;
    copy->write = write;
    copy->stream = stream;
    copy->end = &copy->parts;
    *engine->end = copy;
    engine->end = &copy->next;
    bl_host_add(&engine->users, 1);
    status = bl_cuda_admit(copy);
    if (status < 0)
        bl_cuda_drop(copy);
    else
        *out = copy;
    return status;
}

int bl_cuda_prepare(bl_cuda_engine *engine, const bl_plan *plan, uint32_t write, uint64_t stream,
                    bl_cuda_copy **out)
{
    pthread_mutex_lock(&engine->lock);
    int status = bl_cuda_copy_make(engine, plan, write, stream, 0, out);
    pthread_mutex_unlock(&engine->lock);
    return status;
}

/* Drop a use of the engine, and free it after the last one. */
static void bl_cuda_leave_engine(bl_cuda_engine *engine)
{
    if (bl_host_add(&engine->users, UINT64_MAX) > 0 || !engine->closed || engine->lost)
        return;                 /* kernels may run, or this is a forked child */
    for (bl_cuda_copy *copy = engine->copies, *next; copy != NULL; copy = next) {
        next = copy->next;
        bl_cuda_free_copy(copy);
    }
    free(engine->touched);
    bl_row_runs_free(&engine->runs);
    free(engine);
}

void bl_cuda_drop(bl_cuda_copy *copy)
{
    bl_cuda_engine *engine = copy->engine;
    bl_host_store(&copy->hold.dropped, 1); /* another thread may free it now */
    bl_cuda_leave_engine(engine);
}

void bl_cuda_engine_free(bl_cuda_engine *engine) { bl_cuda_leave_engine(engine); }

/* Return a part by its number. */
static bl_cuda_part *bl_cuda_part_at(const bl_cuda_copy *copy, uint32_t number)
{
    bl_cuda_part *part = copy->parts;
    while (number-- > 0)
        part = part->next;
    return part;
}

int bl_cuda_done(bl_cuda_copy *copy, uint32_t first, uint32_t end)
{
    int status = 1;
    pthread_mutex_lock(&copy->engine->lock);
    bl_cuda_part *part = first < end ? bl_cuda_part_at(copy, first) : NULL;
    for (; first < end; first++, part = part->next) {
        int ended = bl_cuda_poll_part(copy, part);
        if (ended <= 0 && status > 0)
            status = ended;
    }
    pthread_mutex_unlock(&copy->engine->lock);
    return status;
}

static uint64_t bl_cuda_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Wait for a part until a time. */
static int bl_cuda_wait_part(bl_cuda_copy *copy, bl_cuda_part *part, uint64_t until_ns)
{
    bl_cuda_engine *engine = copy->engine;
    uint64_t begin = bl_cuda_now_ns(), nap = BL_CUDA_NAP_NS;
    for (;;) {
        pthread_mutex_lock(&engine->lock);
        int status = bl_cuda_poll_part(copy, part);
        uint64_t event = part->mark.event;
        pthread_mutex_unlock(&engine->lock);
        if (status != 0)
            return status < 0 ? status : 0;
        uint64_t now = bl_cuda_now_ns();
        if (now >= until_ns)
            return -ETIMEDOUT;
        if (now - begin < BL_CUDA_SPIN_NS)
            continue;
        if (until_ns == UINT64_MAX) {
            /* If another thread settles the part meanwhile, this waits for another part's event. */
            if ((status = bl_cuda_wait(engine->cuda, event)) < 0)
                return status;
            continue;
        }
        struct timespec sleep = {0, (long)bl_min(nap, until_ns - now)};
        nanosleep(&sleep, NULL);
        nap = bl_min(2 * nap, BL_CUDA_NAP_MAX_NS);
    }
}

int64_t bl_cuda_finish(bl_cuda_copy *copy, uint32_t first, uint32_t end, uint64_t timeout_ns)
{
    uint64_t now = bl_cuda_now_ns();
    uint64_t until = timeout_ns < UINT64_MAX - now ? now + timeout_ns : UINT64_MAX;
    bl_cuda_part *begin = first < end ? bl_cuda_part_at(copy, first) : NULL, *part = begin;
    int64_t bad = 0;
    for (uint32_t i = first; i < end; i++, part = part->next) {
        int status = bl_cuda_wait_part(copy, part, until);
        if (status < 0)
            return status;
    }
    part = begin;
    for (uint32_t i = first; i < end; i++, part = part->next) {
        if (part->status < 0)
            return part->status;
        bad += part->bad;
    }
    return bad;
}

/* ---- Callers in C */

static int bl_cuda_table_start(void *engine, const bl_plan *plan, int write, void **copy)
{
    bl_cuda_copy *made;
    uint32_t parts[2];
    int status = bl_cuda_prepare(engine, plan, write != 0, UINT64_MAX, &made);
    if (status < 0)
        return status;
    *copy = made;
    status = bl_cuda_start(made, 0, plan->chunk_count, 1, parts);
    if (status < 0 && status != -EINPROGRESS)
        bl_cuda_drop(made);
    return status;
}

static int bl_cuda_table_wait(void *engine, void *copy)
{
    (void)engine;
    bl_cuda_copy *made = copy;
    int64_t bad = bl_cuda_finish(made, 0, made->part_count, UINT64_MAX);
    if (bad <= -BL_CUDA_STATUS)
        return -EINPROGRESS; /* the end of its kernels is unknown */
    bl_cuda_drop(made);
    return bad > 0 ? -EBADMSG : (int)bad;
}

bl_engine bl_cuda_engine_table(bl_cuda_engine *engine)
{
    return (bl_engine){engine, bl_cuda_table_start, bl_cuda_table_wait, {0}};
}

/* ---- Graphs */

int bl_cuda_capture(bl_cuda_engine *engine, const bl_plan *plan, uint32_t write, uint64_t stream,
                    bl_cuda_copy **out)
{
    bl_cuda_copy *copy;
    pthread_mutex_lock(&engine->lock);
    int status = bl_cuda_copy_make(engine, plan, write, stream, 1, &copy);
    if (status == 0) {
        status = copy->reached != NULL ? -EAGAIN
                                       : bl_cuda_start_parts(copy, 0, plan->chunk_count, 1);
        if (status < 0)
            bl_cuda_drop(copy);
        else
            *out = copy;
    }
    pthread_mutex_unlock(&engine->lock);
    return status;
}

int bl_cuda_replay(bl_cuda_copy *copy)
{
    const bl_cuda_settings *settings = &copy->engine->settings;
    return copy->write ? 0
                       : bl_plan_maintenance(copy->engine->pool, &copy->plan,
                                             settings->before_read, settings->threads);
}

int64_t bl_cuda_replayed(bl_cuda_copy *copy)
{
    bl_cuda_part *part = copy->parts;
    pthread_mutex_lock(&copy->engine->lock);
    part->bad = 0;
    int status = part->settled ? -ECANCELED : bl_cuda_complete(copy, part);
    int64_t bad = part->bad;
    pthread_mutex_unlock(&copy->engine->lock);
    return status < 0 ? status : bad;
}

/* ---- Engines */

int bl_cuda_engine_open(bl_cuda *cuda, bl_cuda_windows *windows, const bl_pool *pool,
                        const bl_cuda_settings *settings, bl_cuda_engine **out)
{
    bl_cuda_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL || (engine->touched = malloc(windows->total)) == NULL) {
        free(engine);
        return -ENOMEM;
    }
    engine->cuda = cuda, engine->windows = windows, engine->pool = pool;
    engine->settings = *settings;
    engine->end = &engine->copies;
    engine->users = 1;
    pthread_mutex_init(&engine->lock, NULL);
    int status = bl_cuda_stream(cuda, BL_CUDA_URGENT, &engine->streams[0]);
    if (status == 0 && (status = bl_cuda_stream(cuda, 0, &engine->streams[1])) < 0)
        bl_cuda_end_stream(cuda, engine->streams[0]);
    if (status == 0) {
        *out = engine;
        return 0;
    }
    free(engine->touched);
    free(engine);
    return status;
}

void bl_cuda_engine_stat(const bl_cuda_engine *engine, bl_cuda_stat *out) { *out = engine->stat; }

/* Wait for all kernels, and cancel what the CPU would do after them. */
static int bl_cuda_drain(bl_cuda_engine *engine)
{
    int status = 0;
    for (int i = 0; i < 2 && status == 0; i++)
        status = engine->cuda->api.cuStreamSynchronize(engine->streams[i]);
    for (bl_cuda_copy *copy = engine->copies; copy != NULL && status == 0; copy = copy->next) {
        for (bl_cuda_part *part = copy->parts; part != NULL && status == 0; part = part->next)
            status = bl_cuda_await(copy, part, 1);
    }
    return status;
}

static void bl_cuda_free_all(bl_cuda_engine *engine)
{
    for (bl_cuda_copy *copy = engine->copies; copy != NULL; copy = copy->next)
        bl_cuda_hold_close(engine->windows, &copy->hold);
    for (int i = 0; i < 2; i++)
        bl_cuda_end_stream(engine->cuda, engine->streams[i]);
    for (int class = 0; class < BL_CUDA_CLASSES; class++)
        for (bl_cuda_buffer *buffer; (buffer = engine->free[class]) != NULL;) {
            engine->free[class] = buffer->next;
            if (buffer->event)
                bl_cuda_free_event(engine->cuda, buffer->event);
            bl_cuda_unpin(engine->cuda, buffer->host);
            free(buffer);
        }
}

int bl_cuda_engine_close(bl_cuda_engine *engine)
{
    bl_cuda_scope scope;
    pthread_mutex_lock(&engine->lock);
    if (!engine->closed) {
        engine->closed = 1;
        if (bl_cuda_enter(engine->cuda, &scope) < 0) {
            engine->lost = 1;
        } else {
            engine->lost |= bl_cuda_drain(engine) != 0;
            if (!engine->lost)
                bl_cuda_free_all(engine);
            bl_cuda_leave(engine->cuda, &scope);
        }
    }
    int status = engine->lost ? -EINPROGRESS : 0;
    pthread_mutex_unlock(&engine->lock);
    return status;
}

#endif
