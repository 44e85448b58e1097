/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The eviction order of index/evict.h as a ring of links: a sentinel is both newer than the newest
 * and older than the coldest. A zero link says "not in the order", so that zeroed memory is an
 * empty order.
 */
#include "index/evict.h"

#include <errno.h>
#include <stdlib.h>

#include "base/lazy.h"

enum { BL_EVICT_KNOT = 1, BL_EVICT_FIRST = 2 };     /* node numbers: the sentinel, then id 0 */

typedef struct bl_evict_node {
    uint32_t older;
    uint32_t newer;
} bl_evict_node;

struct bl_evict {
    bl_evict_node *node;
    size_t size;
};

int bl_evict_create(bl_evict **out, uint32_t id_count, uint32_t policy)
{
    if (policy != BL_EVICT_LRU)
        return -EINVAL;
    bl_evict *order = calloc(1, sizeof *order);
    if (!order)
        return -ENOMEM;
    order->size = ((size_t)id_count + BL_EVICT_FIRST) * sizeof *order->node;
    order->node = bl_lazy_map_dense(order->size);
    if (!order->node) {
        free(order);
        return -ENOMEM;
    }
    order->node[BL_EVICT_KNOT] = (bl_evict_node){BL_EVICT_KNOT, BL_EVICT_KNOT};
    *out = order;
    return 0;
}

void bl_evict_destroy(bl_evict *order)
{
    if (!order)
        return;
    bl_lazy_unmap(order->node, order->size);
    free(order);
}

void bl_evict_remove(bl_evict *order, uint32_t id)
{
    bl_evict_node *node = &order->node[id + BL_EVICT_FIRST];
    if (!node->newer)
        return;
    order->node[node->older].newer = node->newer;
    order->node[node->newer].older = node->older;
    *node = (bl_evict_node){0, 0};
}

/* Insert between two neighbors of the ring. */
static void bl_evict_insert(bl_evict *order, uint32_t id, uint32_t older, uint32_t newer)
{
    uint32_t place = id + BL_EVICT_FIRST;
    order->node[place] = (bl_evict_node){older, newer};
    order->node[older].newer = place;
    order->node[newer].older = place;
}

void bl_evict_touch(bl_evict *order, uint32_t id)
{
    bl_evict_remove(order, id);
    bl_evict_insert(order, id, order->node[BL_EVICT_KNOT].older, BL_EVICT_KNOT);
}

void bl_evict_cool(bl_evict *order, uint32_t id)
{
    bl_evict_remove(order, id);
    bl_evict_insert(order, id, BL_EVICT_KNOT, order->node[BL_EVICT_KNOT].newer);
}

int bl_evict_has(const bl_evict *order, uint32_t id)
{
    return order->node[id + BL_EVICT_FIRST].newer != 0;
}

/* Return the id of a node; it is negative for the sentinel. */
static int64_t bl_evict_id(uint32_t place) { return (int64_t)place - BL_EVICT_FIRST; }

int64_t bl_evict_coldest(const bl_evict *order)
{
    return bl_evict_id(order->node[BL_EVICT_KNOT].newer);
}

int64_t bl_evict_warmer(const bl_evict *order, uint32_t id)
{
    return bl_evict_id(order->node[id + BL_EVICT_FIRST].newer);
}
