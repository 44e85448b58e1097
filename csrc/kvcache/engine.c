/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Copies of a batch by its engine (kvcache/engine.h).
 *
 *   plan --> start --> (plan and start the next part) --> wait --> checksums
 */
#include "kvcache/engine.h"

#include <errno.h>
#include <stdlib.h>

#include "base/minmax.h"
#include "coherence/guard.h"
#include "format/payload.h"
#include "transfer/plan.h"

enum {
    BL_KV_PART_SIZE = 64 << 20, /* bytes; copying them takes longer than planning as many */
    BL_KV_FIRST_PART = 8        /* the first part is smaller by this factor, because the engine
                                 * idles until it is planned */
};

/* A part of a batch, from its plan to the end of its copy. One allocation, with the arrays of the
 * plan. */
typedef struct bl_kv_part {
    struct bl_kv_part *next;
    const uint32_t *blocks;     /* their indices in the batch */
    uint32_t count;
    void *copy;                 /* of the engine, while it is in progress */
    bl_plan plan;
    uint32_t *sums;             /* of the plan's chunks */
} bl_kv_part;

/* The copies of some blocks of a batch. */
typedef struct bl_kv_copies {
    const bl_session *session;
    const bl_kv_batch *batch;
    bl_kv_work *work;
    const bl_engine *engine;
    const uint32_t *sums;       /* read: a row for each block, or NULL */
    int write;
    int summed;                 /* 1: chunks have checksums */
    bl_kv_part *first;
    bl_kv_part **last;          /* where the next part is linked */
} bl_kv_copies;

static uint64_t bl_kv_chunk_size(const bl_kv_copies *copies)
{
    return copies->summed ? copies->batch->chunk_size : copies->batch->length;
}

/* Allocate a part with arrays of this many pieces and chunks, and link it. */
static bl_kv_part *bl_kv_part_make(bl_kv_copies *copies, const uint32_t *blocks, uint32_t count,
                                   uint64_t piece_count, uint64_t chunk_count)
{
    uint64_t size = sizeof(bl_kv_part) + piece_count * sizeof(bl_piece) +
                    chunk_count * (sizeof(bl_chunk) + sizeof(uint32_t));
    bl_kv_part *part = malloc(size);
    if (part == NULL)
        return NULL;
    bl_piece *pieces = (bl_piece *)(part + 1);
    bl_chunk *chunks = (bl_chunk *)(pieces + piece_count);
    uint32_t *sums = (uint32_t *)(chunks + chunk_count);
    *part = (bl_kv_part){.blocks = blocks, .count = count, .sums = sums,
                         .plan = {.pieces = pieces, .chunks = chunks,
                                  .checksums = copies->summed ? sums : NULL}};
    *copies->last = part;
    copies->last = &part->next;
    return part;
}

/* Plan whole blocks. Returns NULL if there is no memory. */
static bl_kv_part *bl_kv_plan_blocks(bl_kv_copies *copies, const uint32_t *blocks, uint32_t count)
{
    const bl_kv_batch *batch = copies->batch;
    uint64_t chunk_size = bl_kv_chunk_size(copies);
    uint64_t per_block = (batch->length + chunk_size - 1) / chunk_size;
    uint64_t cuts = per_block + batch->length / BL_STRIPE_SIZE + 1;
    bl_kv_part *part = bl_kv_part_make(copies, blocks, count,
                                       count * (batch->fragment_count + cuts), count * per_block);
    if (part == NULL)
        return NULL;
    for (uint32_t k = 0; k < count; k++) {
        const bl_fragment *fragments = batch->fragments +
                                       (size_t)blocks[k] * batch->fragment_count;
        bl_plan_source source = {copies->work->records[blocks[k]].offset, batch->length, chunk_size,
                                 &fragments->address, &fragments->size, 2};
        bl_plan_add(&part->plan, (bl_piece *)part->plan.pieces, (bl_chunk *)part->plan.chunks,
                    &source);
        if (copies->sums != NULL)
            memcpy(part->sums + k * per_block, copies->sums + blocks[k] * per_block,
                   per_block * sizeof *part->sums);
    }
    return part;
}

