/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The eviction order of index/evict.h. LRU is one list of index/ring.h.
 */
#include "index/evict.h"

#include <errno.h>
#include <stdlib.h>

#include "index/ring.h"
#include "index/s3fifo.h"

struct bl_evict {
    uint32_t policy;
    bl_ring ring;               /* LRU */
    bl_s3fifo *s3fifo;
};

int bl_evict_create(bl_evict **out, uint32_t id_count, uint32_t policy)
{
    if (policy > BL_EVICT_S3FIFO)
        return -EINVAL;
    bl_evict *order = calloc(1, sizeof *order);
    if (!order)
        return -ENOMEM;
    order->policy = policy;
    int status = policy == BL_EVICT_LRU ? bl_ring_create(&order->ring, id_count)
                                        : bl_s3fifo_create(&order->s3fifo, id_count);
    if (status < 0) {
        free(order);
        return status;
    }
    *out = order;
    return 0;
}

void bl_evict_destroy(bl_evict *order)
{
    if (!order)
        return;
    if (order->policy == BL_EVICT_LRU)
        bl_ring_destroy(&order->ring);
    else
        bl_s3fifo_destroy(order->s3fifo);
    free(order);
}

void bl_evict_assign(bl_evict *order, uint32_t id, uint64_t hash)
{
    if (order->policy == BL_EVICT_S3FIFO)
        bl_s3fifo_assign(order->s3fifo, id, hash);
}

void bl_evict_expect(bl_evict *order, uint32_t id_count)
{
    if (order->policy == BL_EVICT_LRU)
        bl_lazy_populate(order->ring.node, id_count * sizeof *order->ring.node);
}

int bl_evict_assigns(const bl_evict *order) { return order->policy != BL_EVICT_LRU; }

void bl_evict_prefetch(const bl_evict *order, uint32_t id)
{
    if (order->policy == BL_EVICT_LRU)
        bl_ring_prefetch(&order->ring, id);
}

void bl_evict_prefetch_neighbors(const bl_evict *order, uint32_t id)
{
    if (order->policy == BL_EVICT_LRU)
        bl_ring_prefetch_neighbors(&order->ring, id);
}

void bl_evict_touch(bl_evict *order, uint32_t id)
{
    if (order->policy == BL_EVICT_LRU)
        bl_ring_touch(&order->ring, BL_RING_MAIN, id);
    else
        bl_s3fifo_touch(order->s3fifo, id);
}

void bl_evict_enter(bl_evict *order, const uint32_t *ids, uint32_t count)
{
    if (order->policy == BL_EVICT_LRU)
        bl_ring_append(&order->ring, BL_RING_MAIN, ids, count);
    else
        for (uint32_t i = 0; i < count; i++)
            bl_evict_touch(order, ids[i]);
}

void bl_evict_cool(bl_evict *order, uint32_t id)
{
    if (order->policy == BL_EVICT_LRU)
        bl_ring_cool(&order->ring, BL_RING_MAIN, id);
    else
        bl_s3fifo_cool(order->s3fifo, id);
}

void bl_evict_remove(bl_evict *order, uint32_t id)
{
    if (order->policy == BL_EVICT_LRU)
        bl_ring_remove(&order->ring, id);
    else
        bl_s3fifo_remove(order->s3fifo, id);
}

void bl_evict_forget(bl_evict *order, uint32_t id)
{
    if (order->policy == BL_EVICT_LRU)
        bl_ring_remove(&order->ring, id);
    else
        bl_s3fifo_forget(order->s3fifo, id);
}

int bl_evict_has(const bl_evict *order, uint32_t id)
{
    return order->policy == BL_EVICT_LRU ? bl_ring_has(&order->ring, id)
                                         : bl_s3fifo_has(order->s3fifo, id);
}

int64_t bl_evict_coldest(bl_evict *order)
{
    int64_t id = order->policy == BL_EVICT_LRU ? bl_ring_coldest(&order->ring, BL_RING_MAIN)
                                               : bl_s3fifo_coldest(order->s3fifo);
    return id < 0 ? -1 : id;
}

int64_t bl_evict_warmer(const bl_evict *order, uint32_t id)
{
    int64_t next = order->policy == BL_EVICT_LRU ? bl_ring_warmer(&order->ring, id)
                                                 : bl_s3fifo_warmer(order->s3fifo, id);
    return next < 0 ? -1 : next;
}
