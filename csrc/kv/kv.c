/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Where "which block" meets "move the bytes": a batch of puts or gets in one call.
 *
 *   put:  reserve --> stream payload, vector behind it --> fence --> commit
 *   get:  kv/get.c
 *
 * What fails half way is given back; nothing of it was told to anybody.
 */
#include <errno.h>
#include <stdlib.h>

#include "coherence/crash_point.h"
#include "coherence/guard.h"
#include "kv/kv.h"
#include "transfer/block.h"

static void bl_kv_work_free(bl_kv_work *work)
{
    free(work->records);
    free(work->entries);
    free(work->commits);
    free(work->statuses);
    free(work->index);
    free(work->vector);
}

static int bl_kv_work_make(const bl_kv_batch *batch, bl_kv_work *work)
{
    size_t count = batch->count ? batch->count : 1;
    uint32_t chunk_size = batch->chunk_size;
    uint32_t chunks = chunk_size ? (batch->length + chunk_size - 1) / chunk_size : 0;
    uint32_t lines = (chunks * sizeof(uint32_t) + BL_LINE_SIZE - 1) / BL_LINE_SIZE + 1;
    *work = (bl_kv_work){
        .records = malloc(count * sizeof *work->records),
        .entries = malloc(count * sizeof *work->entries),
        .commits = malloc(count * sizeof *work->commits),
        .statuses = malloc(count * sizeof *work->statuses),
        .index = malloc(count * sizeof *work->index),
        .vector = calloc(lines, BL_LINE_SIZE),
        .chunk_count = chunks,
    };
    if (work->records && work->entries && work->commits && work->statuses && work->index &&
        work->vector)
        return 0;
    bl_kv_work_free(work);
    return -ENOMEM;
}

/* A vector of one is its own check; a longer one is stored behind the payload. */
static uint32_t bl_vector_check(const uint32_t *vector, uint32_t count)
{
    return count == 1 ? vector[0] : bl_crc32c(0, vector, count * sizeof *vector);
}

static uint64_t bl_vector_lines(uint32_t count)
{
    return (count * sizeof(uint32_t) + BL_LINE_SIZE - 1) & ~(uint64_t)(BL_LINE_SIZE - 1);
}

/* Stream the checksums of the block at this offset behind it: the check of its vector. */
static uint32_t bl_vector_write(const bl_memory *memory, uint64_t offset, const bl_kv_batch *batch,
                                const bl_kv_work *work)
{
    if (work->chunk_count > 1)
        bl_stream(memory, bl_vector_offset(offset, batch->length), work->vector,
                  bl_vector_lines(work->chunk_count));
    bl_crash_point("put.vector_streamed");
    return bl_vector_check(work->vector, work->chunk_count);
}

/* Stream one granted block: 0, and the check of its vector; or what the engine said, or
 * -BL_ERROR_DEVICE_FAULT: the grants can still be given back. */
static int bl_kv_write_guarded(void *context)
{
    const bl_kv_copy *copy = context;
    const bl_memory *memory = &copy->session->pool->memory;
    const bl_kv_batch *batch = copy->batch;
    uint64_t offset = copy->work->records[copy->i].offset;
    const bl_fragment *fragments = batch->fragments + (size_t)copy->i * batch->fragment_count;
    bl_copy_settings settings = bl_copy_settings_of(batch->settings);
    settings.threads = 1; /* the other cores are the engine's: nobody waits for a put */
    int status = bl_gather_write(memory, offset, fragments, batch->fragment_count, batch->length,
                                 batch->chunk_size, copy->work->vector, &settings, copy->toll);
    if (status < 0)
        return status;
    bl_crash_point("put.payload_streamed");
    *copy->check = bl_vector_write(memory, offset, batch, copy->work);
    return 0;
}