/* Plan the rows of these blocks. Returns NULL if there is no memory; the plan may be empty. */
static bl_kv_part *bl_kv_plan_rows(bl_kv_copies *copies, const uint32_t *blocks, uint32_t count)
{
    const bl_kv_batch *batch = copies->batch;
    uint64_t chunk_size = bl_kv_chunk_size(copies), row_count = 0;
    size_t size = batch->count * sizeof(uint64_t) + batch->row_count * sizeof(bl_row);
    uint64_t *offsets = malloc(size);
    if (offsets == NULL)
        return NULL;
    bl_row *rows = (bl_row *)(offsets + batch->count);
    memset(offsets, 0xff, batch->count * sizeof *offsets); /* UINT64_MAX: not one of the blocks */
    for (uint32_t k = 0; k < count; k++)
        offsets[blocks[k]] = copies->work->records[blocks[k]].offset;
    for (uint64_t i = 0; i < batch->row_count; i++)
        if (offsets[batch->rows[i].block] != UINT64_MAX)
            rows[row_count++] = batch->rows[i];
    uint64_t pieces = bl_plan_rows_count(rows, row_count, offsets, chunk_size);
    bl_kv_part *part = bl_kv_part_make(copies, blocks, count, pieces, pieces);
    int64_t chunks = part == NULL ? -ENOMEM
                                  : bl_plan_rows(rows, row_count, offsets, batch->length,
                                                 chunk_size, copies->sums,
                                                 (bl_piece *)part->plan.pieces,
                                                 (bl_chunk *)part->plan.chunks, part->sums);
    free(offsets);
    if (chunks < 0)
        return NULL;
    part->plan.piece_count = (uint32_t)pieces;
    part->plan.chunk_count = (uint32_t)chunks;
    part->plan.sparse = 1;
    return part;
}

/* Returns 1 if the fragments of each block have its length, which plans take for granted. */
static int bl_kv_fragments_fit(const bl_kv_copies *copies, const uint32_t *blocks, uint32_t count)
{
    const bl_kv_batch *batch = copies->batch;
    for (uint32_t k = 0; batch->rows == NULL && k < count; k++) {
        const bl_fragment *fragments = batch->fragments +
                                       (size_t)blocks[k] * batch->fragment_count;
        uint64_t length = 0;
        for (uint32_t f = 0; f < batch->fragment_count; f++)
            length += fragments[f].size;
        if (length != batch->length)
            return 0;
    }
    return 1;
}

/* Plan and start all parts. Returns 0, or the error of the first that could not start. */
static int bl_kv_start(bl_kv_copies *copies, const uint32_t *blocks, uint32_t count)
{
    uint64_t most = bl_max(BL_KV_PART_SIZE / copies->batch->length, 1);
    uint64_t size = copies->batch->rows ? count : bl_max(most / BL_KV_FIRST_PART, 1);
    if (!bl_kv_fragments_fit(copies, blocks, count))
        return -EINVAL;
    for (uint64_t at = 0; at < count; at += size, size = bl_min(2 * size, most)) {
        uint32_t some = (uint32_t)bl_min(size, count - at);
        bl_kv_part *part = copies->batch->rows ? bl_kv_plan_rows(copies, blocks + at, some)
                                               : bl_kv_plan_blocks(copies, blocks + at, some);
        if (part == NULL)
            return -ENOMEM;
        if (part->plan.piece_count == 0)
            continue;
        int status = copies->engine->start(copies->engine->context, &part->plan, copies->write,
                                           &part->copy);
        if (status < 0)
            return status;
    }
    return 0;
}

/* Copy these blocks. Returns 0 or an error; nothing is in progress then, except after
 * -EINPROGRESS. */
static int bl_kv_copies_run(bl_kv_copies *copies, const uint32_t *blocks, uint32_t count)
{
    copies->first = NULL;
    copies->last = &copies->first;
    int status = bl_kv_start(copies, blocks, count);
    for (bl_kv_part *part = copies->first; part != NULL; part = part->next) {
        int ended = part->copy ? copies->engine->wait(copies->engine->context, part->copy) : 0;
        if (ended == -EINPROGRESS || status == 0)
            status = ended;
    }
    return status;
}

/* Free the parts; those of copies that may still be in progress are never freed. */
static void bl_kv_copies_free(bl_kv_copies *copies, int status)
{
    for (bl_kv_part *next, *part = copies->first; part && status != -EINPROGRESS; part = next) {
        next = part->next;
        free(part);
    }
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
    bl_kv_work *work = copies->work;
    uint32_t k = 0, per_block = work->chunk_count;
    for (const bl_kv_part *part = copies->first; part != NULL; part = part->next)
        for (uint32_t i = 0; i < part->count; i++, k++) {
            memcpy(work->checksums, part->sums + (size_t)i * per_block,
                   per_block * sizeof *work->checksums);
            work->commits[k].checksums_crc = bl_checksums_write(
                &copies->session->pool->memory, work->records[part->blocks[i]].offset,
                copies->batch, work);
        }
    return 0;
}

