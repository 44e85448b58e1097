/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Decides which piece of a queue may start: the fair queue chooses it, and the bucket of the link
 * admits it (api/iosched.h). The code uses no clock and no lock.
 *
 * A queue reserves tokens ahead of use, so that queues wait for the link in order instead of racing
 * for it. The range [ticket - pending, ticket) of the bucket belongs to this queue; the part below
 * head is ready for use. A queue reserves only while the next class, among all idle engines, has
 * work in this queue. It may spend its reserved tokens on its own best class. README.md has an
 * example.
 */
#include <errno.h>
#include <stddef.h>

#include "base/host_atomic.h"
#include "iosched/queue.h"

static const uint64_t BL_YIELD_NS = 20000;      /* until a queue that yielded polls again */
static const uint64_t BL_WAIT_NS = 1000000;     /* the longest pause between polls */
static const uint64_t BL_DEMAND_NS = 2000000;   /* until an idle engine that does not poll is
                                                 * ignored */
static const uint64_t BL_EAGER_NS = 200000;     /* a queue that waits longer polls rarely */
static const uint64_t BL_SELDOM_NS = 60000;     /* pause between rare polls: longer than a timer's
                                                 * delay */
static const double BL_FLOW_MOST = 1.1;         /* Seastar's: above this ratio costs are raised */

/* If another process considered this member dead and released its tokens, take a new member. If the
 * queue polls later than it announced, it was asleep, and must not claim the share that it did not
 * use meanwhile. */
static int bl_queue_keep(bl_queue *queue, uint64_t now_ns)
{
    int owns = bl_queue_owns(queue);
    if (!owns || bl_host_ahead(now_ns, bl_host_load(&queue->member->until_ns)) > 0)
        bl_fair_wake_all(&queue->fair);
    if (!owns) {
        int index = bl_member_take(queue->direction, now_ns, &queue->owner);
        if (index < 0)
            return index;
        queue->member = &queue->direction->members[index];
        queue->pending = 0;
        queue->stat.lost++;
    }
    bl_host_store(&queue->member->seen_ns, now_ns);
    return 0;
}

/* Smooth the current ratio of started to completed tokens. The constants are Seastar's. */
static void bl_queue_flow(bl_queue *queue, uint64_t now_ns)
{
    if (bl_host_ahead(now_ns, queue->flow_ns) < (int64_t)(100 * queue->goal_ns))
        return;
    if (queue->stat.stall_ns > BL_STALL_NS)
        queue->stat.stall_ns -= BL_STALL_STEP_NS;
    if (queue->completed > 0) {
        double instant = (double)queue->started / (double)queue->completed;
        queue->stat.flow_ratio = 0.95 * queue->stat.flow_ratio + 0.05 * instant;
        queue->started = queue->completed = 0;
    }
    queue->flow_ns = now_ns;
}

static uint64_t bl_queue_price(const bl_queue *queue, uint64_t tokens)
{
    uint64_t limit = bl_host_load(&queue->direction->bucket.limit);
    double ratio = queue->stat.flow_ratio;
    if (ratio <= BL_FLOW_MOST || tokens >= limit)
        return tokens;
    double price = (double)tokens * ratio;
    return price < (double)limit ? (uint64_t)price : limit;
}

static void bl_queue_plug_due(bl_queue *queue, uint64_t now_ns, uint64_t *wait_ns)
{
    for (uint32_t i = 1; i < queue->direction->node_count; i++) {
        if (queue->plug_ns[i] == 0)
            continue;
        int64_t left = bl_host_ahead(queue->plug_ns[i], now_ns);
        if (left <= 0)
            bl_queue_plug(queue, i, 1);
        else if ((uint64_t)left < *wait_ns)
            *wait_ns = (uint64_t)left;
    }
}

/* Returns 1 if the memory devices of the class's first piece admit it. Otherwise its tickets keep
 * their position at the devices, and the class does not delay other classes. */
