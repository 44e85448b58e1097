/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Counts blocks by tenant (fingerprint of the namespace, and length) and refusals by reason.
 *
 * The table is set-associative: a tenant may use BL_TENANT_WAYS slots. It takes one that was never
 * used or whose tenant has no blocks; if there is none, its blocks count for the first tenant,
 * which is the sum of all others. Most blocks belong to the same tenant as the block before, so
 * counting a block usually costs one comparison.
 */
#include "index/tenants.h"

#include "index/removal_log.h"

static int bl_tenant_is(const bl_tenant *tenant, const bl_block *block)
{
    return tenant->fingerprint == block->fingerprint && tenant->length == block->length;
}

/* Return the slot of the block's tenant, which is assigned if there is none. */
static uint32_t bl_tenant_find(bl_index *index, const bl_block *block)
{
    uint64_t mixed = (block->fingerprint ^ block->length) * 0x9e3779b97f4a7c15ull;
    uint32_t sets = (BL_TENANT_COUNT - 1) / BL_TENANT_WAYS;
    uint32_t first = 1 + (uint32_t)((mixed >> 32) % sets) * BL_TENANT_WAYS, found = 0;
    for (uint32_t place = first; place < first + BL_TENANT_WAYS; place++) {
        if (bl_tenant_is(&index->tenants[place], block))
            return place;
        if (found == 0 && index->tenants[place].block_count == 0)
            found = place;
    }
    for (uint32_t place = first; place < first + BL_TENANT_WAYS; place++)
        if (index->tenants[place].length == 0) { /* prefer a slot without counters */
            found = place;
            break;
        }
    if (found != 0)
        index->tenants[found] = (bl_tenant){.fingerprint = block->fingerprint,
                                             .length = block->length};
    return found;
}

void bl_stat_committed(bl_index *index, uint32_t number)
{
    bl_block *block = &index->blocks[number];
    if (!bl_tenant_is(&index->tenants[index->tenant], block))
        index->tenant = bl_tenant_find(index, block);
    block->tenant = (uint16_t)index->tenant;
    index->tenants[index->tenant].block_count++;
    index->stat.block_count++;
    index->stat.block_bytes += block->length;
}

void bl_stat_removed(bl_index *index, uint32_t number, enum bl_removal_reason why)
{
    int evicted = why == BL_REMOVED_SPACE || why == BL_REMOVED_ENTRY;
    const bl_block *block = &index->blocks[number];
    bl_tenant *tenant = &index->tenants[block->tenant];
    tenant->block_count--;
    index->stat.block_count--;
    index->stat.block_bytes -= block->length;
    tenant->evict_count += evicted;
    if (index->share_count > 1)
        index->shares[bl_block_share(block)].evict_count += evicted;
    index->stat.evict_count += evicted;
    bl_removal_log_add(index, block->key, why);
}

void bl_stat_refused(bl_index *index, int status)
{
    uint32_t place = (uint32_t)(-status - BL_ERROR_FORKED);
    index->stat.refuse_count++;
    if (place < BL_REFUSAL_COUNT)
        index->refusals[place]++;
}

uint64_t bl_index_refused(const bl_index *index, uint32_t error)
{
    uint32_t place = error - BL_ERROR_FORKED;
    return place < BL_REFUSAL_COUNT ? index->refusals[place] : 0;
}

uint32_t bl_index_tenants(const bl_index *index, bl_tenant *out, uint32_t count)
{
    uint32_t found = 0;
    for (uint32_t place = 0; place < BL_TENANT_COUNT && found < count; place++) {
        const bl_tenant *tenant = &index->tenants[place];
        if (tenant->length != 0 || tenant->block_count != 0 || tenant->commit_count != 0) {
            out[found] = *tenant;
            out[found++].block_bytes = tenant->block_count * tenant->length;
        }
    }
    return found;
}
