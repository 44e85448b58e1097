/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The numbers of blocks. Numbers whose lines were never written are used first, then fresh ones.
 * The lines of removed blocks are kept as traces, which show what became of a block
 * (check/entries.c): their numbers are reused, the oldest first, when no fresh number is left, or
 * when there are too many traces.
 */
#include "index/numbers.h"

#include "index/table.h"

enum { BL_TRACES = 4096 };      /* the most traces while there are fresh numbers */

int64_t bl_number_unused(bl_index *index)
{
    int fresh = index->fresh_number < index->pool->geometry.block_count_max;
    uint32_t number = index->free_number;
    if (number != BL_NO_NUMBER) {
        index->free_number = index->blocks[number].links[BL_LIST_LANE].next;
        return number;
    }
    if (fresh && index->rest_count < BL_TRACES) {
        bl_entries_reach(index, index->fresh_number);
        return index->fresh_number++;
    }
    if (index->rest_count == 0)
        return -BL_ERROR_TABLE_FULL;
    number = index->rest_first;
    index->rest_first = index->blocks[number].links[BL_LIST_LANE].next;
    index->rest_count--;
    return number;
}

void bl_number_give(bl_index *index, uint32_t number)
{
    index->blocks[number].state = BL_NUMBER_FREE;
    index->blocks[number].links[BL_LIST_LANE].next = index->free_number;
    index->free_number = number;
}

void bl_number_rest(bl_index *index, uint32_t number)
{
    index->blocks[number].state = BL_NUMBER_FREE;
    if (index->rest_count++ == 0)
        index->rest_first = number;
    else
        index->blocks[index->rest_last].links[BL_LIST_LANE].next = number;
    index->rest_last = number;
}
