/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A batch of gets:
 *
 *   lookup with pins --> read the entries --> refetch, copy, check --> read them again --> release
 *
 * With records of where the blocks were, lookup and release are skipped. The service of the lower
 * tiers does this, because a lookup would make blocks newer in the eviction order; so do the
 * workers of an engine whose scheduler has pinned the blocks.
 *
 * A copy engine copies, if the batch has one (kvcache/engine.h).
 *
 * A block is a hit only if its entry has the expected key, generation, offset, length and
 * fingerprint both before and after the copy, and if the checksums of the copy are those of the
 * entry (unless the caller skips the comparison). Otherwise the block is read once more, and then
 * it is a miss: a get never returns wrong bytes (D6). If another server has taken over meanwhile,
 * all blocks are misses.
 */
#include <errno.h>
#include <stdlib.h>

#include "coherence/crash_point.h"
#include "transfer/thread_pool.h"
#include "coherence/guard.h"
#include "format/payload.h"
#include "kvcache/engine.h"
#include "transfer/block.h"

/* Refetch and copy the entries of blocks [first, first + count). */
static void bl_entry_look(const bl_session *session, const bl_kv_work *work, uint32_t first,
                          uint32_t count, bl_entry *entries)
{
    const bl_memory *memory = &session->pool->memory;
    const bl_geometry *g = &session->pool->geometry;
    bl_fence_full(memory); /* after the copy that this read confirms */
    for (uint32_t i = first; i < first + count; i++)
        bl_invalidate(memory, bl_entry_offset(g, work->records[i].block, work->under.half),
                      BL_LINE_SIZE);
    bl_fence_full(memory); /* one for the batch: the loads below read memory */
    for (uint32_t i = first; i < first + count; i++)
        bl_load_line(memory, bl_entry_offset(g, work->records[i].block, work->under.half),
                     &entries[i - first]); /* SYNC entry: pairs with bl_entry_write() */
}

/* Returns 1 if the server that was called is still the pool's server. This must be read after the
 * entries: a successor writes the other half, so the entries in this half would never change
 * again. */
static int bl_epoch_stands(const bl_session *session, const bl_kv_work *work)
{
    bl_epoch_line now;
    int status = bl_epoch_read(session->pool, &now);
    return status == 0 && bl_verify(&session->pool->memory, now.epoch == work->under.epoch);
}

/* Returns 1 if an entry agrees with the server's record and the caller's batch, and if the bytes
 * and checksums lie in the pool. Record and entry are both foreign input (D13). */
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
                    entry->length == batch->length && entry->fingerprint == batch->fingerprint &&
                    entry->chunk_size == batch->chunk_size) &&
                 bl_block_within(&session->pool->geometry, entry->offset, entry->length,
                                 entry->chunk_size);
    if (agrees)
        bl_believe(memory, bl_entry_offset(&session->pool->geometry, record->block,
                                           work->under.half));
    return agrees;
}

/* Copy one block. Returns 0, or -EBADMSG if its bytes are not the committed ones. */
static int bl_kv_read_guarded(void *context)
{
    const bl_kv_copy *copy = context;
    const bl_session *session = copy->session;
    const bl_kv_batch *batch = copy->batch;
    bl_kv_work *work = copy->work;
    uint32_t i = copy->i;
    const bl_entry *entry = &work->entries[i];
    const bl_fragment *fragments = batch->fragments + (size_t)i * batch->fragment_count;
    int check = batch->check_checksums && work->chunk_count > 0;
    int status = check ? bl_checksums_read(session, entry, work) : 0;
    if (status < 0)
        return status;
    return bl_scatter_read(&session->pool->memory, entry->offset, fragments,
                           batch->fragment_count, batch->length, batch->chunk_size,
                           check ? work->checksums : NULL, batch->settings, copy->throttle);
}

