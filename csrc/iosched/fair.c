/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Implements the fair queue. At every level of the tree, the next node is the one with the least
 * cost divided by shares. A tree has at most 32 nodes, so a scan is faster than a heap that other
 * processes change.
 */
#include "iosched/fair.h"

#include "base/host_atomic.h"

/* A class that was idle must not claim its whole unused share. Its cost is raised so that it has
 * the link alone for at most the forgiving time. */
void bl_fair_wake(bl_fair *fair, uint32_t node)
{
    while (node != 0 && !fair->queued[node]) {
        bl_node *own = &fair->direction->nodes[node];
        bl_node *group = &fair->direction->nodes[own->parent];
        uint64_t start = fair->direction->forgiving / bl_host_load(&own->shares);
        bl_host_raise(&own->accumulated, bl_host_load(&group->last) - start);
        fair->queued[node] = 1;
        fair->pushed[node] = ++fair->sequence;
        node = (uint32_t)own->parent;
    }
}

void bl_fair_wake_all(bl_fair *fair)
{
    for (uint32_t i = 1; i < fair->direction->node_count; i++)
        fair->queued[i] = 0;
    for (uint32_t i = 1; i < fair->direction->node_count; i++)
        if (fair->waiting[i] > 0 && !fair->unplugged[i])
            bl_fair_wake(fair, i);
}

static int bl_fair_before(const bl_fair *fair, uint32_t a, uint32_t b)
{
    const bl_node *nodes = fair->direction->nodes;
    int64_t ahead = bl_host_ahead(bl_host_load(&nodes[a].accumulated),
                                  bl_host_load(&nodes[b].accumulated));
    return ahead < 0 || (ahead == 0 && fair->pushed[a] < fair->pushed[b]);
}

/* Returns the first child of a group, of those that are queued and not in skip. */
static uint32_t bl_fair_least(const bl_fair *fair, uint32_t group, uint32_t skip)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < fair->direction->node_count; i++)
        if (fair->queued[i] && fair->direction->nodes[i].parent == group && !(skip >> i & 1) &&
            (best == 0 || bl_fair_before(fair, i, best)))
            best = i;
    return best;
}

static int bl_fair_is_group(const bl_fair *fair, uint32_t node)
{
    for (uint32_t i = node + 1; i < fair->direction->node_count; i++)
        if (fair->direction->nodes[i].shares > 0 && fair->direction->nodes[i].parent == node)
            return 1;
    return 0;
}

uint32_t bl_fair_top(bl_fair *fair, uint32_t skip)
{
    uint32_t group = 0;
    for (;;) {
        uint32_t node = bl_fair_least(fair, group, skip);
        if (node == 0) {
            if (group == 0)
                return 0;
            /* All children of the group are idle or skipped, so continue without the group. */
            if (bl_fair_least(fair, group, 0) == 0)
                fair->queued[group] = 0;
            skip |= 1u << group, group = 0;
        } else if (fair->unplugged[node]) {
            fair->queued[node] = 0;
        } else if (fair->waiting[node] > 0) {
            return node;
        } else if (bl_fair_is_group(fair, node)) {
            group = node;
        } else {
            fair->queued[node] = 0;
        }
    }
}

void bl_fair_charge(bl_fair *fair, uint32_t node, uint64_t cost)
{
    while (node != 0) {
        bl_node *own = &fair->direction->nodes[node];
        bl_host_raise(&fair->direction->nodes[own->parent].last, bl_host_load(&own->accumulated));
        uint64_t share = cost / bl_host_load(&own->shares);
        bl_host_add(&own->accumulated, share > 0 ? share : 1);
        fair->pushed[node] = ++fair->sequence;
        node = (uint32_t)own->parent;
    }
}

uint32_t bl_fair_mask(const bl_fair *fair)
{
    uint32_t mask = 0;
    for (uint32_t i = 1; i < fair->direction->node_count; i++) {
        int stopped = fair->waiting[i] == 0;
        for (uint32_t node = i; node != 0 && !stopped;
             node = (uint32_t)fair->direction->nodes[node].parent)
            stopped = fair->unplugged[node];
        mask |= (uint32_t)!stopped << i;
    }
    return mask;
}

uint32_t bl_fair_first(const bl_direction *direction, uint32_t mask)
{
    uint32_t alive = mask, group = 0;
    /* A child has a larger number than its parent. */
    for (uint32_t i = (uint32_t)direction->node_count - 1; i > 0; i--)
        if (alive >> i & 1)
            alive |= 1u << direction->nodes[i].parent;
    for (;;) {
        uint32_t best = 0;
        for (uint32_t i = 1; i < direction->node_count; i++)
            if ((alive >> i & 1) && direction->nodes[i].parent == group &&
                (best == 0 || bl_host_ahead(bl_host_load(&direction->nodes[i].accumulated),
                                            bl_host_load(&direction->nodes[best].accumulated)) < 0))
                best = i;
        if (best == 0 || (mask >> best & 1))
            return best;
        group = best;
    }
}

uint64_t bl_fair_lag(const bl_direction *direction, uint32_t node, uint32_t other)
{
    const bl_node *nodes = direction->nodes;
    while (nodes[node].parent != nodes[other].parent) /* children have larger numbers */
        if (node > other)
            node = (uint32_t)nodes[node].parent;
        else
            other = (uint32_t)nodes[other].parent;
    int64_t lag = bl_host_ahead(bl_host_load(&nodes[other].accumulated),
                                bl_host_load(&nodes[node].accumulated));
    return lag > 0 ? (uint64_t)lag * bl_host_load(&nodes[node].shares) : 0;
}