int bl_kv_engine_write(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work)
{
    bl_kv_copies copies = {.session = session, .batch = batch, .work = work,
                           .engine = batch->engine, .write = 1,
                           .summed = work->chunk_count > 0};
    int status = bl_kv_copies_run(&copies, work->index, work->count);
    if (status == -EINPROGRESS)
        bl_session_leave(session, work->under.nonce); /* the grants are neither committed nor
                                                       * aborted (D15) */
    else if (status < 0)
        bl_kv_flush(&session->pool->memory, batch, work);
    else
        status = bl_guarded(&session->pool->memory, bl_kv_sums_guarded, &copies);
    bl_kv_copies_free(&copies, status);
    return status;
}

/* ---- Reading. */

/* The CPU as an engine, for rows. */
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

/* The blocks to read. */
typedef struct bl_kv_wanted {
    const bl_session *session;
    const bl_kv_batch *batch;
    bl_kv_work *work;
    uint8_t *states;
    uint32_t first;
    uint32_t end;
    uint32_t *blocks;           /* result: their indices */
    uint32_t *sums;             /* result: a row for each block of the batch; or NULL */
    uint32_t count;             /* result */
} bl_kv_wanted;

static int bl_kv_wanted_guarded(void *context)
{
    bl_kv_wanted *wanted = context;
    uint32_t per_block = wanted->work->chunk_count;
    for (uint32_t i = wanted->first; i < wanted->end; i++) {
        if (wanted->states[i] != BL_BLOCK_HIT)
            continue;
        if (wanted->sums != NULL) {
            if (bl_checksums_read(wanted->session, &wanted->work->entries[i], wanted->work) < 0) {
                wanted->states[i] = BL_KV_DAMAGED;
                continue;
            }
            memcpy(wanted->sums + (size_t)i * per_block, wanted->work->checksums,
                   per_block * sizeof *wanted->sums);
        }
        wanted->blocks[wanted->count++] = i;
    }
    return 0;
}

/* Read the wanted blocks. If a checksum differs, each is read by itself. */
static int bl_kv_wanted_read(bl_kv_copies *copies, const bl_kv_wanted *wanted)
{
    int status = bl_kv_copies_run(copies, wanted->blocks, wanted->count);
    bl_kv_copies_free(copies, status);
    if (status != -EBADMSG)
        return status;
    for (uint32_t k = 0; k < wanted->count; k++) {
        status = bl_kv_copies_run(copies, wanted->blocks + k, 1);
        bl_kv_copies_free(copies, status);
        if (status == -EBADMSG)
            wanted->states[wanted->blocks[k]] = BL_KV_DAMAGED;
        else if (status < 0)
            return status;
    }
    return 0;
}

int bl_kv_engine_read(const bl_session *session, const bl_kv_batch *batch, bl_kv_work *work,
                      uint32_t first, uint32_t count, uint8_t *states)
{
    bl_kv_cpu cpu = {session, batch, 0};
    bl_engine by_cpu = {&cpu, bl_kv_cpu_start, bl_kv_cpu_wait};
    int checked = batch->check_checksums && work->chunk_count > 0;
    size_t sums = (size_t)batch->count * work->chunk_count;
    bl_kv_wanted wanted = {session, batch, work, states, first, first + count,
                           malloc(count * sizeof(uint32_t) + 1),
                           checked ? malloc(sums * sizeof(uint32_t)) : NULL, 0};
    bl_kv_copies copies = {.session = session, .batch = batch, .work = work, .sums = wanted.sums,
                           .summed = checked,
                           .engine = batch->engine ? batch->engine : &by_cpu};
    int status = wanted.blocks && (wanted.sums || !checked) ? 0 : -ENOMEM;
    if (status == 0)
        status = bl_guarded(&session->pool->memory, bl_kv_wanted_guarded, &wanted);
    if (status == 0)
        status = bl_kv_wanted_read(&copies, &wanted);
    free(wanted.blocks);
    free(wanted.sums);
    return status;
}
