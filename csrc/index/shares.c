/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The counts of index/shares.h.
 */
#include "index/shares.h"

#include <errno.h>

#include "index/hints.h"

static void bl_share_set(bl_index *index, uint32_t share, uint32_t part)
{
    const bl_geometry *g = &index->pool->geometry;
    index->shares[share].bytes = bl_part_of(g->stripe_count * BL_STRIPE_SIZE, part);
    index->shares[share].count = bl_part_of(g->block_count_max, part);
}

void bl_shares_begin(bl_index *index)
{
    index->share_count = index->turn.count = 1;
    index->hint_part = BL_HINT_PART;
    bl_share_set(index, 0, BL_SHARE_WHOLE);
}

int bl_index_share(bl_index *index, const uint32_t *parts, uint32_t count,
                  const bl_share_rule *rules, uint32_t rule_count)
{
    uint64_t given = 0;
    if (index->share_count > 1)
        return -EEXIST;
    if (count >= BL_SHARE_COUNT || rule_count > BL_SHARE_RULES)
        return -EINVAL;
    for (uint32_t i = 0; i < count; i++)
        given += parts[i];
    for (uint32_t i = 0; i < rule_count; i++)
        if (rules[i].share == 0 || rules[i].share > count)
            return -EINVAL;
    if (given > BL_SHARE_WHOLE)
        return -EINVAL;
    for (uint32_t share = 1; share <= count; share++) {
        int status = index->orders[share] ? 0
                                         : bl_evict_create(&index->orders[share],
                                                           index->pool->geometry.block_count_max,
                                                           index->eviction);
        if (status < 0)
            return status;
        bl_share_set(index, share, parts[share - 1]);
    }
    bl_share_set(index, 0, BL_SHARE_WHOLE - (uint32_t)given);
    memcpy(index->rules, rules, rule_count * sizeof *rules);
    index->rule_count = rule_count;
    index->share_count = count + 1;
    return 0;
}

uint32_t bl_share_of(const bl_index *index, uint64_t fingerprint)
{
    for (uint32_t i = 0; i < index->rule_count; i++)
        if ((fingerprint & index->rules[i].mask) == index->rules[i].value)
            return index->rules[i].share;
    return 0;
}

void bl_share_use(bl_index *index, uint32_t number, int step)
{
    const bl_block *block = &index->blocks[number];
    bl_share *share = &index->shares[bl_block_share(block)];
    uint64_t size = bl_space_size(block);
    share->used_bytes += step > 0 ? size : 0ull - size;
    share->used_count += step > 0 ? 1 : 0ull - 1;
}

int64_t bl_share_excess(const bl_index *index, uint32_t share, uint64_t size)
{
    const bl_share *one = &index->shares[share];
    return (int64_t)(one->used_bytes + size - one->bytes);
}

int64_t bl_share_lines_excess(const bl_index *index, uint32_t share, uint64_t count)
{
    const bl_share *one = &index->shares[share];
    return (int64_t)(one->used_count + count - one->count);
}

/* Return the view of the only share: that of the pool. */
static bl_share_view bl_share_only(const bl_index *index)
{
    bl_index_stat stat;
    bl_index_describe(index, &stat);
    return (bl_share_view){.bytes = stat.data_bytes,
                           .used_bytes = stat.used_bytes,
                           .blocks = stat.block_count + stat.grant_count,
                           .evictions = stat.evict_count};
}

uint32_t bl_index_shares(const bl_index *index, bl_share_view *out, uint32_t count)
{
    uint32_t share = 0;
    if (index->share_count == 1 && count > 0)
        out[share++] = bl_share_only(index);
    for (; share < index->share_count && share < count; share++) {
        const bl_share *one = &index->shares[share];
        out[share] = (bl_share_view){.bytes = one->bytes,
                                     .used_bytes = one->used_bytes,
                                     .blocks = one->used_count,
                                     .evictions = one->evict_count};
    }
    for (uint32_t one = 0; one < share; one++)
        bl_hints_view(index, one, &out[one]);
    return share;
}
