/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The pieces that wait in a queue, by class (api/iosched.h). The code uses no clock and no lock.
 */
#include "iosched/queue.h"

#include <errno.h>
#include <stdlib.h>

#include "base/host_atomic.h"

/* ---- Waiters */

static uint32_t bl_waiter_new(bl_queue *queue)
{
    if (queue->free == 0) {
        uint32_t count = queue->waiter_count > 0 ? 2 * queue->waiter_count : 64;
        bl_waiter *grown = count < 1u << 30 ? realloc(queue->waiters, count * sizeof *grown) : NULL;
        if (grown == NULL)
            return 0;
        queue->waiters = grown;
        for (uint32_t i = count - 1; i >= (queue->waiter_count > 0 ? queue->waiter_count : 1); i--)
            grown[i] = (bl_waiter){.next = queue->free}, queue->free = i;
        queue->waiter_count = count;
    }
    uint32_t index = queue->free;
    queue->free = queue->waiters[index].next;
    return index;
}

void bl_waiter_free(bl_queue *queue, uint32_t index)
{
    bl_waiter *waiter = &queue->waiters[index];
    *waiter = (bl_waiter){.generation = waiter->generation + 1, .next = queue->free};
    queue->free = index;
}

bl_waiter *bl_waiter_find(bl_queue *queue, uint64_t handle, uint8_t state)
{
    uint32_t index = (uint32_t)handle;
    if (index >= queue->waiter_count || queue->waiters[index].state != state ||
        queue->waiters[index].generation != (uint32_t)(handle >> 32))
        return NULL;
    return &queue->waiters[index];
}

static uint64_t bl_waiter_handle(const bl_queue *queue, uint32_t index)
{
    return (uint64_t)(queue->waiters[index].generation & 0x7fffffff) << 32 | index;
}

/* ---- Creation and destruction */

int bl_queue_create(bl_queue **queue, bl_direction *direction, uint64_t goal_ns, uint64_t now_ns)
{
    bl_queue *made = calloc(1, sizeof *made);
    if (made == NULL)
        return -ENOMEM;
    int index = bl_member_take(direction, now_ns, &made->owner);
    if (index < 0) {
        free(made);
        return index;
    }
    made->direction = made->fair.direction = direction;
    made->member = &direction->members[index];
    made->per_tick = bl_host_load(&direction->bucket.limit);
    made->goal_ns = goal_ns, made->flow_ns = now_ns;
    made->stat.flow_ratio = 1;
    made->stat.stall_ns = BL_STALL_NS;
    *queue = made;
    return 0;
}

int bl_queue_owns(const bl_queue *queue)
{
    return bl_host_load(&queue->member->owner) == queue->owner;
}

void bl_queue_destroy(bl_queue *queue)
{
    if (queue == NULL)
        return;
    bl_queue_give_back(queue);
    uint32_t index = (uint32_t)(queue->member - queue->direction->members);
    bl_member_drop(queue->direction, index, queue->owner);
    free(queue->waiters);
    free(queue);
}

int bl_queue_add_device(bl_queue *queue, bl_tokens *bucket)
{
    if (queue->stat.queued > 0)
        return -EBUSY;
    if (queue->device_count == BL_LINK_DEVICES)
        return -ENOSPC;
    queue->devices[queue->device_count] = bucket;
    return (int)queue->device_count++;
}

/* ---- Pushing and removing */

int64_t bl_queue_push(bl_queue *queue, uint32_t node, uint64_t tokens, uint64_t bytes,
                      const uint64_t *device_tokens, uint64_t id, uint64_t now_ns)
{
    if (node == 0 || node >= queue->direction->node_count || tokens > UINT64_MAX / 4)
        return -EINVAL;
    uint32_t index = bl_waiter_new(queue);
    if (index == 0)
        return -ENOMEM;
    bl_waiter *waiter = &queue->waiters[index];
    *waiter = (bl_waiter){.tokens = tokens, .bytes = bytes, .id = id, .since_ns = now_ns,
                        .generation = waiter->generation & 0x7fffffff, .state = BL_WAITER_QUEUED,
                        .node = (uint8_t)node};
    for (uint32_t i = 0; i < queue->device_count && device_tokens != NULL; i++)
        waiter->device_tokens[i] = device_tokens[i];
    if (queue->first[node] == 0)
        queue->first[node] = index;
    else
        queue->waiters[queue->last[node]].next = index;
    queue->last[node] = index;
    queue->queued_tokens += tokens, queue->stat.queued++, queue->fair.waiting[node]++;
    if (!queue->fair.unplugged[node])
        bl_fair_wake(&queue->fair, node);
    return (int64_t)bl_waiter_handle(queue, index);
}

void bl_queue_give_back(bl_queue *queue)
{
    if (queue->pending > 0 && bl_queue_owns(queue))
        bl_member_refund(queue->direction, queue->member, queue->pending);
    queue->pending = 0;
}

int bl_queue_cancel(bl_queue *queue, uint64_t handle)
{
    bl_waiter *waiter = bl_waiter_find(queue, handle, BL_WAITER_QUEUED);
    if (waiter == NULL)
        return -ENOENT;
    queue->queued_tokens -= waiter->tokens;
    for (uint32_t i = 0; i < queue->device_count && waiter->ticketed; i++)
        bl_tokens_refund(queue->devices[i], waiter->device_tokens[i]);
    waiter->tokens = waiter->bytes = 0;
    waiter->state = BL_WAITER_CANCELLED;
    if (queue->queued_tokens == 0) /* the queue may not be polled for a long time */
        bl_queue_give_back(queue);
    return 0;
}

