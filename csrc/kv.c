/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Where "which block" meets "move the bytes": a batch of puts or gets in one call.
 *
 *   put:  reserve --> stream payload, vector behind it --> fence --> commit
 *   get:  lookup, pinned --> look at the entries --> refetch, copy, verify --> look again -->
 *         release
 *
 * A reader believes a block only if its entry names the key, generation, offset, length and layout
 * it expects, before the copy and after it, and (unless the caller says no) if the copy's checksums
 * are the entry's. Otherwise it looks once more; then the block is a miss: never wrong bytes (D6).
 * All of them are misses if another server has taken over meanwhile.
 */
#include <errno.h>
#include <stdlib.h>

#include "crash_point.h"
#include "guard.h"
#include "session.h"
#include "transfer.h"

/* What one batch needs besides the caller's arrays. */
typedef struct bl_kv_work {
    bl_block_record *records;
    bl_entry *entries;
    bl_commit *commits;
    int32_t *statuses;
    uint32_t *index;            /* of the commit's block in the batch */
    uint32_t *vector;
    uint32_t chunk_count;
    int fault;                  /* 0, or -BL_ERROR_DEVICE_FAULT: a copy met it */
} bl_kv_work;

/* The copy of one block. */
typedef struct bl_kv_copy {
    const bl_session *session;
    const bl_kv_batch *batch;
    bl_kv_work *work;
    uint32_t *check;            /* of its vector, when it is written */
    uint32_t i;
} bl_kv_copy;

static void bl_kv_end(bl_kv_work *work)
{
    free(work->records);
    free(work->entries);
    free(work->commits);
    free(work->statuses);
    free(work->index);
    free(work->vector);
}

