/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Handles the calls of writers: reserve, commit, abort (D10). A grant is the right of one session
 * to write one block; it ends in commit, abort, or the session's end.
 */
#include "index/grant.h"

#include "coherence/crash_point.h"
#include "format/payload.h"
#include "index/call.h"
#include "index/hints.h"
#include "index/journal.h"
#include "index/retained.h"
#include "index/lower.h"
#include "index/numbers.h"
#include "index/reclaim.h"
#include "index/shares.h"
#include "index/table.h"
#include "index/task_call.h"
#include "index/tenants.h"

/* Return 1 if the host's suspect writers hold their limit of space. */
static int bl_quarantine_full(const bl_index *index, uint32_t lane)
{
    uint64_t bound = index->pool->geometry.stripe_count * BL_STRIPE_SIZE / 100 *
                     BL_QUARANTINE_PERCENT;
    return index->held_bytes[index->server->lanes[lane].host] > bound;
}

/* Return 0 if the session may get another grant, or else the error. */
static int bl_grant_refused(bl_index *index, uint32_t lane, uint32_t length)
{
    uint32_t most = index->server->quota.grant_count;
    if (index->server->stat.draining)
        return -BL_ERROR_DRAINING;
    if (bl_quarantine_full(index, lane))
        return -BL_ERROR_QUARANTINE;
    if ((most == 0 || index->holds[lane].grant_count < most) && !bl_hold_full(index, lane, length))
        return 0;
    index->server->stat.quota_grant_count++;
    return -BL_ERROR_QUOTA;
}

/* Remove a block from the session's grants. */
static void bl_grant_leave(bl_index *index, const bl_block *block)
{
    index->holds[block->lane].bytes -= block->length;
    index->holds[block->lane].grant_count--;
    index->stat.grant_count--;
}

/* Free space that was not assigned to a block. */
static void bl_space_untake(bl_index *index, uint64_t offset, uint32_t size)
{
    bl_pages_give(index->pages, offset, size);
    bl_extents_return(index, offset, size);
}

/* Grant a new block. Returns its number, or an error. */
static int64_t bl_grant(bl_index *index, uint32_t lane, const uint64_t key[2],
                        const bl_block_request *head)
{
    uint64_t offset, stored = bl_stored_size(head->length, head->chunk_size);
    if (head->flags & BL_RESERVE_KEPT && bl_retained_full(index, stored))
        return -BL_ERROR_QUEUE_FULL;
    int status = bl_space_take(index, stored, &offset);
    if (status < 0)
        return bl_lower_refusal(index, status);
    bl_crash_point("grant.space_taken");
    int64_t number = bl_number_take(index);
    if (number < 0) {
        bl_space_untake(index, offset, bl_block_size(stored));
        return bl_lower_refusal(index, (int)number);
    }
    index->blocks[number] = (bl_block){
        .key = {key[0], key[1]},
        .generation = bl_generation_new(index),
        .offset = offset,
        .fingerprint = head->fingerprint,
        .length = head->length,
        .chunk_size = head->chunk_size,
        .state = BL_NUMBER_GRANTED,
        .order = (uint8_t)index->turn.requester,
        .lane = lane,
        .onboard_state = head->flags & BL_RESERVE_BROUGHT ? BL_ONBOARD_WANTED : BL_ONBOARD_NONE,
    };
    if (head->flags & BL_RESERVE_KEPT)
        bl_block_retain(index, (uint32_t)number); /* never full: bl_retained_full() was checked */
    if (bl_hash_add(index->hash, key, (uint32_t)number) < 0) {
        bl_block_unretain(index, (uint32_t)number);
        bl_space_untake(index, offset, bl_block_size(stored));
        bl_number_give(index, (uint32_t)number);
        return -BL_ERROR_TABLE_FULL;
    }
    bl_block_place(index, (uint32_t)number);
    bl_list_add(index, &index->lane_blocks[lane], BL_LIST_LANE, (uint32_t)number);
    bl_block_assign(index, (uint32_t)number);
    index->holds[lane].bytes += head->length;
    index->holds[lane].grant_count++;
    index->stat.grant_count++;
    bl_crash_point("grant.made");
    return number;
}

