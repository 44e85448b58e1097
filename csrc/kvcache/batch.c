/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The common part of puts and gets (kvcache/batch.h).
 */
#include "kvcache/batch.h"

#include <errno.h>
#include <stdlib.h>

#include "coherence/crash_point.h"
#include "coherence/guard.h"
#include "format/payload.h"

void bl_kv_work_free(bl_session *session, bl_kv_work *work)
{
    bl_session_unuse(session);
    free(work->records);
    free(work->entries);
    free(work->commits);
    free(work->named);
    free(work->statuses);
    free(work->index);
    free(work->checksums);
}

int bl_kv_work_make(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work)
{
    bl_attachment under;
    int status = bl_session_use(session, &under);
    if (status < 0)
        return status;
    size_t count = batch->count ? batch->count : 1;
    uint32_t chunk_size = batch->chunk_size;
    uint32_t chunks = chunk_size ? (batch->length + chunk_size - 1) / chunk_size : 0;
    uint32_t lines = (chunks * sizeof(uint32_t) + BL_LINE_SIZE - 1) / BL_LINE_SIZE + 1;
    *work = (bl_kv_work){
        .records = malloc(count * sizeof *work->records),
        .entries = malloc(count * sizeof *work->entries),
        .commits = malloc(count * sizeof *work->commits),
        .named = malloc(count * sizeof *work->named),
        .statuses = malloc(count * sizeof *work->statuses),
        .index = malloc(count * sizeof *work->index),
        .checksums = calloc(lines, BL_LINE_SIZE),
        .under = under,
        .chunk_count = chunks,
    };
    if (work->records && work->entries && work->commits && work->named &&
        work->statuses && work->index && work->checksums)
        return 0;
    bl_kv_work_free(session, work);
    return -ENOMEM;
}

uint32_t bl_checksums_write(const bl_memory *memory, uint64_t offset, const bl_kv_batch *batch,
                            const bl_kv_work *work)
{
    if (work->chunk_count > 1)
        bl_stream(memory, bl_checksums_offset(offset, batch->length), work->checksums,
                  bl_checksums_lines(work->chunk_count));
    bl_crash_point("put.checksums_streamed");
    return bl_checksums_crc(work->checksums, work->chunk_count);
}

int bl_checksums_read(const bl_session *session, const bl_entry *entry, bl_kv_work *work)
{
    const bl_memory *memory = &session->pool->memory;
    uint64_t offset = bl_checksums_offset(entry->offset, entry->length);
    if (work->chunk_count == 1) {
        work->checksums[0] = entry->checksums_crc;
        return 0;
    }
    bl_refetch(memory, offset, bl_checksums_lines(work->chunk_count)); /* after the look at the
                                                                        * entry */
    bl_fetch(memory, offset, work->checksums, work->chunk_count * sizeof *work->checksums);
    return bl_checksums_crc(work->checksums, work->chunk_count) == entry->checksums_crc ? 0
           : -EBADMSG;
}

/* Report to the server where a device failed, so that it retires the space. */
static void bl_kv_report(bl_session *session, uint64_t offset, uint64_t timeout_ns)
{
    bl_retire_request request = {offset};
    bl_block_reply reply;
    uint32_t size = 0;
    bl_message message = {
        .method = BL_METHOD_RETIRE,
        .request = (const uint8_t *)&request,
        .request_size = sizeof request,
        .reply = (uint8_t *)&reply,
        .reply_capacity = sizeof reply,
        .reply_size = &size,
    };
    bl_session_call(session, &message, timeout_ns);
}

void bl_kv_retire(bl_session *session, const bl_kv_batch *batch, int status)
{
    uint64_t offset = bl_guard_offset(&session->pool->memory);
    if (status == -BL_ERROR_DEVICE_FAULT && offset >= session->pool->geometry.data_offset &&
        offset != UINT64_MAX)
        bl_kv_report(session, offset, batch->timeout_ns);
}
