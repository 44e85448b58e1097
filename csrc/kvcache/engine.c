/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Copies of a batch by its engine (kvcache/engine.h).
 *
 *   plan a part --> for each piece of it: admission by the link --> start --> wait --> release
 *
 * Up to BL_KV_IN_FLIGHT pieces are in flight: one is being copied, and the others bridge the time
 * until this thread has planned and started another. They end in the order in which they were
 * started. A piece that the link does not admit while others are in flight waits until the oldest
 * of them has ended and released its tokens. Without a link, a piece is a whole part.
 */
#include "kvcache/engine.h"

#include <errno.h>
#include <stdlib.h>

#include "base/host_atomic.h"
#include "base/minmax.h"
#include "coherence/guard.h"
#include "format/payload.h"
#include "iosched/io_queue.h"
#include "transfer/plan.h"

enum {
    BL_KV_PART_SIZE = 64 << 20, /* bytes; copying them takes longer than planning as many */
    BL_KV_FIRST_PART = 8,       /* the first part is smaller by this factor, because the engine
                                 * idles until it is planned */
    BL_KV_LOOK_NS = 50 * 1000   /* of waiting for the link while a piece is in flight */
};

/* A part of a batch: blocks of the list, and one allocation with the arrays of their plan. */
typedef struct bl_kv_part {
    bl_plan plan;
    uint32_t in_flight;         /* pieces */
    uint32_t is_started;        /* 1: all pieces have started */
} bl_kv_part;

/* A piece in flight: some chunks of a part. */
typedef struct bl_kv_flight {
    bl_kv_part *part;
    void *copy;                 /* of the engine */
    bl_io_request request;
} bl_kv_flight;

/* The copies of some blocks of a batch. */
typedef struct bl_kv_copies {
    const bl_session *session;
    const bl_kv_batch *batch;
    const bl_kv_work *work;
    const bl_engine *engine;
    bl_io_queue *io_queue;      /* of the link that admits the pieces; or NULL */
    const uint32_t *blocks;     /* the list: indices in the batch */
    uint32_t count;
    uint32_t *sums;             /* of each chunk of the listed blocks; or NULL */
    int write;
    bl_kv_flight flights[BL_KV_IN_FLIGHT]; /* a ring */
    uint32_t oldest;
    uint32_t in_flight;
    int status;                 /* 0, or the error of the first piece that failed; -EINPROGRESS if
                                 * any is unsettled */
} bl_kv_copies;

/* Returns the size of the plans' chunks. Without checksums it only bounds a piece. */
static uint64_t bl_kv_chunk_size(const bl_kv_copies *copies)
{
    uint64_t size = copies->io_queue ? copies->engine->piece_size[copies->write] : UINT64_MAX;
    if (copies->sums != NULL)
        return copies->batch->chunk_size;
    return bl_min(copies->batch->length, bl_max(size & ~(uint64_t)(BL_LINE_SIZE - 1),
                                                BL_LINE_SIZE));
}

/* ---- Plans. */

static bl_kv_part *bl_kv_part_make(uint64_t piece_count, uint64_t chunk_count)
{
    bl_kv_part *part = malloc(sizeof *part + piece_count * sizeof(bl_piece) +
                              chunk_count * (sizeof(bl_chunk) + sizeof(uint32_t)));
    if (part == NULL)
        return NULL;
    bl_piece *pieces = (bl_piece *)(part + 1);
    bl_chunk *chunks = (bl_chunk *)(pieces + piece_count);
    uint32_t *sums = (uint32_t *)(chunks + chunk_count);
    *part = (bl_kv_part){.plan = {.pieces = pieces, .chunks = chunks, .checksums = sums}};
    return part;
}

/* Plan count blocks of the list. Returns NULL if there is no memory. */
static bl_kv_part *bl_kv_plan_blocks(const bl_kv_copies *copies, uint32_t first, uint32_t count)
{
    const bl_kv_batch *batch = copies->batch;
    uint64_t chunk_size = bl_kv_chunk_size(copies);
    uint64_t chunks = (batch->length + chunk_size - 1) / chunk_size;
    uint64_t cuts = batch->fragment_count + chunks + batch->length / BL_STRIPE_SIZE + 1;
    bl_kv_part *part = bl_kv_part_make(count * cuts, count * chunks);
    if (part == NULL)
        return NULL;
    for (uint32_t k = first; k < first + count; k++) {
        const bl_fragment *fragments = batch->fragments +
                                       (size_t)copies->blocks[k] * batch->fragment_count;
        bl_plan_source source = {copies->work->records[copies->blocks[k]].offset, batch->length,
                                 chunk_size, &fragments->address, &fragments->size, 2};
        bl_plan_add(&part->plan, (bl_piece *)part->plan.pieces, (bl_chunk *)part->plan.chunks,
                    &source);
    }
    part->plan.checksums = copies->sums ? copies->sums + first * chunks : NULL;
    return part;
}