/* What the server said of each block, and a commit for each that was granted: their number. */
static uint32_t bl_kv_granted(const bl_kv_batch *batch, bl_kv_work *work, uint8_t *states,
                              int32_t *statuses)
{
    uint32_t granted = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        states[i] = (uint8_t)work->records[i].state;
        statuses[i] = work->records[i].status;
        if (states[i] != BL_BLOCK_GRANTED)
            continue;
        work->index[granted] = i;
        work->commits[granted++] = (bl_commit){
            .key = {batch->keys[2 * (size_t)i], batch->keys[2 * (size_t)i + 1]},
            .generation = work->records[i].generation,
            .block = work->records[i].block,
        };
    }
    return granted;
}

/* Ask for room: 0 or an error. */
static int bl_kv_reserve(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work,
                         uint8_t *states, int32_t *statuses)
{
    bl_block_request what = {batch->layout, batch->length, batch->chunk_size, 0,
                             batch->kept ? BL_RESERVE_KEPT : 0};
    int status = bl_reserve(session, batch->keys, batch->count, &what, work->records,
                            batch->timeout_ns);
    bl_crash_point("put.reserved");
    if (status < 0)
        return status;
    work->nonce = session->nonce;
    work->count = bl_kv_granted(batch, work, states, statuses);
    return 0;
}

/* Write what was granted: 0 or an error. */
static int bl_kv_store(const bl_session *session, const bl_kv_batch *batch, bl_kv_work *work)
{
    int status = 0;
    bl_toll toll = bl_toll_make(batch->port, 1, batch->transfer_class,
                                (uint64_t)work->count * batch->length, 1);
    for (uint32_t k = 0; k < work->count && status == 0; k++) {
        bl_kv_copy copy = {session, batch, work, &work->commits[k].vector_check, &toll,
                           work->index[k]};
        status = bl_guarded(&session->pool->memory, bl_kv_write_guarded, &copy);
    }
    bl_toll_end(&toll);
    return status;
}

/* Commit what was granted and is written: 0 or an error. */
static int bl_kv_commit(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work)
{
    bl_fence_store(&session->pool->memory); /* all payload is out before anybody is told of it */
    bl_crash_point("put.fenced");
    int status = work->count > 0 ? bl_commit_blocks(session, work->commits, work->count,
                                                    work->statuses, batch->timeout_ns)
                                 : 0;
    bl_crash_point("put.committed");
    return status;
}

/* A copy met a fault: tell the server while what was granted or pinned keeps the extent where it
 * is. Best effort: who meets it next tells it again. */
static void bl_kv_retire(bl_session *session, const bl_kv_batch *batch, int status)
{
    uint64_t offset = bl_guard_offset(&session->pool->memory);
    if (status == -BL_ERROR_DEVICE_FAULT && offset >= session->pool->geometry.data_offset &&
        offset != UINT64_MAX)
        bl_retire(session, offset, batch->timeout_ns);
}

/* The end of a put, whose payload is written, or -error: commit, or give back what was granted. */
static int bl_kv_publish(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work,
                         int written, uint8_t *states, int32_t *statuses)
{
    int status = written < 0 ? written : bl_kv_commit(session, batch, work);
    for (uint32_t k = 0; status == 0 && k < work->count; k++)
        if (work->statuses[k] < 0) {
            states[work->index[k]] = BL_BLOCK_REFUSED;
            statuses[work->index[k]] = work->statuses[k];
        }
    /* Nothing more is written: what was granted and is not committed may go. */
    if (status < 0 && work->count > 0 && session->attached && session->nonce == work->nonce) {
        bl_kv_retire(session, batch, status);
        bl_abort_blocks(session, work->commits, work->count, batch->timeout_ns);
    }
    return status;
}

int bl_kv_put(bl_session *session, const bl_kv_batch *batch, uint8_t *states, int32_t *statuses)
{
    bl_kv_work work;
    int status = bl_kv_work_make(batch, &work);
    if (status < 0)
        return status;
    status = bl_kv_reserve(session, batch, &work, states, statuses);
    if (status == 0)
        status = bl_kv_publish(session, batch, &work, bl_kv_store(session, batch, &work), states,
                               statuses);
    bl_kv_work_free(&work);
    return status;
}
