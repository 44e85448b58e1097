/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The numbers of blocks. Numbers whose lines were never written are used first, then fresh ones.
 * The lines of removed blocks are kept as traces, which show what became of a block
 * (check/entries.c): their numbers are reused, the oldest first, when no fresh number is left, or
 * when there are too many traces.
 */
#include "index/blocks.h"

enum { BL_TRACES = 4096 };      /* the most traces while there are fresh numbers */

int64_t bl_number_unused(bl_meta *meta)
{
    int fresh = meta->fresh_number < meta->pool->geometry.block_count_max;
    uint32_t number = meta->free_number;
    if (number != BL_NO_NUMBER) {
        meta->free_number = meta->blocks[number].links[BL_LIST_LANE].next;
        return number;
    }
    if (fresh && meta->rest_count < BL_TRACES) {
        bl_entries_reach(meta, meta->fresh_number);
        return meta->fresh_number++;
    }
    if (meta->rest_count == 0)
        return -BL_ERROR_TABLE_FULL;
    number = meta->rest_first;
    meta->rest_first = meta->blocks[number].links[BL_LIST_LANE].next;
    meta->rest_count--;
    return number;
}

void bl_number_give(bl_meta *meta, uint32_t number)
{
    meta->blocks[number].state = BL_NUMBER_FREE;
    meta->blocks[number].links[BL_LIST_LANE].next = meta->free_number;
    meta->free_number = number;
}

void bl_number_rest(bl_meta *meta, uint32_t number)
{
    meta->blocks[number].state = BL_NUMBER_FREE;
    if (meta->rest_count++ == 0)
        meta->rest_first = number;
    else
        meta->blocks[meta->rest_last].links[BL_LIST_LANE].next = number;
    meta->rest_last = number;
}