/* Plan the rows of count blocks of the list. Returns NULL if there is no memory; the plan may be
 * empty. */
static bl_kv_part *bl_kv_plan_rows(const bl_kv_copies *copies, uint32_t first, uint32_t count)
{
    const bl_kv_batch *batch = copies->batch;
    uint64_t chunk_size = copies->sums ? batch->chunk_size : batch->length, row_count = 0;
    uint64_t *offsets = malloc(count * sizeof *offsets + batch->row_count * sizeof(bl_row) +
                               batch->count * sizeof(uint32_t));
    if (offsets == NULL)
        return NULL;
    bl_row *rows = (bl_row *)(offsets + count);
    uint32_t *places = (uint32_t *)(rows + batch->row_count); /* of each block in the list */
    memset(places, 0xff, batch->count * sizeof *places);
    for (uint32_t k = 0; k < count; k++) {
        places[copies->blocks[first + k]] = k;
        offsets[k] = copies->work->records[copies->blocks[first + k]].offset;
    }
    for (uint64_t i = 0; i < batch->row_count; i++) {
        rows[row_count] = batch->rows[i];
        rows[row_count].block = places[batch->rows[i].block];
        row_count += rows[row_count].block != UINT32_MAX;
    }
    uint64_t pieces = bl_plan_rows_count(rows, row_count, offsets, chunk_size);
    const uint32_t *sums = copies->sums ? copies->sums + (size_t)first * copies->work->chunk_count
                                        : NULL;
    bl_kv_part *part = bl_kv_part_make(pieces, pieces);
    int64_t chunks = part == NULL ? -ENOMEM
                                  : bl_plan_rows(rows, row_count, offsets, batch->length,
                                                 chunk_size, sums, (bl_piece *)part->plan.pieces,
                                                 (bl_chunk *)part->plan.chunks,
                                                 part->plan.checksums);
    free(offsets);
    if (chunks < 0) {
        free(part);
        return NULL;
    }
    part->plan.piece_count = (uint32_t)pieces;
    part->plan.chunk_count = (uint32_t)chunks;
    part->plan.checksums = sums ? part->plan.checksums : NULL;
    part->plan.sparse = 1;
    return part;
}

/* Returns 1 if the fragments of each listed block have its length, which plans take for granted. */
static int bl_kv_fragments_fit(const bl_kv_copies *copies)
{
    const bl_kv_batch *batch = copies->batch;
    for (uint32_t k = 0; batch->rows == NULL && k < copies->count; k++) {
        const bl_fragment *fragments = batch->fragments +
                                       (size_t)copies->blocks[k] * batch->fragment_count;
        uint64_t length = 0;
        for (uint32_t f = 0; f < batch->fragment_count; f++)
            length += fragments[f].size;
        if (length != batch->length)
            return 0;
    }
    return 1;
}

/* ---- Pieces. */

static uint32_t bl_kv_chunk_end(const bl_plan *plan, uint32_t chunk)
{
    return chunk + 1 < plan->chunk_count ? plan->chunks[chunk + 1].first : plan->piece_count;
}

/* Add the bytes of a range of the pool to those of their memory devices. Returns its size. */
static uint64_t bl_kv_count_range(const bl_io_queue *io_queue, uint64_t offset, uint64_t size,
                                  uint64_t *device_bytes)
{
    uint64_t end = offset + size, rest;
    if (io_queue->queues[0]->device_count > 0)
        for (uint64_t at = offset; at < end; at += rest) {
            rest = bl_min(end - at, bl_stripe_rest(at));
            device_bytes[bl_interleave_place(&io_queue->map, at).device] += rest;
        }
    return size;
}

/* Add the bytes of a chunk that cross the link: if rows have checksums to compare, the whole chunk
 * does. Returns their number. */
