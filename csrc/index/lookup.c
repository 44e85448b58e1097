/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Handles the calls of readers: lookup, release, remove, stat. A pinned block is not evicted; even
 * if it is removed, its space is not reused before the last pin is released.
 */
#include "index/lookup.h"

#include "base/minmax.h"
#include "coherence/crash_point.h"
#include "index/call.h"
#include "index/hints.h"
#include "index/lower.h"
#include "index/numbers.h"
#include "index/reclaim.h"
#include "index/shares.h"
#include "index/tombstones.h"

/* Add a pin for a lane. Returns 0, -BL_ERROR_PIN_LIMIT or _QUOTA. A pinned block is not in the
 * eviction order. */
static int bl_pin(bl_index *index, uint32_t lane, uint32_t number)
{
    uint32_t most = index->server->quota.pin_count;
    int64_t pins = bl_pins_add(index->pins[lane], number);
    if (pins < 0)
        return -BL_ERROR_PIN_LIMIT;
    if (pins == 1) {
        int many = most && bl_pins_count(index->pins[lane]) > most;
        if (many || bl_hold_full(index, lane, index->blocks[number].length)) {
            bl_pins_remove(index->pins[lane], number);
            index->server->stat.quota_pin_count++;
            return many ? -BL_ERROR_PIN_LIMIT : -BL_ERROR_QUOTA;
        }
        index->holds[lane].bytes += index->blocks[number].length;
    }
    if (index->blocks[number].pin_count++ == 0) {
        bl_evict_remove(bl_order_of(index, number), number);
        index->stat.pinned_count++;
    }
    return 0;
}

void bl_unpin(bl_index *index, uint32_t number, uint32_t count)
{
    bl_block *block = &index->blocks[number];
    block->pin_count -= count;
    if (block->pin_count > 0)
        return;
    index->stat.pinned_count--;
    if (block->state == BL_NUMBER_COMMITTED) {
        bl_block_touch(index, number);
    } else { /* DOOMED: the block was removed while a session read it */
        bl_crash_point("release.doomed");
        bl_space_give(index, number);
        bl_number_rest(index, number);
    }
}

/* Find the numbers of keys [first, end), whose buckets were prefetched, and prefetch what a hit
 * reads: the block. */
static void bl_lookup_find(const bl_index *index, const uint8_t *keys, uint32_t first, uint32_t end,
                           int64_t *numbers)
{
    uint64_t key[2];
    for (uint32_t i = first; i < end; i++) {
        bl_key_at(keys, i, key);
        int64_t number = numbers[i - first] = bl_hash_find(index->hash, key);
        if (number < 0)
            return; /* the chain ends here */
        bl_prefetch(&index->blocks[number]);
    }
}

/* Look up the leading keys that are committed. Returns their number; *state is that of the next
 * key. A hit's cache misses, of the bucket and of the block, are prefetched one group ahead. */
static uint32_t bl_lookup_chain(bl_index *index, const uint8_t *keys, uint32_t count, bl_call *call,
                                uint32_t *state)
{
    int64_t numbers[BL_GROUP_KEYS];
    uint32_t end;
    *state = BL_BLOCK_HIT;
    bl_index_prefetch(index, keys, 0, count);
    for (uint32_t first = 0; first < count; first = end) {
        end = (uint32_t)bl_min(first + BL_GROUP_KEYS, count);
        bl_index_prefetch(index, keys, end, count);
        bl_lookup_find(index, keys, first, end, numbers);
        for (uint32_t hits = first; hits < end; hits++) {
            int64_t number = numbers[hits - first];
            if (number < 0 || index->blocks[number].state != BL_NUMBER_COMMITTED) {
                uint64_t key[2];
                bl_key_at(keys, hits, key);
                *state = number < 0 ? bl_lower_state(index, key) : BL_BLOCK_PENDING;
                return hits;
            }
            const bl_block *block = &index->blocks[number];
            bl_block_record record = {
                .offset = block->offset,
                .generation = block->generation,
                .block = (uint32_t)number,
                .length = block->length,
                .state = BL_BLOCK_HIT,
            };
            bl_index_record(call, hits, &record);
        }
    }
    return count;
}