static void bl_reserve_one(bl_index *index, uint32_t lane, const uint64_t key[2],
                           const bl_block_request *head, bl_block_record *record)
{
    int64_t number = bl_hash_find(index->hash, key);
    *record = (bl_block_record){0};
    if (number >= 0) {
        int committed = index->blocks[number].state == BL_NUMBER_COMMITTED;
        record->state = committed ? BL_BLOCK_HIT : BL_BLOCK_PENDING;
    } else if (bl_lower_unwanted(index, key, head->flags)) {
        record->state = BL_BLOCK_PENDING;
        return;
    } else {
        number = bl_grant_refused(index, lane, head->length);
        number = number < 0 ? number : bl_grant(index, lane, key, head);
        record->state = number < 0 ? BL_BLOCK_REFUSED : BL_BLOCK_GRANTED;
    }
    if (number < 0) {
        record->status = (int32_t)number;
        bl_stat_refused(index, (int)number);
        return;
    }
    record->offset = index->blocks[number].offset;
    record->generation = index->blocks[number].generation;
    record->block = (uint32_t)number;
    record->length = index->blocks[number].length;
}

/* Check that this server is still the pool's server. Only then may space of formerly committed
 * blocks be granted: a successor that read their entries before they were cleared serves them.
 * Returns 0 or an error. */
static int bl_reuse_check(bl_index *index)
{
    if (!index->reused)
        return 0;
    int status = bl_server_still(index->server); /* SYNC entry.reuse: cleared before this read */
    index->reused = status < 0; /* a deposed server stays deposed: later calls fail, too */
    return status;
}

int bl_handle_reserve(void *context, bl_call *call)
{
    bl_index *index = context;
    bl_block_request head;
    const uint8_t *keys = bl_index_items(call, 2 * sizeof(uint64_t), &head);
    if (keys == NULL || !bl_index_fits(call, head.count) || head.length == 0 ||
        (head.chunk_size != 0 && head.chunk_size < BL_LINE_SIZE) ||
        (head.flags & ~(uint32_t)(BL_RESERVE_KEPT | BL_RESERVE_BROUGHT)) != 0)
        return -BL_ERROR_BAD_REQUEST;
    if (head.flags & BL_RESERVE_KEPT)
        bl_tasks_age(index);
    bl_eviction_set_share(index, head.fingerprint);
    if (index->hints)
        bl_hints_expire(index);
    bl_pages_defer(index->pages);
    for (uint32_t i = 0; i < head.count; i++) {
        uint64_t key[2];
        bl_block_record record;
        if (i % BL_GROUP_KEYS == 0)
            bl_index_prefetch(index, keys, i, head.count);
        bl_key_at(keys, i, key);
        bl_reserve_one(index, call->lane, key, &head, &record);
        bl_index_record(call, i, &record);
    }
    bl_pages_settle(index->pages);
    bl_crash_point("reserve.granted");
    int status = bl_reuse_check(index);
    bl_crash_point("reserve.checked");
    if (status == 0)
        bl_index_reply(call, head.count, 0, head.count);
    return status;
}

/* Return the block of a commit, or NULL if its key or generation differs. */
static bl_block *bl_commit_block(bl_index *index, const bl_commit *commit)
{
    if (commit->block >= index->pool->geometry.block_count_max ||
        index->blocks[commit->block].generation != commit->generation ||
        memcmp(index->blocks[commit->block].key, commit->key, sizeof commit->key) != 0)
        return NULL;
    return &index->blocks[commit->block];
}

static int bl_commit_one(bl_index *index, uint32_t lane, const bl_commit *commit,
                         const bl_name *name)
{
    bl_block *block = bl_commit_block(index, commit);
    uint32_t number = commit->block;
    if (block == NULL)
        return -BL_ERROR_NO_GRANT;
    if (block->state == BL_NUMBER_COMMITTED) { /* a repeated commit */
        if (block->named && name->block_tokens != 0) {
            bl_name_write(index, number, name); /* the server may have died before this */
            bl_journal_stored(index, number, name);
        }
        return 0;
    }
    if (block->state != BL_NUMBER_GRANTED || block->lane != lane)
        return -BL_ERROR_NO_GRANT;
    int status = block->task ? bl_task_enqueue(index, number) : 0;
    if (block->onboard_state == BL_ONBOARD_REMOVED) /* removed during its onboard */
        status = -BL_ERROR_NO_GRANT;
    if (status < 0) {
        bl_grant_end(index, number, BL_END_GONE);
        return status;
    }
    bl_list_remove(index, &index->lane_blocks[lane], BL_LIST_LANE, number);
    block->state = BL_NUMBER_COMMITTED;
    block->named = name->block_tokens != 0;
    bl_crash_point("commit.claimed");
    if (block->named)
        bl_name_write(index, number, name);
    bl_entry_write(index, number, commit->checksums_crc);
    bl_crash_point("commit.entered");
    bl_lower_committed(index, number);
    if (block->named)
        bl_journal_stored(index, number, name);
    bl_grant_leave(index, block);
    index->stat.commit_count++;
    bl_stat_committed(index, number);
    index->tenants[block->tenant].commit_count++;
    bl_crash_point("commit.counted");
    return 0;
}

