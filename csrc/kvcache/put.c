/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A batch of puts:
 *
 *   reserve --> stream payload, checksums behind it --> fence --> commit
 *
 * A copy engine writes the payload, if the batch has one (kvcache/engine.h).
 *
 * A put that fails before the commit aborts its grants; no other process has seen the blocks.
 */
#include <errno.h>

#include "coherence/crash_point.h"
#include "coherence/guard.h"
#include "format/payload.h"
#include "index/client.h"
#include "kvcache/engine.h"
#include "transfer/block.h"

/* Stream one granted block. Returns 0 and the CRC of its checksums; or the copy's error, after
 * which the grants can still be aborted. */
static int bl_kv_write_guarded(void *context)
{
    const bl_kv_copy *copy = context;
    const bl_memory *memory = &copy->session->pool->memory;
    const bl_kv_batch *batch = copy->batch;
    uint64_t offset = copy->work->records[copy->i].offset;
    const bl_fragment *fragments = batch->fragments + (size_t)copy->i * batch->fragment_count;
    bl_copy_settings settings = bl_copy_settings_of(batch->settings);
    settings.threads = 1; /* leave the other cores to the engine: nothing waits for a put */
    int status = bl_gather_write(memory, offset, fragments, batch->fragment_count, batch->length,
                                 batch->chunk_size, copy->work->checksums, &settings,
                                     copy->throttle);
    if (status < 0)
        return status;
    bl_crash_point("put.payload_streamed");
    *copy->check = bl_checksums_write(memory, offset, batch, copy->work);
    return 0;
}

/* Copy the server's state of each block, and prepare a commit for each granted block. Returns their
 * number. */
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

static int bl_kv_write_begin(bl_session *session, bl_kv_work *work)
{
    int status = bl_session_write(session, work->under.nonce);
    work->writing = status == 0;
    return status;
}

/* Nothing is written to the grants any more: the payload is in memory. */
static void bl_kv_write_end(bl_session *session, bl_kv_work *work)
{
    bl_fence_store(&session->pool->memory); /* before a commit, and before the grants may end */
    bl_crash_point("put.fenced");
    if (work->writing)
        bl_session_written(session);
    work->writing = 0;
}

/* Reserve space; if any is granted, writing begins. Returns 0 or an error. */
static int bl_kv_reserve(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work,
                         uint8_t *states, int32_t *statuses)
{
    bl_block_request what = {batch->fingerprint, batch->length, batch->chunk_size, 0,
                             batch->reserve_flags};
    int status = bl_reserve_under(session, batch->keys, batch->count, &what, work->records,
                                  &work->under.nonce, batch->timeout_ns);
    bl_crash_point("put.reserved");
    if (status < 0)
        return status;
    work->count = bl_kv_granted(batch, work, states, statuses);
    return work->count > 0 ? bl_kv_write_begin(session, work) : 0;
}

/* Abort the grant of a block whose page could not be allocated: only this block is refused. Returns
 * 0 or an error. */
static int bl_kv_refuse(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work,
                        uint32_t k, uint8_t *states, int32_t *statuses)
{
    states[work->index[k]] = BL_BLOCK_REFUSED;
    statuses[work->index[k]] = -BL_ERROR_NO_ROOM;
    bl_kv_write_end(session, work); /* for the call */
    int64_t status = bl_abort_blocks(session, work->commits + k, 1, batch->timeout_ns);
    return status < 0 ? (int)status : bl_kv_write_begin(session, work);
}

/* Write the granted blocks, and drop those from work that are refused meanwhile. Returns 0 or an
 * error. */
static int bl_kv_store(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work,
                       uint8_t *states, int32_t *statuses)
{
    int status = 0;
    uint32_t count = 0;
    if (batch->engine != NULL)
        return work->count > 0 ? bl_kv_engine_write(session, batch, work) : 0;
    bl_throttle throttle = bl_throttle_make(batch->io_queue, 1, batch->transfer_class,
                                            (uint64_t)work->count * batch->length, 1);
    for (uint32_t k = 0; k < work->count; k++) {
        bl_kv_copy copy = {session, batch, work, &work->commits[k].checksums_crc, &throttle,
                           work->index[k]};
        if (status == 0)
            status = bl_guarded(&session->pool->memory, bl_kv_write_guarded, &copy);
        if (status == -BL_ERROR_NO_ROOM) {
            status = bl_kv_refuse(session, batch, work, k, states, statuses);
        } else {
            work->commits[count] = work->commits[k];
            work->index[count++] = work->index[k];
        }
    }
    work->count = count;
    bl_throttle_end(&throttle);
    return status;
}

/* Commit the granted blocks with their names. */
static int bl_kv_commit_named(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work)
{
    for (uint32_t k = 0; k < work->count; k++)
        work->named[k] = (bl_named_commit){work->commits[k], batch->names[work->index[k]]};
    return bl_commit_named(session, work->named, work->count, work->statuses, batch->timeout_ns);
}

/* Commit the blocks that are granted and written. Returns 0 or an error. */
static int bl_kv_commit(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work)
{
    int status = 0;
    if (work->count > 0)
        status = batch->names ? bl_kv_commit_named(session, batch, work)
                              : bl_commit_blocks(session, work->commits, work->count,
                                                 work->statuses, batch->timeout_ns);
    bl_crash_point("put.committed");
    return status;
}

/* End a put: commit, or abort the grants if written is an error. If an engine faulted on a page
 * that could not be allocated, the blocks are refused. */
static int bl_kv_publish(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work,
                         int written, uint8_t *states, int32_t *statuses)
{
    bl_kv_write_end(session, work);
    int status = written < 0 ? written : bl_kv_commit(session, batch, work);
    for (uint32_t k = 0; status == 0 && k < work->count; k++)
        if (work->statuses[k] < 0) {
            states[work->index[k]] = BL_BLOCK_REFUSED;
            statuses[work->index[k]] = work->statuses[k];
        }
    /* Nothing writes any more, so the grants that were not committed can be aborted. */
    if (status < 0 && work->count > 0 && bl_session_holds(session, work->under.nonce)) {
        bl_kv_retire(session, batch, status);
        bl_abort_blocks(session, work->commits, work->count, batch->timeout_ns);
        for (uint32_t k = 0; status == -BL_ERROR_NO_ROOM && k < work->count; k++) {
            states[work->index[k]] = BL_BLOCK_REFUSED;
            statuses[work->index[k]] = status;
        }
        status = status == -BL_ERROR_NO_ROOM ? 0 : status;
    }
    return status;
}

int bl_kv_put(bl_session *session, const bl_kv_batch *batch, uint8_t *states, int32_t *statuses)
{
    bl_kv_work work;
    int status = bl_kv_work_make(session, batch, &work);
    if (status < 0)
        return status;
    if (batch->engine != NULL)
        status = bl_session_devices(session);
    if (status == 0)
        status = bl_kv_reserve(session, batch, &work, states, statuses);
    if (status == 0)
        status = bl_kv_publish(session, batch, &work,
                               bl_kv_store(session, batch, &work, states, statuses), states,
                               statuses);
    bl_kv_work_free(session, &work);
    return status;
}