static uint32_t bl_record_block(const uint8_t *records, uint32_t index)
{
    bl_block_record record;
    memcpy(&record, records + index * sizeof record, sizeof record);
    return record.block;
}

/* Record a hit. A fault after the lookup may have ended a session, and so freed the block. */
static void bl_hit_record(bl_index *index, uint32_t number)
{
    bl_block *block = &index->blocks[number];
    if (block->state != BL_NUMBER_COMMITTED)
        return;
    index->tenants[block->tenant].hit_count++;
    block->again = 0;
    if (block->pin_count == 0)
        bl_block_touch(index, number);
}

/* Record the use of blocks with hints. */
static void bl_hits_hinted(bl_index *index, const uint8_t *records, uint32_t count)
{
    uint64_t now_ns = bl_now_ns(&index->pool->memory);
    for (uint32_t i = 0; i < count; i++)
        bl_hint_used(index, bl_record_block(records, i), now_ns);
}

/* Deepest first: a parent is newer than its child. The cache misses of an eviction order, of a
 * block's node and of its neighbors, are prefetched two groups and one group ahead. */
void bl_lookup_deferred(void *context)
{
    bl_index *index = context;
    const bl_evict *order = index->orders[0]; /* the order of most blocks */
    const uint8_t *records = index->hits.records;
    int64_t count = index->hits.count;
    for (int64_t node = count - 1; node >= -2 * BL_GROUP_KEYS; node--) {
        int64_t neighbors = node + BL_GROUP_KEYS, hit = node + 2 * BL_GROUP_KEYS;
        if (node >= 0)
            bl_evict_prefetch(order, bl_record_block(records, (uint32_t)node));
        if (neighbors >= 0 && neighbors < count)
            bl_evict_prefetch_neighbors(order, bl_record_block(records, (uint32_t)neighbors));
        if (hit < count)
            bl_hit_record(index, bl_record_block(records, (uint32_t)hit));
    }
    if (index->hints)
        bl_hits_hinted(index, records, index->hits.count);
}

int bl_handle_lookup(void *context, bl_call *call)
{
    bl_index *index = context;
    bl_block_request head;
    uint32_t state;
    const uint8_t *keys = bl_index_items(call, 2 * sizeof(uint64_t), &head);
    if (keys == NULL || !bl_index_fits(call, head.count))
        return -BL_ERROR_BAD_REQUEST;
    uint32_t hits = bl_lookup_chain(index, keys, head.count, call, &state);
    int counts = !(head.flags & BL_LOOKUP_PEEK);
    if (counts)
        index->stat.lookup_count += head.count;
    bl_crash_point("lookup.found");
    const uint8_t *records = call->reply + sizeof(bl_block_reply);
    if (head.flags & BL_LOOKUP_PIN)
        for (uint32_t i = 0; i < hits; i++) {
            int status = bl_pin(index, call->lane, bl_record_block(records, i));
            if (status < 0 && i == 0)
                return status;
            if (status < 0) {
                hits = i; /* fewer hits are legal: the caller may look up the rest later */
                state = BL_BLOCK_MISS;
            }
        }
    if (counts) {
        index->hits.records = records;
        index->hits.count = hits;
        index->server->deferred = 1;
        index->stat.hit_count += hits;
    }
    bl_crash_point("lookup.pinned");
    bl_index_reply(call, hits, state, hits);
    return 0;
}

static int bl_release_one(bl_index *index, uint32_t lane, const bl_commit *commit)
{
    if (commit->block >= index->pool->geometry.block_count_max)
        return -BL_ERROR_NO_GRANT;
    int64_t left = bl_pins_remove(index->pins[lane], commit->block);
    if (left < 0)
        return -BL_ERROR_NO_GRANT;
    bl_crash_point("release.counted");
    if (left == 0)
        index->holds[lane].bytes -= index->blocks[commit->block].length;
    bl_unpin(index, commit->block, 1);
    bl_crash_point("release.unpinned");
    return 0;
}

int bl_handle_release(void *context, bl_call *call)
{
    return bl_handle_give_up(context, call, bl_release_one);
}

