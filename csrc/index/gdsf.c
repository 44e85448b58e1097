/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The priorities of index/gdsf.h, in a min-heap of ids. A walk visits the heap level by level.
 */
#include "index/gdsf.h"

#include <errno.h>
#include <stdlib.h>

#include "base/lazy.h"

enum {
    BL_GDSF_SCALE = 1 << 20,
    BL_GDSF_SIZE = 1 << 20,     /* assumed for a block without bl_gdsf_assign */
    BL_GDSF_USES_MAX = 1 << 12
};

typedef struct bl_gdsf_note {
    uint64_t priority;
    int64_t stamp;              /* the number of its last touch */
    uint32_t place;             /* 1 + its index in the heap; 0: not in the order */
    uint32_t uses;
    uint32_t position;
    uint32_t size;              /* 0: not assigned */
} bl_gdsf_note;

struct bl_gdsf {
    bl_gdsf_note *notes;        /* by id */
    uint32_t *heap;
    uint32_t id_count;
    uint32_t count;             /* ids in the heap */
    uint64_t inflation;
    int64_t newest;             /* the last stamp */
    int64_t oldest;             /* the last stamp given by cool: negative */
    uint64_t deeper_priority;   /* priority of the block touched last */
    uint32_t deeper_position;
};

int bl_gdsf_create(bl_gdsf **out, uint32_t id_count)
{
    bl_gdsf *order = calloc(1, sizeof *order);
    if (!order)
        return -ENOMEM;
    order->id_count = id_count;
    order->notes = bl_lazy_map_dense(((size_t)id_count + 1) * sizeof *order->notes);
    order->heap = bl_lazy_map_dense(((size_t)id_count + 1) * sizeof *order->heap);
    if (!order->notes || !order->heap) {
        bl_gdsf_destroy(order);
        return -ENOMEM;
    }
    *out = order;
    return 0;
}

void bl_gdsf_destroy(bl_gdsf *order)
{
    bl_lazy_unmap(order->notes, ((size_t)order->id_count + 1) * sizeof *order->notes);
    bl_lazy_unmap(order->heap, ((size_t)order->id_count + 1) * sizeof *order->heap);
    free(order);
}

/* Return 1 if id is evicted before other. */
static int bl_gdsf_before(const bl_gdsf *order, uint32_t id, uint32_t other)
{
    const bl_gdsf_note *a = &order->notes[id], *b = &order->notes[other];
    return a->priority != b->priority ? a->priority < b->priority : a->stamp < b->stamp;
}

static void bl_gdsf_put(bl_gdsf *order, uint32_t at, uint32_t id)
{
    order->heap[at] = id;
    order->notes[id].place = at + 1;
}

/* Restore the heap order for the id at an index. */
static void bl_gdsf_settle(bl_gdsf *order, uint32_t at)
{
    uint32_t id = order->heap[at];
    for (; at && bl_gdsf_before(order, id, order->heap[(at - 1) / 2]); at = (at - 1) / 2)
        bl_gdsf_put(order, at, order->heap[(at - 1) / 2]);
    for (uint64_t child; (child = 2 * (uint64_t)at + 1) < order->count; at = (uint32_t)child) {
        if (child + 1 < order->count &&
            bl_gdsf_before(order, order->heap[child + 1], order->heap[child]))
            child++;
        if (!bl_gdsf_before(order, order->heap[child], id))
            break;
        bl_gdsf_put(order, at, order->heap[child]);
    }
    bl_gdsf_put(order, at, id);
}

/* Set the priority of an id, and add it to the heap if it is not there. */
static void bl_gdsf_set(bl_gdsf *order, uint32_t id, uint64_t priority, int64_t stamp)
{
    bl_gdsf_note *note = &order->notes[id];
    note->priority = priority;
    note->stamp = stamp;
    if (!note->place)
        bl_gdsf_put(order, order->count++, id);
    bl_gdsf_settle(order, note->place - 1);
}

void bl_gdsf_assign(bl_gdsf *order, uint32_t id, uint32_t position, uint32_t size)
{
    bl_gdsf_remove(order, id);
    order->notes[id] = (bl_gdsf_note){.position = position, .size = size ? size : 1};
}

void bl_gdsf_touch(bl_gdsf *order, uint32_t id)
{
    bl_gdsf_note *note = &order->notes[id];
    uint64_t size = note->size ? note->size : BL_GDSF_SIZE;
    note->uses += note->uses < BL_GDSF_USES_MAX;
    uint64_t cost = (BL_GDSF_TOKENS + (uint64_t)note->position) * BL_GDSF_SCALE / size;
    uint64_t priority = order->inflation + note->uses * cost;
    if (priority < note->priority)
        priority = note->priority;
    if (note->position < order->deeper_position && priority < order->deeper_priority)
        priority = order->deeper_priority;
    order->deeper_position = note->position;
    order->deeper_priority = priority;
    bl_gdsf_set(order, id, priority, ++order->newest);
}

void bl_gdsf_cool(bl_gdsf *order, uint32_t id) { bl_gdsf_set(order, id, 0, --order->oldest); }

void bl_gdsf_remove(bl_gdsf *order, uint32_t id)
{
    uint32_t place = order->notes[id].place;
    if (!place)
        return;
    order->notes[id].place = 0;
    uint32_t last = order->heap[--order->count];
    if (last != id) {
        bl_gdsf_put(order, place - 1, last);
        bl_gdsf_settle(order, place - 1);
    }
}

void bl_gdsf_forget(bl_gdsf *order, uint32_t id)
{
    bl_gdsf_note *note = &order->notes[id];
    if (note->place == 1 && note->priority > order->inflation)
        order->inflation = note->priority;
    bl_gdsf_remove(order, id);
    *note = (bl_gdsf_note){0};
}

int bl_gdsf_has(const bl_gdsf *order, uint32_t id) { return order->notes[id].place != 0; }

int64_t bl_gdsf_coldest(const bl_gdsf *order)
{
    return order->count ? order->heap[0] : (int64_t)-1;
}

int64_t bl_gdsf_warmer(const bl_gdsf *order, uint32_t id)
{
    uint32_t next = order->notes[id].place;
    return next < order->count ? order->heap[next] : (int64_t)-1;
}