static int bl_queue_gate(bl_queue *queue, uint32_t node, uint64_t now_ns, uint64_t *wait_ns)
{
    bl_waiter *waiter = &queue->waiters[queue->first[node]];
    uint64_t longest = 0;
    for (uint32_t i = 0; i < queue->device_count; i++) {
        bl_tokens *device = queue->devices[i];
        if (waiter->device_tokens[i] == 0)
            continue;
        if (!waiter->ticketed)
            waiter->device_ticket[i] = bl_tokens_grab(device, waiter->device_tokens[i]);
        bl_tokens_replenish(device, now_ns);
        uint64_t lacks = bl_tokens_lacks(device, waiter->device_ticket[i]);
        uint64_t wait = bl_tokens_duration_ns(device, lacks);
        longest = wait > longest ? wait : longest;
    }
    waiter->ticketed = 1;
    if (longest == 0)
        return 1;
    *wait_ns = longest < *wait_ns ? longest : *wait_ns;
    queue->gated |= 1u << node;
    return 0;
}

/* Returns 1 if the next class, among all idle engines, waits in this queue. If the next class
 * belongs to another engine and may use more tokens than all waiters can reserve, that engine has
 * just started and may be last in the order. This queue then returns its reservation, so that the
 * other engine moves up. */
static int bl_queue_turn(bl_queue *queue, uint32_t demand, uint64_t now_ns)
{
    bl_direction *direction = queue->direction;
    uint32_t engines, others = bl_direction_demand(direction, queue->member, now_ns, &engines);
    uint64_t limit = bl_host_load(&direction->bucket.limit);
    queue->per_tick = limit / engines > 0 ? limit / engines : 1;
    uint32_t first = others != 0 ? bl_fair_first(direction, demand | others) : 0;
    if (first == 0 || demand >> first & 1)
        return 1;
    if (bl_fair_lag(direction, first, bl_fair_first(direction, demand)) > engines * limit)
        bl_queue_give_back(queue);
    return 0;
}

/* Reserve tokens for the pieces that wait in this queue. */
static void bl_queue_reserve(bl_queue *queue, uint64_t need)
{
    uint64_t limit = bl_host_load(&queue->direction->bucket.limit);
    uint64_t amount = queue->pending + queue->per_tick;
    amount = amount < queue->queued_tokens ? amount : queue->queued_tokens;
    amount = amount < limit ? amount : limit;
    amount = amount > need ? amount : need;
    bl_queue_give_back(queue);
    queue->ticket = bl_member_grab(queue->direction, queue->member, amount);
    queue->pending = amount;
}

/* Returns 1 if the bucket has this many tokens for the queue; otherwise *wait_ns is the time until
 * the next poll. */
static int bl_queue_may(bl_queue *queue, uint64_t need, uint32_t demand, uint64_t now_ns,
                        uint64_t *wait_ns)
{
    bl_tokens *bucket = &queue->direction->bucket;
    int turn = bl_queue_turn(queue, demand, now_ns);
    uint64_t lacks = queue->pending > 0 ? bl_tokens_lacks(bucket, queue->ticket) : 0;
    if (queue->pending < need && lacks <= queue->pending && lacks < queue->per_tick) {
        if (!turn) {
            queue->stat.yields++;
            *wait_ns = BL_YIELD_NS < *wait_ns ? BL_YIELD_NS : *wait_ns;
            return 0;
        }
        bl_queue_reserve(queue, need);
        lacks = bl_tokens_lacks(bucket, queue->ticket);
    }
    uint64_t spare = queue->pending > need ? queue->pending - need : 0;
    if (queue->pending >= need && lacks <= spare)
        return 1;
    uint64_t wait = bl_tokens_duration_ns(bucket, lacks > spare ? lacks - spare : 0);
    *wait_ns = wait < *wait_ns ? wait : *wait_ns;
    return 0;
}

/* Use the reserved tokens for a piece that starts. A piece that costs more than the bucket holds
 * starts when the bucket is full. Then all queues wait until time has repaid the difference. */
static void bl_queue_spend(bl_queue *queue, uint64_t price)
{
    uint64_t limit = bl_host_load(&queue->direction->bucket.limit);
    uint64_t reserved = price < limit ? price : limit;
    queue->pending -= reserved;
    if (price > limit)
        bl_member_grab(queue->direction, queue->member, price - limit);
    bl_host_store(&queue->member->pending, queue->pending);
}

/* Announce to the other engines which classes of the mask wait in this queue, and which will
 * return. */
static uint32_t bl_queue_announce(bl_queue *queue, uint32_t mask, uint64_t until_ns)
{
    uint32_t demand = bl_fair_mask(&queue->fair) & mask, coming = 0;
    for (uint32_t i = 1; i < queue->direction->node_count; i++)
        coming |= (uint32_t)(queue->coming[i] > 0 && !queue->fair.unplugged[i]) << i;
    bl_host_store(&queue->member->until_ns, until_ns);
    bl_host_exchange(&queue->member->demand, demand | (coming & mask));
    return demand;
}