static uint64_t bl_kv_count_chunk(const bl_io_queue *io_queue, const bl_plan *plan, uint32_t chunk,
                                  uint64_t *device_bytes)
{
    if (plan->sparse && plan->checksums != NULL)
        return bl_kv_count_range(io_queue, plan->chunks[chunk].offset, plan->chunks[chunk].length,
                                 device_bytes);
    uint64_t size = 0;
    for (uint32_t i = plan->chunks[chunk].first; i < bl_kv_chunk_end(plan, chunk); i++)
        size += bl_kv_count_range(io_queue, plan->pieces[i].offset, plan->pieces[i].length,
                                  device_bytes);
    return size;
}

/* Wait for the oldest piece in flight. */
static void bl_kv_wait_oldest(bl_kv_copies *copies)
{
    bl_kv_flight *flight = &copies->flights[copies->oldest];
    int status = copies->engine->wait(copies->engine->context, flight->copy);
    if (copies->io_queue != NULL)
        bl_io_queue_release(copies->io_queue, &flight->request);
    copies->oldest = (copies->oldest + 1) % BL_KV_IN_FLIGHT;
    copies->in_flight--;
    if (status == -EINPROGRESS || copies->status == 0)
        copies->status = status;
    if (copies->status == -EINPROGRESS) /* of this piece or another one: no plan is freed */
        return;
    if (--flight->part->in_flight == 0 && flight->part->is_started)
        free(flight->part);
}

/* Wait until the link admits a piece. Returns 0 or -ECANCELED. */
static int bl_kv_admit(bl_kv_copies *copies, bl_io_request *request, const uint64_t *device_bytes)
{
    int status;
    do {
        status = bl_io_queue_acquire(copies->io_queue, request, device_bytes,
                                     copies->in_flight > 0 ? BL_KV_LOOK_NS : UINT64_MAX);
        if (status == -EAGAIN && copies->in_flight > 0)
            bl_kv_wait_oldest(copies);
    } while (status == -EAGAIN);
    return status;
}

static int bl_kv_cancelled(const bl_kv_batch *batch)
{
    return batch->cancelled != NULL && bl_host_load_short(batch->cancelled) ? -ECANCELED : 0;
}

/* Start the piece of a part that begins with a chunk, as the link admits it. Returns the chunk
 * after it; a failure sets copies->status. */
static uint32_t bl_kv_start_piece(bl_kv_copies *copies, bl_kv_part *part, uint32_t first, int last)
{
    if (copies->in_flight == BL_KV_IN_FLIGHT)
        bl_kv_wait_oldest(copies);
    if (copies->status == 0)
        copies->status = bl_kv_cancelled(copies->batch);
    if (copies->status < 0)
        return part->plan.chunk_count;
    const bl_plan *plan = &part->plan;
    bl_kv_flight *flight = &copies->flights[(copies->oldest + copies->in_flight) %
                                            BL_KV_IN_FLIGHT];
    *flight = (bl_kv_flight){.part = part, .request = {.node = copies->batch->transfer_class,
                                                       .direction = (uint8_t)copies->write}};
    uint32_t end = plan->chunk_count;
    if (copies->io_queue != NULL) {
        uint64_t device_bytes[BL_LINK_DEVICES] = {0}, more[BL_LINK_DEVICES], size = 0;
        for (end = first; end < plan->chunk_count; end++) {
            memcpy(more, device_bytes, sizeof more);
            uint64_t chunk = bl_kv_count_chunk(copies->io_queue, plan, end, more);
            if (end > first && size + chunk > copies->engine->piece_size[copies->write])
                break;
            memcpy(device_bytes, more, sizeof more);
            size += chunk;
        }
        flight->request.bytes = size;
        flight->request.again = !last || end < plan->chunk_count;
        int status = bl_kv_admit(copies, &flight->request, device_bytes);
        if (copies->status == 0)
            copies->status = status;
    }
    uint32_t from = plan->chunks[first].first, until = bl_kv_chunk_end(plan, end - 1);
    bl_plan piece = {plan->pieces + from, plan->chunks + first,
                     plan->checksums ? plan->checksums + first : NULL, until - from, end - first,
                     from, first, plan->sparse, 0};
    if (copies->status == 0)
        copies->status = copies->engine->start(copies->engine->context, &piece, copies->write,
                                               &flight->copy);
    if (copies->status == 0) {
        copies->in_flight++;
        part->in_flight++;
    } else if (copies->io_queue != NULL) {
        bl_io_queue_release(copies->io_queue, &flight->request);
    }
    return end;
}