void bl_grant_end(bl_index *index, uint32_t number, enum bl_end end)
{
    bl_block *block = &index->blocks[number];
    uint32_t size = bl_space_size(block);
    if (block->state == BL_NUMBER_GRANTED) {
        bl_hash_remove(index->hash, block->key);
        bl_block_unretain(index, number);
        bl_crash_point("abort.unindexed");
        bl_grant_leave(index, block);
        index->stat.abort_count++;
    } else { /* HELD */
        bl_pages_unhold(index->pages, block->offset, size);
        index->held_bytes[index->server->lanes[block->lane].host] -= block->length;
        index->holds[block->lane].held_bytes -= block->length;
    }
    if (end == BL_END_SUSPECT) {
        bl_pages_hold(index->pages, block->offset, size);
        index->held_bytes[index->server->lanes[block->lane].host] += block->length;
        index->holds[block->lane].held_bytes += block->length;
        block->state = BL_NUMBER_HELD;
        return;
    }
    bl_list_remove(index, &index->lane_blocks[block->lane], BL_LIST_LANE, number);
    bl_block_unplace(index, number);
    if (block->state == BL_NUMBER_GRANTED)
        bl_pages_give(index->pages, block->offset, size);
    bl_extents_return(index, block->offset, size);
    bl_number_give(index, number);
    bl_crash_point("abort.given");
}

/* Validate a commit, with or without names. Returns the first item, or NULL. */
static const uint8_t *bl_commit_items(const bl_call *call, bl_block_request *head, size_t *size)
{
    const uint8_t *items = bl_index_items(call, sizeof(bl_named_commit), head);
    *size = sizeof(bl_named_commit);
    if (items != NULL && head->flags == BL_COMMIT_NAMED)
        return items;
    *size = sizeof(bl_commit);
    items = bl_index_items(call, sizeof(bl_commit), head);
    return items != NULL && head->flags == 0 ? items : NULL;
}

int bl_handle_commit(void *context, bl_call *call)
{
    bl_index *index = context;
    bl_block_request head;
    size_t size;
    int retained = 0;
    const uint8_t *items = bl_commit_items(call, &head, &size);
    if (items == NULL || !bl_index_fits(call, head.count))
        return -BL_ERROR_BAD_REQUEST;
    for (uint32_t i = 0; i < head.count; i++) {
        bl_named_commit item = {.name = {.block_tokens = 0}};
        memcpy(&item, items + i * size, size);
        const bl_commit commit = item.commit;
        int status = bl_commit_one(index, call->lane, &commit, &item.name);
        bl_block_record record = {
            .generation = commit.generation,
            .block = commit.block,
            .state = status < 0 ? BL_BLOCK_REFUSED : BL_BLOCK_HIT,
            .status = status,
        };
        bl_index_record(call, i, &record);
        retained |= status == 0 && index->blocks[commit.block].task != 0;
    }
    for (uint32_t i = head.count; i-- > 0;) { /* last first: a parent is newer than its child */
        bl_commit commit;
        memcpy(&commit, items + i * size, sizeof commit);
        const bl_block *block = bl_commit_block(index, &commit);
        if (block && block->state == BL_NUMBER_COMMITTED && block->pin_count == 0)
            bl_block_touch(index, commit.block);
    }
    bl_crash_point("commit.done");
    /* SYNC task.commit: entered before */
    int status = retained ? bl_server_still(index->server) : 0;
    if (status == 0)
        bl_index_reply(call, head.count, 0, head.count);
    return status;
}

static int bl_abort_one(bl_index *index, uint32_t lane, const bl_commit *commit)
{
    const bl_block *block = bl_commit_block(index, commit);
    if (block == NULL || block->state != BL_NUMBER_GRANTED || block->lane != lane)
        return -BL_ERROR_NO_GRANT;
    bl_grant_end(index, commit->block, BL_END_GONE);
    return 0;
}

int bl_handle_abort(void *context, bl_call *call)
{
    return bl_handle_give_up(context, call, bl_abort_one);
}