/* Remove the first waiter of a class. */
static void bl_queue_unlink(bl_queue *queue, uint32_t node)
{
    bl_waiter *waiter = &queue->waiters[queue->first[node]];
    queue->first[node] = waiter->next;
    queue->queued_tokens -= waiter->tokens, queue->stat.queued--, queue->fair.waiting[node]--;
}

uint32_t bl_queue_top(bl_queue *queue, uint32_t skip)
{
    for (;;) {
        uint32_t node = bl_fair_top(&queue->fair, skip);
        uint32_t index = queue->first[node];
        if (node == 0 || queue->waiters[index].state == BL_WAITER_QUEUED)
            return node;
        bl_queue_unlink(queue, node);
        bl_waiter_free(queue, index);
    }
}

/* Charge the bandwidth limits of a class and its groups. A class that exceeds its limit pauses. */
static void bl_queue_limit(bl_queue *queue, uint32_t node, uint64_t bytes, uint64_t now_ns)
{
    for (; node != 0; node = (uint32_t)queue->direction->nodes[node].parent) {
        bl_tokens *bandwidth = &queue->direction->nodes[node].bandwidth;
        if (bl_host_load(&bandwidth->rate) == 0)
            continue;
        uint64_t ticket = bl_tokens_grab(bandwidth, (bytes + 511) / 512);
        bl_tokens_replenish(bandwidth, now_ns);
        uint64_t lacks = bl_tokens_lacks(bandwidth, ticket);
        if (lacks > 0) {
            queue->fair.unplugged[node] = 1;
            queue->plug_ns[node] = now_ns + bl_tokens_duration_ns(bandwidth, lacks);
        }
    }
}

/* Count admitted pieces in the accounts that all processes see. */
static void bl_queue_account(bl_queue *queue, uint32_t node, uint64_t bytes, uint64_t pieces,
                             uint64_t tokens)
{
    bl_node *class = &queue->direction->nodes[node];
    bl_host_add(&class->bytes, bytes), bl_host_add(&class->pieces, pieces);
    bl_host_add(&queue->direction->used, tokens);
}

void bl_queue_admit(bl_queue *queue, uint32_t node, uint64_t price, uint64_t owner,
                    uint64_t now_ns, bl_admission *admission)
{
    uint32_t index = queue->first[node];
    bl_waiter *waiter = &queue->waiters[index];
    bl_queue_unlink(queue, node);
    bl_fair_charge(&queue->fair, node, price);
    bl_queue_limit(queue, node, waiter->bytes, now_ns);
    bl_queue_account(queue, node, waiter->bytes, 1, waiter->tokens);
    *admission = (bl_admission){waiter->id, bl_waiter_handle(queue, index), waiter->since_ns,
                                waiter->bytes, node};
    waiter->tokens = price, waiter->owner = owner, waiter->since_ns = now_ns;
    waiter->state = BL_WAITER_ADMITTED;
    queue->stat.in_flight++, queue->started += price;
}

void bl_queue_renewed(bl_queue *queue, uint64_t handle, uint64_t bytes, uint32_t pieces,
                      uint64_t tokens, uint32_t device, uint64_t device_tokens, uint64_t now_ns)
{
    bl_waiter *waiter = bl_waiter_find(queue, handle, BL_WAITER_ADMITTED);
    if (waiter == NULL)
        return;
    bl_fair_charge(&queue->fair, waiter->node, tokens);
    bl_queue_account(queue, waiter->node, bytes, pieces, tokens);
    if (device < queue->device_count)
        bl_tokens_grab(queue->devices[device], device_tokens);
    queue->started += tokens, queue->completed += tokens;
    waiter->since_ns = now_ns;
}

int bl_queue_limited(const bl_queue *queue, uint32_t node)
{
    for (; node != 0; node = (uint32_t)queue->direction->nodes[node].parent)
        if (queue->fair.unplugged[node] ||
            bl_host_load(&queue->direction->nodes[node].bandwidth.rate) != 0)
            return 1;
    return 0;
}

int bl_queue_pop(bl_queue *queue, uint64_t now_ns, bl_admission *admission)
{
    uint32_t node = bl_queue_top(queue, 0);
    if (node == 0)
        return -EAGAIN;
    bl_queue_admit(queue, node, queue->waiters[queue->first[node]].tokens, 0, now_ns, admission);
    return 0;
}

int bl_queue_plug(bl_queue *queue, uint32_t node, int plugged)
{
    if (node == 0 || node >= queue->direction->node_count)
        return -EINVAL;
    queue->fair.unplugged[node] = !plugged;
    queue->plug_ns[node] = 0;
    for (uint32_t i = node; plugged && i < queue->direction->node_count; i++) {
        uint32_t at = i; /* the node's own pieces, and those of the classes below it */
        while (at != node && at != 0)
            at = (uint32_t)queue->direction->nodes[at].parent;
        if (at == node && queue->fair.waiting[i] > 0)
            bl_fair_wake(&queue->fair, i), bl_fair_wake(&queue->fair, node);
    }
    return 0;
}

void bl_queue_stat_read(const bl_queue *queue, bl_queue_stat *stat)
{
    *stat = queue->stat;
    stat->pending = queue->pending;
}
