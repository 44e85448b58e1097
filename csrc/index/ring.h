/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Two lists of ids, each from the coldest to the newest, as doubly linked rings with a sentinel. An
 * id is in one list at most. A zero link means "in no list", so zeroed memory is a valid ring
 * without ids.
 */
#ifndef BL_RING_H
#define BL_RING_H

#include <errno.h>
#include <stdint.h>

#include "base/lazy.h"
#include "coherence/coherence.h"

/* Node numbers: the sentinels of the two lists, then id 0. */
enum { BL_RING_MAIN = 1, BL_RING_SMALL = 2, BL_RING_FIRST = 3 };

typedef struct bl_ring_node {
    uint32_t older;
    uint32_t newer;
} bl_ring_node;

typedef struct bl_ring {
    bl_ring_node *node;
    size_t size;
} bl_ring;

static inline int bl_ring_create(bl_ring *ring, uint32_t id_count)
{
    ring->size = ((size_t)id_count + BL_RING_FIRST) * sizeof *ring->node;
    ring->node = bl_lazy_map_dense(ring->size);
    if (!ring->node)
        return -ENOMEM;
    for (uint32_t list = BL_RING_MAIN; list <= BL_RING_SMALL; list++)
        ring->node[list] = (bl_ring_node){list, list};
    return 0;
}

static inline void bl_ring_destroy(bl_ring *ring) { bl_lazy_unmap(ring->node, ring->size); }

static inline int bl_ring_has(const bl_ring *ring, uint32_t id)
{
    return ring->node[id + BL_RING_FIRST].newer != 0;
}

static inline void bl_ring_prefetch(const bl_ring *ring, uint32_t id)
{
    bl_prefetch(&ring->node[id + BL_RING_FIRST]);
}

static inline void bl_ring_prefetch_neighbors(const bl_ring *ring, uint32_t id)
{
    const bl_ring_node *node = &ring->node[id + BL_RING_FIRST];
    bl_prefetch(&ring->node[node->older]);
    bl_prefetch(&ring->node[node->newer]);
}

/* Remove an id from its list; if it is in none, nothing happens. */
static inline void bl_ring_remove(bl_ring *ring, uint32_t id)
{
    bl_ring_node *node = &ring->node[id + BL_RING_FIRST];
    if (!node->newer)
        return;
    ring->node[node->older].newer = node->newer;
    ring->node[node->newer].older = node->older;
    *node = (bl_ring_node){0, 0};
}

/* Insert between two neighbors of a list. */
static inline void bl_ring_insert(bl_ring *ring, uint32_t id, uint32_t older, uint32_t newer)
{
    uint32_t place = id + BL_RING_FIRST;
    ring->node[place] = (bl_ring_node){older, newer};
    ring->node[older].newer = place;
    ring->node[newer].older = place;
}

/* Insert ids that are in no list after the newest one of a list. */
static inline void bl_ring_append(bl_ring *ring, uint32_t list, const uint32_t *ids, uint32_t count)
{
    uint32_t newest = ring->node[list].older;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t place = ids[i] + BL_RING_FIRST;
        ring->node[newest].newer = place;
        ring->node[place].older = newest;
        newest = place;
    }
    ring->node[newest].newer = list;
    ring->node[list].older = newest;
}

/* Make an id the newest or the coldest of a list, whatever list it was in. */
static inline void bl_ring_touch(bl_ring *ring, uint32_t list, uint32_t id)
{
    bl_ring_remove(ring, id);
    bl_ring_insert(ring, id, ring->node[list].older, list);
}

static inline void bl_ring_cool(bl_ring *ring, uint32_t list, uint32_t id)
{
    bl_ring_remove(ring, id);
    bl_ring_insert(ring, id, list, ring->node[list].newer);
}

/* Return the coldest id of a list, or a negative number. */
static inline int64_t bl_ring_coldest(const bl_ring *ring, uint32_t list)
{
    return (int64_t)ring->node[list].newer - BL_RING_FIRST;
}

/* Return the next warmer id in the list of an id, or a negative number. */
static inline int64_t bl_ring_warmer(const bl_ring *ring, uint32_t id)
{
    return (int64_t)ring->node[id + BL_RING_FIRST].newer - BL_RING_FIRST;
}

#endif