static int bl_queue_next(bl_queue *queue, uint64_t now_ns, bl_admission *admission,
                         uint64_t *wait_ns)
{
    uint32_t demand = bl_queue_announce(queue, ~queue->gated, now_ns + BL_DEMAND_NS);
    bl_tokens_replenish(&queue->direction->bucket, now_ns);
    queue->gated = 0;
    for (uint32_t node; (node = bl_queue_top(queue, queue->gated)) != 0;) {
        if (!bl_queue_gate(queue, node, now_ns, wait_ns))
            continue;
        uint64_t limit = bl_host_load(&queue->direction->bucket.limit);
        uint64_t price = bl_queue_price(queue, queue->waiters[queue->first[node]].tokens);
        uint64_t need = price < limit ? price : limit;
        demand &= ~queue->gated;
        if (!bl_queue_may(queue, need, demand | 1u << node, now_ns, wait_ns))
            return -EAGAIN;
        bl_queue_spend(queue, price);
        bl_queue_admit(queue, node, price, queue->owner, now_ns, admission);
        uint64_t taken = bl_tokens_duration_ns(&queue->direction->bucket, price);
        uint64_t took = queue->took_ns < BL_DEMAND_NS ? queue->took_ns : BL_DEMAND_NS;
        taken = taken > took ? taken : took; /* the link may be slower than configured */
        bl_queue_announce(queue, ~queue->gated, now_ns + taken + taken / 2);
        return 0;
    }
    bl_queue_announce(queue, ~queue->gated, now_ns + BL_DEMAND_NS);
    return -EAGAIN;
}

/* A waiting queue polls often at first, so that the link is not idle, and rarely later. */
static void bl_queue_patience(bl_queue *queue, int status, uint64_t now_ns, uint64_t *wait_ns)
{
    if (status == 0 || queue->stat.queued == 0) {
        queue->blocked_ns = 0;
        return;
    }
    if (queue->blocked_ns == 0)
        queue->blocked_ns = now_ns;
    if (bl_host_ahead(now_ns, queue->blocked_ns) > (int64_t)BL_EAGER_NS && *wait_ns < BL_SELDOM_NS)
        *wait_ns = BL_SELDOM_NS;
    *wait_ns = *wait_ns < BL_WAIT_NS ? *wait_ns : BL_WAIT_NS;
}

int bl_queue_poll(bl_queue *queue, uint64_t now_ns, bl_admission *admission, uint64_t *wait_ns)
{
    *wait_ns = UINT64_MAX;
    queue->stat.polls++;
    int status = bl_queue_keep(queue, now_ns);
    if (status < 0)
        return status;
    bl_queue_flow(queue, now_ns);
    bl_queue_plug_due(queue, now_ns, wait_ns);
    status = bl_queue_next(queue, now_ns, admission, wait_ns);
    if (queue->queued_tokens == 0)
        bl_queue_give_back(queue);
    if (status < 0) /* a dead process may hold the missing tokens */
        bl_direction_watch(queue->direction, now_ns);
    bl_queue_patience(queue, status, now_ns, wait_ns);
    return status;
}

void bl_queue_rest(bl_queue *queue)
{
    if (bl_queue_owns(queue))
        bl_host_store(&queue->member->demand, 0);
}

void bl_queue_complete(bl_queue *queue, uint64_t handle, uint64_t now_ns)
{
    bl_waiter *waiter = bl_waiter_find(queue, handle, BL_WAITER_ADMITTED);
    if (waiter == NULL)
        return;
    if (waiter->owner == queue->owner && bl_queue_owns(queue)) {
        bl_host_store(&queue->member->seen_ns, now_ns);
        bl_member_release(queue->direction, queue->member, waiter->tokens);
    }
    queue->stat.in_flight--, queue->completed += waiter->tokens;
    queue->took_ns = now_ns - waiter->since_ns;
    if (queue->took_ns > queue->stat.stall_ns) {
        queue->stat.stalls++, queue->stat.stalled_ns = queue->took_ns;
        queue->stat.stall_ns *= 2;
    }
    bl_waiter_free(queue, (uint32_t)handle);
}