/* Return 1 if the block is a task that no worker has claimed. */
static int bl_unclaimed(const bl_index *index, const bl_block *block)
{
    return block->task != 0 &&
           bl_tasks_waits(index->tasks, block->task - 1, bl_now_ns(&index->pool->memory));
}

/* Write the tombstones of a key. Returns 0; or -BL_ERROR_REMOVALS_FULL or _TABLE_FULL, with nothing
 * written. */
static int bl_remove_below(bl_index *index, const uint64_t key[2], uint32_t lane)
{
    uint32_t numbers[BL_TOMBSTONE_STORES];
    int needed = bl_tombstones_needed(index, key, lane);
    for (int taken = 0; taken < needed; taken++) {
        int64_t number = bl_number_take(index);
        if (number < 0) {
            while (taken-- > 0)
                bl_number_give(index, numbers[taken]);
            return (int)number;
        }
        numbers[taken] = (uint32_t)number;
    }
    if (needed < 0)
        return needed;
    bl_tombstones_add(index, key, lane, numbers);
    bl_lower_remove(index, key, bl_hash_find(index->hash, key));
    return 0;
}

/* Remove a key from the pool and, by tombstones, from the lower tiers. Returns 1; 0 if the pool
 * does not have it; or an error. */
static int bl_remove_one(bl_index *index, const uint64_t key[2], uint32_t flags, uint32_t lane)
{
    int64_t number = bl_hash_find(index->hash, key);
    int task = number >= 0 && index->blocks[number].task != 0;
    int status = task || flags & BL_REMOVE_UNCLAIMED ? 0 : bl_remove_below(index, key, lane);
    if (status < 0)
        return status;
    number = bl_hash_find(index->hash, key); /* a tombstone's number may have evicted it */
    if (number < 0 || index->blocks[number].state != BL_NUMBER_COMMITTED)
        return 0;
    if ((flags & BL_REMOVE_UNCLAIMED) && !bl_unclaimed(index, &index->blocks[number]))
        return 0;
    index->stat.remove_count++;
    bl_crash_point("remove.found");
    bl_block_drop(index, (uint32_t)number, BL_REMOVED_CLIENT);
    return 1;
}

int bl_handle_remove(void *context, bl_call *call)
{
    bl_index *index = context;
    bl_block_request head;
    uint32_t done = 0, awaited = 0;
    int removed = 0;
    const uint8_t *keys = bl_index_items(call, 2 * sizeof(uint64_t), &head);
    if (keys == NULL)
        return -BL_ERROR_BAD_REQUEST;
    uint32_t tried = 0;
    bl_eviction_set_share(index, 0); /* tombstones count for no tenant */
    for (; tried < head.count && removed >= 0; tried += removed >= 0) {
        uint64_t key[2];
        memcpy(key, keys + tried * sizeof key, sizeof key);
        removed = bl_remove_one(index, key, head.flags, call->lane);
        done += removed > 0;
        awaited |= bl_lower_awaited(index, key);
    }
    bl_crash_point("remove.done");
    /* A successor that read the entries before they were cleared serves these blocks. */
    int status = bl_server_still(index->server); /* SYNC remove: cleared before this read */
    if (status == 0 && tried == 0)
        status = removed;
    if (status == 0)
        bl_index_reply(call, done, (head.count - tried) << 1 | (awaited != 0), 0);
    return status;
}

int bl_handle_removing(void *context, bl_call *call)
{
    const bl_index *index = context;
    bl_block_request head;
    uint32_t awaited = 0;
    const uint8_t *keys = bl_index_items(call, 2 * sizeof(uint64_t), &head);
    if (keys == NULL || sizeof(bl_block_reply) + head.count > call->reply_capacity)
        return -BL_ERROR_BAD_REQUEST;
    for (uint32_t i = 0; i < head.count; i++) {
        uint64_t key[2];
        memcpy(key, keys + i * sizeof key, sizeof key);
        call->reply[sizeof(bl_block_reply) + i] = bl_tombstones_of(index, key);
        awaited |= bl_lower_awaited(index, key);
    }
    bl_index_reply(call, head.count, awaited != 0, 0);
    call->reply_size += head.count;
    return 0;
}