/* Do the same in a guarded region. Without a shared throttle, the block has its own. */
static int bl_kv_read(const bl_session *session, const bl_kv_batch *batch, uint32_t i,
                      bl_kv_work *work, bl_throttle *throttle)
{
    bl_throttle own = bl_throttle_make(batch->io_queue, 0, batch->transfer_class, batch->length,
                                       bl_copy_settings_of(batch->settings).threads);
    bl_kv_copy copy = {session, batch, work, NULL, throttle != NULL ? throttle : &own, i};
    int status = bl_guarded(&session->pool->memory, bl_kv_read_guarded, &copy);
    bl_throttle_end(&own);
    return status;
}

/* Returns the error of a block's copy if it ends the whole call, else 0. */
static int bl_kv_fault(int status)
{
    return bl_is_fault(status) || status == -ECANCELED ? status : 0;
}

/* Confirm the copy of a block if its entry and the epoch, read again, are unchanged. */
static void bl_kv_confirm(const bl_session *session, const bl_kv_batch *batch, uint32_t i,
                          const bl_kv_work *work)
{
    const bl_pool *pool = session->pool;
    const bl_block_record *record = &work->records[i];
    uint64_t size = batch->check_checksums ? bl_stored_size(batch->length, batch->chunk_size)
                                  : batch->length;
    bl_confirm(&pool->memory, bl_entry_offset(&pool->geometry, record->block, work->under.half),
               record->offset, size);
    bl_epoch_confirm(pool, record->offset, size);
}

/* Look up and pin the leading hits, or take the records of the caller, which the entries then
 * confirm or refute. Returns 0 or an error. */
static int bl_kv_lookup(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work,
                     uint8_t *states)
{
    memset(states, BL_BLOCK_MISS, batch->count);
    if (batch->records != NULL) {
        for (uint32_t i = 0; i < batch->count; i++)
            if (batch->records[i].block < session->pool->geometry.block_count_max)
                work->records[i] = batch->records[i];
            else /* a record of another pool: no entry agrees with it */
                work->records[i] = (bl_block_record){0};
        work->count = batch->count;
        return 0;
    }
    int64_t hits = bl_lookup_under(session, batch->keys, batch->count, BL_LOOKUP_PIN,
                                   work->records, &work->after, &work->under, batch->timeout_ns);
    bl_crash_point("get.looked_up");
    if (hits < 0)
        return (int)hits;
    work->count = (uint32_t)hits;
    return 0;
}

/* Set the state HIT where the entry agrees. */
static void bl_kv_first_look(const bl_session *session, const bl_kv_batch *batch, bl_kv_work *work,
                             uint8_t *states)
{
    bl_entry_look(session, work, 0, work->count, work->entries);
    bl_crash_point("get.first_look");
    for (uint32_t i = 0; i < work->count; i++)
        states[i] = bl_entry_agrees(session, batch, i, work, &work->entries[i]) ? BL_BLOCK_HIT
                                                                               : BL_BLOCK_MISS;
}

typedef struct bl_kv_hits {
    bl_session *session;
    const bl_kv_batch *batch;
    bl_kv_work *work;
    uint8_t *states;
    uint64_t *mismatch_count;
    bl_throttle *throttles;     /* of each thread */
    uint32_t threads;
} bl_kv_hits;

static int bl_kv_first_look_guarded(void *context)
{
    const bl_kv_hits *read = context;
    bl_kv_first_look(read->session, read->batch, read->work, read->states);
    return 0;
}

/* Read one of several hits in parallel. Each has its own checksums and fault. */
static int bl_kv_hit_read(void *context, uint32_t i, uint32_t worker)
{
    const bl_kv_hits *read = context;
    bl_kv_work own = *read->work;
    if (read->states[i] != BL_BLOCK_HIT)
        return 0;
    own.checksums = malloc(bl_checksums_lines(own.chunk_count) + BL_LINE_SIZE);
    if (own.checksums == NULL)
        return -ENOMEM;
    int last = worker > 0 && i + read->threads >= read->work->count;
    if (read->threads > 1)
        bl_throttle_begin(&read->throttles[worker], read->batch->length, !last);
    int status = bl_kv_read(read->session, read->batch, i, &own, &read->throttles[worker]);
    if (status < 0)
        read->states[i] = status == -EBADMSG ? BL_KV_DAMAGED : BL_BLOCK_MISS;
    if (last)
        bl_throttle_end(&read->throttles[worker]);
    free(own.checksums);
    return bl_kv_fault(status);
}

