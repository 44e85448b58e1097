/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Intrusive lists of blocks or keys that wait for the service of the lower tiers, the oldest first.
 * A callback returns an element's link, so an element can be in as many lists as it has links.
 */
#ifndef BL_WORK_LIST_H
#define BL_WORK_LIST_H

#include "index/state.h"

typedef struct bl_work_list {
    uint32_t first, last;       /* BL_NO_NUMBER: there is none */
} bl_work_list;

typedef bl_link *(*bl_work_link)(bl_index *index, uint32_t number);

static inline void bl_work_clear(bl_work_list *list)
{
    *list = (bl_work_list){BL_NO_NUMBER, BL_NO_NUMBER};
}

static inline bl_link *bl_work_block_link(bl_index *index, uint32_t number)
{
    return &index->blocks[number].links[BL_LIST_LOWER];
}

static inline void bl_work_append(bl_index *index, bl_work_list *list, bl_work_link link,
                                  uint32_t number)
{
    *link(index, number) = (bl_link){BL_NO_NUMBER, list->last};
    if (list->last != BL_NO_NUMBER)
        link(index, list->last)->next = number;
    else
        list->first = number;
    list->last = number;
}

static inline void bl_work_prepend(bl_index *index, bl_work_list *list, bl_work_link link,
                                   uint32_t number)
{
    *link(index, number) = (bl_link){list->first, BL_NO_NUMBER};
    if (list->first != BL_NO_NUMBER)
        link(index, list->first)->previous = number;
    else
        list->last = number;
    list->first = number;
}

static inline void bl_work_unlink(bl_index *index, bl_work_list *list, bl_work_link link,
                                  uint32_t number)
{
    bl_link here = *link(index, number);
    if (here.next != BL_NO_NUMBER)
        link(index, here.next)->previous = here.previous;
    else
        list->last = here.previous;
    if (here.previous != BL_NO_NUMBER)
        link(index, here.previous)->next = here.next;
    else
        list->first = here.next;
}

#endif