/* Copy the blocks [first, end) of the list. Returns 0 or an error; nothing is in flight then,
 * except after -EINPROGRESS. */
static int bl_kv_copies_run(bl_kv_copies *copies, uint32_t first, uint32_t end)
{
    uint64_t most = bl_max(BL_KV_PART_SIZE / copies->batch->length, 1);
    uint64_t size = copies->batch->rows ? end - first : bl_max(most / BL_KV_FIRST_PART, 1);
    copies->status = bl_kv_fragments_fit(copies) ? 0 : -EINVAL;
    for (uint64_t at = first; at < end && copies->status == 0;
         at += size, size = bl_min(2 * size, most)) {
        uint32_t count = (uint32_t)bl_min(size, end - at);
        bl_kv_part *part = copies->batch->rows ? bl_kv_plan_rows(copies, (uint32_t)at, count)
                                               : bl_kv_plan_blocks(copies, (uint32_t)at, count);
        if (part == NULL)
            copies->status = -ENOMEM;
        for (uint32_t chunk = 0; copies->status == 0 && chunk < part->plan.chunk_count;)
            chunk = bl_kv_start_piece(copies, part, chunk, at + count == end);
        if (part != NULL)
            part->is_started = 1;
        if (part != NULL && part->in_flight == 0 && copies->status != -EINPROGRESS)
            free(part);
    }
    while (copies->in_flight > 0)
        bl_kv_wait_oldest(copies);
    return copies->status;
}

/* ---- Writing. */

/* A range within one page of the pool. */
typedef struct bl_kv_page {
    const bl_memory *memory;
    uint64_t offset;
    uint64_t size;
} bl_kv_page;

static int bl_kv_flush_guarded(void *context)
{
    const bl_kv_page *page = context;
    bl_invalidate(page->memory, page->offset, page->size);
    return 0;
}

/* Flush all blocks of the batch as bl_device_written() does. The engine has failed or was
 * interrupted, and none of its copies is in progress. Lines that its device wrote must be written
 * back from this host's cache before the grants are aborted: later they would overwrite the next
 * owner's bytes. A fault on one page does not skip the others. */
static void bl_kv_flush(const bl_memory *memory, const bl_kv_batch *batch, const bl_kv_work *work)
{
    uint64_t size = bl_checksums_offset(0, batch->length);
    bl_fence_full(memory); /* no flush before the load that saw the device's end */
    for (uint32_t k = 0; k < work->count; k++)
        for (uint64_t at = 0; at < size; at += BL_PAGE_SIZE) {
            uint64_t rest = size - at < BL_PAGE_SIZE ? size - at : BL_PAGE_SIZE;
            bl_kv_page page = {memory, work->records[work->index[k]].offset + at, rest};
            bl_guarded(memory, bl_kv_flush_guarded, &page);
        }
    bl_fence_full(memory); /* the flushes are complete before the call that aborts */
}

/* Stream the checksums of all written blocks. */
static int bl_kv_sums_guarded(void *context)
{
    const bl_kv_copies *copies = context;
    bl_kv_work *work = (bl_kv_work *)copies->work;
    for (uint32_t k = 0; k < copies->count; k++) {
        memcpy(work->checksums, copies->sums + (size_t)k * work->chunk_count,
               work->chunk_count * sizeof *work->checksums);
        work->commits[k].checksums_crc =
            bl_checksums_write(&copies->session->pool->memory,
                               work->records[copies->blocks[k]].offset, copies->batch, work);
    }
    return 0;
}

int bl_kv_engine_write(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work)
{
    bl_kv_copies copies = {.session = session, .batch = batch, .work = work,
                           .engine = batch->engine, .io_queue = batch->io_queue,
                           .blocks = work->index, .count = work->count, .write = 1};
    size_t sums = (size_t)work->count * work->chunk_count * sizeof *copies.sums;
    copies.sums = sums > 0 ? malloc(sums) : NULL;
    int status = sums > 0 && copies.sums == NULL ? -ENOMEM
                                                 : bl_kv_copies_run(&copies, 0, copies.count);
    if (status == -EINPROGRESS) {
        bl_session_leave(session, work->under.nonce); /* the grants are neither committed nor
                                                       * aborted (D15) */
        return status;                                /* sums are never freed */
    }
    if (status == 0)
        status = bl_kv_cancelled(batch);
    if (status < 0)
        bl_kv_flush(&session->pool->memory, batch, work);
    else if (sums > 0)
        status = bl_guarded(&session->pool->memory, bl_kv_sums_guarded, &copies);
    free(copies.sums);
    return status;
}