/* Returns how many threads copy whole blocks. This is 1 if there are few or small blocks: then the
 * copy of each block uses the threads. */
static uint32_t bl_kv_block_threads(const bl_kv_batch *batch, uint32_t count)
{
    bl_copy_settings settings = bl_copy_settings_of(batch->settings);
    uint64_t part = settings.part, size = batch->length * (uint64_t)count;
    int few = count < BL_PARTS_PER_THREAD * (uint64_t)settings.threads && batch->length >= 2 * part;
    return few || size < part ? 1 : settings.threads;
}

static int bl_kv_hits_guarded(void *context)
{
    bl_kv_hits *read = context;
    const bl_kv_batch *batch = read->batch;
    uint32_t count = read->work->count, all = bl_copy_settings_of(batch->settings).threads;
    uint32_t threads = bl_kv_block_threads(batch, count);
    uint32_t workers = threads < BL_THREAD_POOL_WORKERS ? threads : BL_THREAD_POOL_WORKERS;
    bl_throttle throttles[BL_THREAD_POOL_WORKERS];
    throttles[0] = bl_throttle_make(batch->io_queue, 0, batch->transfer_class,
                                    (uint64_t)count * batch->length,
                                    all);
    for (uint32_t i = 1; i < workers; i++)
        throttles[i] = bl_throttle_other(&throttles[0]);
    read->throttles = throttles, read->threads = threads;
    int status = bl_thread_pool_run(threads, count, bl_kv_hit_read, read);
    for (uint32_t i = 0; i < workers; i++)
        bl_throttle_end(&throttles[i]);
    return status;
}

/* Look at the entries, and copy the blocks. Returns 0 or an error. */
static int bl_kv_hits_read(bl_kv_hits *read)
{
    const bl_memory *memory = &read->session->pool->memory;
    int status = bl_guarded(memory, bl_kv_first_look_guarded, read);
    if (status < 0)
        return status;
    return bl_kv_by_engine(read->batch)
               ? bl_kv_engine_read(read->session, read->batch, read->work, 0, read->work->count,
                                   read->states)
               : bl_guarded(memory, bl_kv_hits_guarded, read);
}

/* Confirm the copied blocks in the state HIT; others become MISS, to be read again if the epoch
 * stands. */
static int bl_kv_second_look_guarded(void *context)
{
    const bl_kv_hits *read = context;
    bl_session *session = read->session;
    bl_kv_work *work = read->work;
    bl_crash_point("get.copied");
    bl_entry_look(session, work, 0, work->count, work->entries);
    bl_crash_point("get.second_look");
    work->stands = bl_epoch_stands(session, work);
    if (!work->stands) { /* no block is damaged */
        memset(read->states, BL_BLOCK_MISS, work->count);
        return 0;
    }
    for (uint32_t i = 0; i < work->count; i++) {
        if (read->states[i] == BL_BLOCK_HIT &&
            bl_entry_agrees(session, read->batch, i, work, &work->entries[i])) {
            bl_kv_confirm(session, read->batch, i, work);
            continue;
        }
        ++*read->mismatch_count;
        bl_shared_add(&session->stat.mismatch_count, 1);
        bl_shared_add(&session->stat.checksum_count, read->states[i] == BL_KV_DAMAGED);
        read->states[i] = BL_BLOCK_MISS;
    }
    return 0;
}

/* One block that is read again. */
typedef struct bl_kv_one {
    bl_kv_hits *read;
    uint32_t i;
} bl_kv_one;

static int bl_kv_one_guarded(void *context)
{
    const bl_kv_one *one = context;
    const bl_kv_hits *read = one->read;
    bl_entry *entry = &read->work->entries[one->i];
    bl_entry_look(read->session, read->work, one->i, 1, entry);
    return bl_entry_agrees(read->session, read->batch, one->i, read->work, entry) ? 0 : -EAGAIN;
}

