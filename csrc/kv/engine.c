/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Puts and gets whose payload an engine moves (beluga/transfer): what kv/kv.c and kv/get.c do
 * before the copy, and what they do after it. In between nobody else uses the session: who lets go
 * of it lets go of its grants and pins.
 *
 *   put:  begin: reserve              --> engine writes --> end: stream vectors, fence, commit
 *   get:  begin: lookup, first look   --> engine reads  --> end: second look, release
 */
#include <errno.h>
#include <stdlib.h>

#include "coherence/guard.h"
#include "kv/kv.h"

struct bl_kv_pending {
    bl_kv_batch batch;
    bl_kv_work work;
};

static int bl_kv_pending_make(const bl_kv_batch *batch, bl_kv_pending **out)
{
    bl_kv_pending *pending = malloc(sizeof *pending);
    if (pending == NULL)
        return -ENOMEM;
    pending->batch = *batch;
    pending->batch.fragments = NULL; /* they are the engine's to know */
    int status = bl_kv_work_make(batch, &pending->work);
    if (status < 0)
        free(pending);
    else
        *out = pending;
    return status;
}

static void bl_kv_pending_free(bl_kv_pending *pending)
{
    bl_kv_work_free(&pending->work);
    free(pending);
}

/* Does the session still hold what it was given at the beginning? */
static int bl_kv_held(const bl_session *session, const bl_kv_work *work)
{
    if (*session->parent == 0)
        return -BL_ERROR_FORKED;
    return session->attached && session->nonce == work->nonce ? 0 : -BL_ERROR_SESSION_LOST;
}

int bl_kv_put_begin(bl_session *session, const bl_kv_batch *batch, uint8_t *states,
                    int32_t *statuses, uint64_t *offsets, bl_kv_pending **out)
{
    int status = bl_kv_pending_make(batch, out);
    if (status < 0)
        return status;
    bl_kv_work *work = &(*out)->work;
    status = bl_session_devices(session);
    if (status == 0)
        status = bl_kv_reserve(session, batch, work, states, statuses);
    if (status < 0)
        bl_kv_pending_free(*out);
    for (uint32_t k = 0; status == 0 && k < work->count; k++)
        offsets[work->index[k]] = work->records[work->index[k]].offset;
    return status;
}

/* Grants, and the memory that they are of. */
typedef struct bl_kv_grants {
    const bl_memory *memory;
    const bl_kv_pending *pending;
} bl_kv_grants;

/* As bl_device_written(), of all blocks together: the engine has failed, or was interrupted, and
 * nothing of it is under way. What its device has written until then leaves this host's cache
 * before the space is given back: later it would overwrite what the next owner has written. */
static int bl_kv_flush_guarded(void *context)
{
    const bl_kv_grants *grants = context;
    const bl_kv_work *work = &grants->pending->work;
    bl_fence_full(grants->memory); /* no flush before the load that saw the device's end */
    for (uint32_t k = 0; k < work->count; k++)
        bl_invalidate(grants->memory, work->records[work->index[k]].offset,
                      bl_vector_offset(0, grants->pending->batch.length));
    bl_fence_full(grants->memory); /* the flushes are done before the abort is asked for */
    return 0;
}

/* The vectors of all blocks that were granted. */
typedef struct bl_kv_vectors {
    const bl_session *session;
    bl_kv_pending *pending;
    const uint32_t *vectors;
} bl_kv_vectors;

static int bl_kv_vectors_guarded(void *context)
{
    const bl_kv_vectors *all = context;
    bl_kv_work *work = &all->pending->work;
    for (uint32_t k = 0; k < work->count; k++) {
        uint32_t i = work->index[k];
        if (work->chunk_count > 0)
            memcpy(work->vector, all->vectors + (size_t)i * work->chunk_count,
                   work->chunk_count * sizeof *work->vector);
        work->commits[k].vector_check = bl_vector_write(&all->session->pool->memory,
                                                        work->records[i].offset,
                                                        &all->pending->batch, work);
    }
    return 0;
}

int bl_kv_put_end(bl_session *session, bl_kv_pending *pending, const uint32_t *vectors, int written,
                  uint8_t *states, int32_t *statuses)
{
    bl_kv_vectors all = {session, pending, vectors};
    bl_kv_grants grants = {&session->pool->memory, pending};
    int held = bl_kv_held(session, &pending->work);
    int status = written < 0 ? written : held;
    if (written == -EINPROGRESS && held == 0)
        bl_session_leave(session); /* the grants are neither committed nor given back (D15) */
    else if (written < 0)
        bl_guarded(grants.memory, bl_kv_flush_guarded, &grants);
    if (status == 0)
        status = bl_guarded(&session->pool->memory, bl_kv_vectors_guarded, &all);
    status = bl_kv_publish(session, &pending->batch, &pending->work, status, states, statuses);
    bl_kv_pending_free(pending);
    return status;
}

/* What an engine must know to read. */
typedef struct bl_kv_hint {
    const bl_session *session;
    bl_kv_pending *pending;
    uint8_t *states;
    uint64_t *offsets;
    uint32_t *vectors;
} bl_kv_hint;

static int bl_kv_look_guarded(void *context)
{
    const bl_kv_hint *hint = context;
    const bl_kv_batch *batch = &hint->pending->batch;
    bl_kv_work *work = &hint->pending->work;
    bl_kv_first_look(hint->session, batch, work, hint->states);
    for (uint32_t i = 0; i < work->count; i++) {
        hint->offsets[i] = work->records[i].offset;
        if (hint->states[i] != BL_BLOCK_HIT || !batch->verify || work->chunk_count == 0)
            continue;
        if (bl_vector_read(hint->session, &work->entries[i], work) < 0)
            hint->states[i] = BL_BLOCK_MISS;
        memcpy(hint->vectors + (size_t)i * work->chunk_count, work->vector,
               work->chunk_count * sizeof *work->vector);
    }
    return 0;
}

int64_t bl_kv_get_begin(bl_session *session, const bl_kv_batch *batch, uint8_t *states,
                        uint64_t *offsets, uint32_t *vectors, bl_kv_pending **out)
{
    int status = bl_kv_pending_make(batch, out);
    if (status < 0)
        return status;
    bl_kv_work *work = &(*out)->work;
    bl_kv_hint hint = {session, *out, states, offsets, vectors};
    status = bl_kv_ask(session, batch, work, states);
    int64_t hits = work->count;
    if (status == 0 && hits > 0) {
        status = bl_guarded(&session->pool->memory, bl_kv_look_guarded, &hint);
        if (status < 0)
            bl_kv_release(session, batch, work, status, states);
    }
    if (status < 0)
        bl_kv_pending_free(*out);
    return status < 0 ? status : hits;
}

int64_t bl_kv_get_end(bl_session *session, bl_kv_pending *pending, int copied, uint8_t *states,
                      uint64_t *mismatch_count)
{
    bl_kv_work *work = &pending->work;
    bl_kv_hits read = {session, &pending->batch, work, states, mismatch_count, NULL, 0, 0};
    int status = copied < 0 ? copied : bl_kv_held(session, work);
    if (status == 0 && work->count > 0)
        status = bl_guarded(&session->pool->memory, bl_kv_judge_guarded, &read);
    status = bl_kv_release(session, &pending->batch, work, status, states);
    bl_kv_pending_free(pending);
    return status < 0 ? status : (int64_t)read.leading;
}