/* ---- Reading. */

/* The CPU as an engine, for rows. It pays for its bytes by itself. */
typedef struct bl_kv_cpu {
    const bl_session *session;
    const bl_kv_batch *batch;
    int status;
} bl_kv_cpu;

static int bl_kv_cpu_start(void *context, const bl_plan *plan, int write, void **copy)
{
    bl_kv_cpu *cpu = context;
    (void)write; /* rows are only read */
    cpu->status = bl_plan_read(cpu->session->pool, plan, cpu->batch->settings,
                               cpu->batch->io_queue, cpu->batch->transfer_class);
    *copy = cpu;
    return 0;
}

static int bl_kv_cpu_wait(void *context, void *copy)
{
    (void)copy;
    return ((bl_kv_cpu *)context)->status;
}

/* The list of the blocks to read. */
typedef struct bl_kv_wanted {
    const bl_session *session;
    bl_kv_work *work;
    uint8_t *states;
    uint32_t first;
    uint32_t end;
    uint32_t *blocks;           /* result: their indices */
    uint32_t *sums;             /* result: of each chunk of these; or NULL */
    uint32_t count;             /* result */
} bl_kv_wanted;

static int bl_kv_wanted_guarded(void *context)
{
    bl_kv_wanted *wanted = context;
    bl_kv_work *work = wanted->work;
    for (uint32_t i = wanted->first; i < wanted->end; i++) {
        if (wanted->states[i] != BL_BLOCK_HIT)
            continue;
        if (wanted->sums && bl_checksums_read(wanted->session, &work->entries[i], work) < 0) {
            wanted->states[i] = BL_KV_DAMAGED;
            continue;
        }
        if (wanted->sums)
            memcpy(wanted->sums + (size_t)wanted->count * work->chunk_count, work->checksums,
                   work->chunk_count * sizeof *wanted->sums);
        wanted->blocks[wanted->count++] = i;
    }
    return 0;
}

/* Read the listed blocks. If a checksum differs, each is read by itself. */
static int bl_kv_wanted_read(bl_kv_copies *copies, uint8_t *states)
{
    int status = bl_kv_copies_run(copies, 0, copies->count);
    if (status != -EBADMSG)
        return status;
    for (uint32_t k = 0; k < copies->count; k++) {
        status = bl_kv_copies_run(copies, k, k + 1);
        if (status == -EBADMSG)
            states[copies->blocks[k]] = BL_KV_DAMAGED;
        else if (status < 0)
            return status;
    }
    return 0;
}

int bl_kv_engine_read(const bl_session *session, const bl_kv_batch *batch, bl_kv_work *work,
                      uint32_t first, uint32_t count, uint8_t *states)
{
    bl_kv_cpu cpu = {session, batch, 0};
    bl_engine by_cpu = {.context = &cpu, .start = bl_kv_cpu_start, .wait = bl_kv_cpu_wait};
    int checked = batch->check_checksums && work->chunk_count > 0;
    size_t sums = (size_t)count * work->chunk_count * sizeof(uint32_t);
    bl_kv_wanted wanted = {session, work, states, first, first + count,
                           malloc(count * sizeof(uint32_t) + 1), checked ? malloc(sums) : NULL, 0};
    bl_kv_copies copies = {.session = session, .batch = batch, .work = work,
                           .engine = batch->engine ? batch->engine : &by_cpu,
                           .io_queue = batch->engine ? batch->io_queue : NULL,
                           .blocks = wanted.blocks, .sums = wanted.sums};
    int status = wanted.blocks && (wanted.sums || !checked) ? 0 : -ENOMEM;
    if (status == 0)
        status = bl_guarded(&session->pool->memory, bl_kv_wanted_guarded, &wanted);
    copies.count = wanted.count;
    if (status == 0)
        status = bl_kv_wanted_read(&copies, states);
    free(wanted.blocks);
    if (status != -EINPROGRESS) /* else the engine may still compare them */
        free(wanted.sums);
    return status;
}