static int bl_kv_one_confirm_guarded(void *context)
{
    const bl_kv_one *one = context;
    const bl_kv_hits *read = one->read;
    int status = bl_kv_one_guarded(context);
    if (status == 0 && !bl_epoch_stands(read->session, read->work))
        status = -EAGAIN;
    if (status == 0)
        bl_kv_confirm(read->session, read->batch, one->i, read->work);
    return status;
}

/* Read one block once more. Returns 0 if the copy is confirmed, -EAGAIN if it is a miss, or the
 * error of the call. */
static int bl_kv_read_again(bl_kv_hits *read, uint32_t i)
{
    const bl_memory *memory = &read->session->pool->memory;
    bl_kv_one one = {read, i};
    int status = bl_guarded(memory, bl_kv_one_guarded, &one);
    if (status == 0 && bl_kv_by_engine(read->batch)) {
        read->states[i] = BL_BLOCK_HIT;
        status = bl_kv_engine_read(read->session, read->batch, read->work, i, 1, read->states);
        if (status == 0 && read->states[i] != BL_BLOCK_HIT)
            status = -EAGAIN;
    } else if (status == 0) {
        status = bl_kv_read(read->session, read->batch, i, read->work, NULL);
        if (status < 0 && bl_kv_fault(status) == 0)
            status = -EAGAIN;
    }
    if (status == 0)
        status = bl_guarded(memory, bl_kv_one_confirm_guarded, &one);
    read->states[i] = status == 0 ? BL_BLOCK_HIT : BL_BLOCK_MISS;
    return status;
}

/* Confirm the copies, and read blocks again that have changed or are damaged. Returns how many
 * leading blocks are correct, or an error. */
static int64_t bl_kv_judge(bl_kv_hits *read)
{
    bl_kv_work *work = read->work;
    int status = bl_guarded(&read->session->pool->memory, bl_kv_second_look_guarded, read);
    uint32_t leading = work->count;
    for (uint32_t i = 0; status == 0 && i < work->count; i++) {
        if (read->states[i] != BL_BLOCK_HIT && work->stands)
            status = bl_kv_read_again(read, i);
        status = status == -EAGAIN ? 0 : status;
        if (read->states[i] != BL_BLOCK_HIT && i < leading)
            leading = i;
    }
    return status < 0 ? status : (int64_t)leading;
}

/* Release the pins of a get, if it has any. Returns 0 or more, or an error. */
static int64_t bl_kv_unpin(bl_session *session, const bl_kv_batch *batch, const bl_kv_work *work)
{
    if (batch->records != NULL)
        return 0;
    int64_t released = bl_release_blocks(session, work->records, work->count, batch->timeout_ns);
    bl_crash_point("get.released");
    return released;
}

/* End a get; read is 0 or more, or the error of the copies. Returns 0 or an error. */
static int bl_kv_release(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work, int read,
                         uint8_t *states)
{
    if (work->count > 0) {
        bl_kv_retire(session, batch, read);
        int64_t released = bl_kv_unpin(session, batch, work);
        if (released < 0)
            read = (int)released;
    }
    if (read == 0 && work->count < batch->count)
        states[work->count] = (uint8_t)work->after;
    return read;
}

int64_t bl_kv_get(bl_session *session, const bl_kv_batch *batch, uint8_t *states,
                  uint64_t *mismatch_count)
{
    bl_kv_work work;
    bl_kv_hits read = {session, batch, &work, states, mismatch_count, NULL, 0};
    int64_t leading = 0;
    int status = bl_kv_work_make(session, batch, &work);
    if (status < 0)
        return status;
    status = bl_kv_lookup(session, batch, &work, states);
    if (status == 0) {
        if (work.count > 0)
            status = bl_kv_hits_read(&read);
        if (work.count > 0 && status == 0)
            leading = bl_kv_judge(&read);
        status = bl_kv_release(session, batch, &work, leading < 0 ? (int)leading : status, states);
    }
    bl_kv_work_free(session, &work);
    return status < 0 ? status : leading;
}