static int bl_kv_begin(const bl_kv_batch *batch, uint32_t chunk_size, bl_kv_work *work)
{
    size_t count = batch->count ? batch->count : 1;
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
    bl_kv_end(work);
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

/* Stream one granted block: 0, and the check of its vector; or what the engine said. */
static int bl_kv_write(const bl_session *session, const bl_kv_batch *batch, uint32_t i,
                       bl_kv_work *work, uint32_t *check)
{
    const bl_memory *memory = &session->pool->memory;
    uint64_t offset = work->records[i].offset;
    const bl_fragment *fragments = batch->fragments + (size_t)i * batch->fragment_count;
    int status = bl_gather_write(memory, offset, fragments, batch->fragment_count, batch->length,
                                 batch->chunk_size, work->vector);
    if (status < 0)
        return status;
    *check = bl_vector_check(work->vector, work->chunk_count);
    bl_crash_point("put.payload_streamed");
    if (work->chunk_count > 1)
        bl_stream(memory, bl_vector_offset(offset, batch->length), work->vector,
                  bl_vector_lines(work->chunk_count));
    bl_crash_point("put.vector_streamed");
    return 0;
}

/* The same, or -BL_ERROR_DEVICE_FAULT: the grants can still be given back. */
static int bl_kv_write_guarded(void *context)
{
    const bl_kv_copy *copy = context;
    return bl_kv_write(copy->session, copy->batch, copy->i, copy->work, copy->check);
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

/* Write and commit what was granted: 0 or an error. */
static int bl_kv_store(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work,
                       uint32_t granted)
{
    for (uint32_t k = 0; k < granted; k++) {
        bl_kv_copy copy = {session, batch, work, &work->commits[k].vector_check, work->index[k]};
        int status = bl_guarded(&session->pool->memory, bl_kv_write_guarded, &copy);
        if (status < 0)
            return status;
    }
    bl_fence_store(&session->pool->memory); /* all payload is out before anybody is told of it */
    bl_crash_point("put.fenced");
    int status = granted > 0 ? bl_commit_blocks(session, work->commits, granted, work->statuses,
                                                batch->timeout_ns)
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

int bl_kv_put(bl_session *session, const bl_kv_batch *batch, uint8_t *states, int32_t *statuses)
{
    bl_kv_work work;
    bl_block_request what = {batch->layout, batch->length, batch->chunk_size, 0, 0};
    int status = bl_kv_begin(batch, batch->chunk_size, &work);
    if (status < 0)
        return status;
    status = bl_reserve(session, batch->keys, batch->count, &what, work.records,
                        batch->timeout_ns);
    bl_crash_point("put.reserved");
    if (status == 0) {
        uint64_t nonce = session->nonce;
        uint32_t granted = bl_kv_granted(batch, &work, states, statuses);
        status = bl_kv_store(session, batch, &work, granted);
        for (uint32_t k = 0; status == 0 && k < granted; k++)
            if (work.statuses[k] < 0) {
                states[work.index[k]] = BL_BLOCK_REFUSED;
                statuses[work.index[k]] = work.statuses[k];
            }
        /* Nothing more is written: what was granted and is not committed may go. */
        if (status < 0 && granted > 0 && session->attached && session->nonce == nonce) {
            bl_kv_retire(session, batch, status);
            bl_abort_blocks(session, work.commits, granted, batch->timeout_ns);
        }
    }
    bl_kv_end(&work);
    return status;
}

/* Copy the entries of blocks [first, first + count) as they are in memory now. */
static void bl_entry_look(const bl_session *session, const bl_kv_work *work, uint32_t half,
                          uint32_t first, uint32_t count, bl_entry *entries)
{
    const bl_memory *memory = &session->pool->memory;
    const bl_geometry *g = &session->pool->geometry;
    bl_fence_full(memory); /* not before the copy that this look confirms */
    for (uint32_t i = first; i < first + count; i++)
        bl_invalidate(memory, bl_entry_offset(g, work->records[i].block, half), BL_LINE_SIZE);
    bl_fence_full(memory); /* one for the batch: the loads below go to memory */
    for (uint32_t i = first; i < first + count; i++)
        bl_load_line(memory, bl_entry_offset(g, work->records[i].block, half),
                     &entries[i - first]); /* SYNC entry: pairs with bl_entry_write() */
}

/* Does the server that was asked still speak for the pool? Looked at after an entry: another server
 * would write the other half, and this one would say for ever what is no longer true. */
static int bl_epoch_stands(const bl_session *session)
{
    bl_epoch_line now;
    int status = bl_epoch_read(session->pool, &now);
    return status == 0 && bl_verify(&session->pool->memory, now.epoch == session->epoch);
}

/* Does an entry say what the server said, and what the caller expects? */
static int bl_entry_agrees(const bl_session *session, const bl_kv_batch *batch, uint32_t i,
                           const bl_kv_work *work, const bl_entry *entry)
{
    const bl_memory *memory = &session->pool->memory;
    const bl_block_record *record = &work->records[i];
    int agrees = bl_verify(
        memory, bl_table_whole(entry, record->block) && entry->generation == record->generation &&
                    entry->state == BL_ENTRY_COMMITTED && entry->offset == record->offset &&
                    entry->key[0] == batch->keys[2 * (size_t)i] &&
                    entry->key[1] == batch->keys[2 * (size_t)i + 1] &&
                    entry->length == batch->length && entry->layout == batch->layout &&
                    entry->chunk_size == batch->chunk_size);
    if (agrees)
        bl_believe(memory, bl_entry_offset(&session->pool->geometry, record->block, session->half));
    return agrees;
}

/* Fetch the checksum vector of a block that has one: 0 or -EBADMSG. */
static int bl_vector_read(const bl_session *session, const bl_entry *entry, bl_kv_work *work)
{
    const bl_memory *memory = &session->pool->memory;
    uint64_t offset = bl_vector_offset(entry->offset, entry->length);
    if (work->chunk_count == 1) {
        work->vector[0] = entry->vector_check;
        return 0;
    }
    bl_refetch(memory, offset, bl_vector_lines(work->chunk_count)); /* after the entry's look */
    bl_fetch(memory, offset, work->vector, work->chunk_count * sizeof *work->vector);
    return bl_vector_check(work->vector, work->chunk_count) == entry->vector_check ? 0 : -EBADMSG;
}

/* Copy one block out: 0, or -EBADMSG if its bytes are not those that were committed. */
static int bl_kv_read_guarded(void *context)
{
    const bl_kv_copy *copy = context;
    const bl_session *session = copy->session;
    const bl_kv_batch *batch = copy->batch;
    bl_kv_work *work = copy->work;
    uint32_t i = copy->i;
    const bl_entry *entry = &work->entries[i];
    const bl_fragment *fragments = batch->fragments + (size_t)i * batch->fragment_count;
    int verify = batch->verify && work->chunk_count > 0;
    int status = verify ? bl_vector_read(session, entry, work) : 0;
    if (status < 0)
        return status;
    return bl_scatter_read(&session->pool->memory, entry->offset, fragments,
                           batch->fragment_count, batch->length, batch->chunk_size,
                           verify ? work->vector : NULL);
}

/* The same, or -BL_ERROR_DEVICE_FAULT, which the whole call reports. */
static int bl_kv_read(const bl_session *session, const bl_kv_batch *batch, uint32_t i,
                      bl_kv_work *work)
{
    bl_kv_copy copy = {session, batch, work, NULL, i};
    int status = bl_guarded(&session->pool->memory, bl_kv_read_guarded, &copy);
    if (status == -BL_ERROR_DEVICE_FAULT)
        work->fault = status;
    return status;
}

/* Entry and epoch, looked at again, vouch for the copy of a block. */
static void bl_kv_confirm(const bl_session *session, const bl_kv_batch *batch, uint32_t i,
                          const bl_kv_work *work)
{
    const bl_pool *pool = session->pool;
    const bl_block_record *record = &work->records[i];
    uint64_t size = batch->verify ? bl_stored_size(batch->length, batch->chunk_size)
                                  : batch->length;
    bl_confirm(&pool->memory, bl_entry_offset(&pool->geometry, record->block, session->half),
               record->offset, size);
    bl_epoch_confirm(pool, record->offset, size);
}

/* One block again, alone: 1 if it was read and is confirmed. */
static int bl_kv_read_again(const bl_session *session, const bl_kv_batch *batch, uint32_t i,
                            bl_kv_work *work, uint32_t half)
{
    bl_entry after;
    bl_entry_look(session, work, half, i, 1, &work->entries[i]);
    if (!bl_entry_agrees(session, batch, i, work, &work->entries[i]) ||
        bl_kv_read(session, batch, i, work) < 0)
        return 0;
    bl_entry_look(session, work, half, i, 1, &after);
    if (!bl_entry_agrees(session, batch, i, work, &after) || !bl_epoch_stands(session))
        return 0;
    bl_kv_confirm(session, batch, i, work);
    return 1;
}

/* Read the blocks that were hit: how many of the leading ones are right. */
static uint32_t bl_kv_read_hits(bl_session *session, const bl_kv_batch *batch, uint32_t hits,
                                bl_kv_work *work, uint8_t *states, uint64_t *mismatch_count)
{
    uint32_t half = session->half, leading = hits;
    bl_entry_look(session, work, half, 0, hits, work->entries);
    bl_crash_point("get.first_look");
    for (uint32_t i = 0; i < hits; i++)
        states[i] = bl_entry_agrees(session, batch, i, work, &work->entries[i]) &&
                            bl_kv_read(session, batch, i, work) == 0
                        ? BL_BLOCK_HIT
                        : BL_BLOCK_MISS;
    bl_crash_point("get.copied");
    bl_entry_look(session, work, half, 0, hits, work->entries); /* the second look */
    bl_crash_point("get.second_look");
    if (!bl_epoch_stands(session)) { /* to read again is vain; and nothing is wrong with a block */
        memset(states, BL_BLOCK_MISS, hits);
        return 0;
    }
    for (uint32_t i = 0; i < hits; i++) {
        if (states[i] == BL_BLOCK_HIT &&
            bl_entry_agrees(session, batch, i, work, &work->entries[i])) {
            bl_kv_confirm(session, batch, i, work);
            continue;
        }
        ++*mismatch_count;
        states[i] = bl_kv_read_again(session, batch, i, work, half) ? BL_BLOCK_HIT
                                                                   : BL_BLOCK_MISS;
        if (states[i] != BL_BLOCK_HIT && i < leading)
            leading = i;
    }
    return leading;
}

typedef struct bl_kv_hits {
    bl_session *session;
    const bl_kv_batch *batch;
    bl_kv_work *work;
    uint8_t *states;
    uint64_t *mismatch_count;
    uint32_t hits;
    uint32_t leading;           /* out: how many are right */
} bl_kv_hits;

static int bl_kv_hits_guarded(void *context)
{
    bl_kv_hits *read = context;
    read->leading = bl_kv_read_hits(read->session, read->batch, read->hits, read->work,
                                    read->states, read->mismatch_count);
    return read->work->fault;
}

int64_t bl_kv_get(bl_session *session, const bl_kv_batch *batch, uint8_t *states,
                  uint64_t *mismatch_count)
{
    bl_kv_work work;
    uint32_t state;
    bl_kv_hits read = {session, batch, &work, states, mismatch_count, 0, 0};
    int status = bl_kv_begin(batch, batch->chunk_size, &work);
    if (status < 0)
        return status;
    memset(states, BL_BLOCK_MISS, batch->count);
    int64_t hits = bl_lookup(session, batch->keys, batch->count, BL_LOOKUP_PIN, work.records,
                             &state, batch->timeout_ns);
    bl_crash_point("get.looked_up");
    if (hits > 0) {
        read.hits = (uint32_t)hits;
        status = bl_guarded(&session->pool->memory, bl_kv_hits_guarded, &read);
        bl_kv_retire(session, batch, status);
        for (uint32_t i = 0; i < hits; i++)
            work.commits[i] = (bl_commit){.generation = work.records[i].generation,
                                          .block = work.records[i].block};
        int64_t released = bl_release_blocks(session, work.commits, (uint32_t)hits,
                                             batch->timeout_ns);
        bl_crash_point("get.released");
        if (released < 0 || status < 0)
            hits = released < 0 ? released : status;
    }
    if (hits >= 0 && hits < batch->count)
        states[hits] = (uint8_t)state;
    bl_kv_end(&work);
    return hits < 0 ? hits : read.leading;
}
