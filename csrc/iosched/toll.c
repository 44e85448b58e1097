/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Threads that copy by themselves pass a port (iosched/toll.h): each queues its next piece and asks
 * until it is let on; who asks may find another thread's piece let on, and tells it so.
 *
 * Who is alone renews what he holds, without the lock and without an atomic: a locked instruction
 * waits until all that was streamed is in memory, which costs as much as the whole decision.
 */
#include "iosched/toll.h"
#include "base/host_atomic.h"
#include "base/minmax.h"

#include <errno.h>

#include "iosched/port.h"

enum { BL_TOLL_LEAST = 64 << 10 };  /* of a piece, however many threads there are */

/* Who has waited for so long goes without leave: whatever became of the link, it is in nobody's
 * way for good. */
static const uint64_t BL_TOLL_WAIT_NS = 1000000000;

/* A piece that a thread waits for; its address is the piece's id. */
typedef struct bl_pass {
    uint64_t waiter;
    int admitted;
} bl_pass;

bl_toll bl_toll_make(bl_port *port, int direction, uint32_t node, uint64_t size, uint32_t threads)
{
    bl_toll toll = {.port = port, .todo = size, .node = node, .direction = (uint8_t)direction};
    if (port != NULL) { /* all threads have a piece under way at the same time */
        const bl_price *price = &port->price;
        toll.piece = price->piece_size;
        if (threads > price->piece_count)
            toll.piece = toll.piece * price->piece_count / threads;
        if (toll.piece < BL_TOLL_LEAST)
            toll.piece = price->piece_size < BL_TOLL_LEAST ? price->piece_size : BL_TOLL_LEAST;
    }
    return toll;
}

bl_toll bl_toll_other(const bl_toll *toll)
{
    bl_toll other = {.port = toll->port, .node = toll->node, .direction = toll->direction,
                     .piece = toll->piece};
    return other;
}

void bl_toll_begin(bl_toll *toll, uint64_t size, int again)
{
    toll->todo = size, toll->left = 0, toll->again = (uint8_t)again;
}

static uint32_t bl_toll_device(const bl_port *port, uint64_t offset)
{
    return port->queues[0]->device_count > 0 ? bl_interleave_place(&port->map, offset).device
                                             : BL_LINK_DEVICES;
}

/* May the next bytes take the place of those that were under way? They may if nobody else wants the
 * link, here or elsewhere, and the last ones took as long as the link takes for them: then it has
 * given as much anew. What this claims is made good by the next who has the lock. */
static int bl_toll_renew(bl_toll *toll, uint64_t offset, uint64_t bytes)
{
    const bl_port *port = toll->port;
    if (!toll->holds || bytes > toll->held || port->stopped ||
        bl_toll_device(port, offset) != toll->device)
        return 0;
    const bl_queue *queue = bl_port_queue(toll->port, toll->direction);
    if (bl_host_load(&queue->stat.queued) > 0 || !bl_queue_owns(queue) ||
        bl_queue_limited(queue, toll->node))
        return 0;
    uint64_t now_ns = bl_port_now_ns(), took = now_ns - toll->since_ns;
    uint64_t in_flight = bl_host_load(&queue->stat.in_flight);
    uint32_t engines;
    if (took * 1000 < in_flight * bl_port_tokens(port, toll->direction, toll->held) ||
        took > BL_STALL_NS || bl_way_demand(queue->way, queue->seat, now_ns, &engines) != 0)
        return 0;
    bl_host_store(&queue->seat->seen_ns, now_ns);
    bl_host_store(&queue->seat->until_ns, now_ns + took + took / 2);
    toll->since_ns = now_ns, toll->owed += bytes, toll->owed_pieces++;
    return 1;
}

/* ---- Under the port's lock */

static void bl_toll_settle(bl_toll *toll)
{
    bl_port *port = toll->port;
    if (toll->owed == 0)
        return;
    bl_queue_renewed(bl_port_queue(port, toll->direction), toll->waiter, toll->owed,
                     toll->owed_pieces, bl_port_tokens(port, toll->direction, toll->owed),
                     toll->device, bl_port_device_tokens(port, toll->owed), toll->since_ns);
    port->carried[toll->node].bytes += toll->owed;
    port->carried[toll->node].pieces += toll->owed_pieces;
    toll->owed = toll->owed_pieces = 0;
}

static void bl_toll_drop(bl_toll *toll, uint64_t now_ns)
{
    bl_queue *queue = bl_port_queue(toll->port, toll->direction);
    if (!toll->holds)
        return;
    bl_toll_settle(toll);
    bl_queue_complete(queue, toll->waiter, now_ns);
    toll->holds = 0;
    if (queue->stat.queued > 0)
        pthread_cond_broadcast(&toll->port->changed);
}

/* Will this thread be back for another piece? */
static void bl_toll_say(bl_toll *toll, int coming)
{
    bl_queue *queue = bl_port_queue(toll->port, toll->direction);
    if (coming != toll->coming)
        queue->coming[toll->node] += coming ? 1 : -1;
    toll->coming = (uint8_t)coming;
}

/* The bytes count for the device that the first of them lies on. */
static int64_t bl_toll_queue(bl_toll *toll, uint64_t offset, uint64_t bytes, bl_pass *pass,
                             uint64_t now_ns)
{
    uint64_t device_bytes[BL_LINK_DEVICES] = {0};
    toll->device = bl_toll_device(toll->port, offset);
    if (toll->device < BL_LINK_DEVICES)
        device_bytes[toll->device] = bytes;
    return bl_port_queue_piece(toll->port, toll->direction, toll->node, bytes, device_bytes,
                               (uintptr_t)pass, now_ns);
}

/* Ask until this piece is let on: 0, -ECANCELED, or why it will not be. */
static int bl_pass_wait(bl_port *port, bl_queue *queue, bl_pass *pass, uint64_t *now_ns)
{
    uint64_t start_ns = *now_ns;
    while (!pass->admitted) {
        bl_admission admission;
        uint64_t wait;
        int status = port->stopped                          ? -ECANCELED
                     : *now_ns - start_ns > BL_TOLL_WAIT_NS ? -ETIMEDOUT
                     : bl_port_ask(port, queue, *now_ns, &admission, &wait);
        if (status == 0) {
            bl_pass *whose = (bl_pass *)(uintptr_t)admission.id;
            whose->waiter = admission.waiter, whose->admitted = 1;
            if (whose != pass)
                pthread_cond_broadcast(&port->changed);
        } else if (status == -EAGAIN) {
            bl_port_doze(port, wait);
            *now_ns = bl_port_now_ns();
        } else {
            bl_queue_cancel(queue, pass->waiter);
            return status;
        }
    }
    return 0;
}

int bl_toll_wait(bl_toll *toll, uint64_t offset, uint64_t size)
{
    bl_port *port = toll->port;
    uint64_t need = size - toll->left, bytes = bl_least(toll->todo, toll->piece);
    int64_t status = 0;
    bytes = bytes > need ? bytes : need;
    if (!bl_toll_renew(toll, offset, bytes)) {
        bl_pass pass = {0, 0};
        pthread_mutex_lock(&port->lock);
        bl_queue *queue = bl_port_queue(port, toll->direction);
        uint64_t now_ns = bl_port_now_ns();
        bl_toll_drop(toll, now_ns);
        bl_toll_say(toll, toll->again || toll->todo > bytes);
        status = bl_toll_queue(toll, offset, bytes, &pass, now_ns);
        if (status >= 0) {
            pass.waiter = (uint64_t)status;
            status = bl_pass_wait(port, queue, &pass, &now_ns);
        }
        toll->waiter = pass.waiter, toll->holds = status == 0;
        toll->held = bytes, toll->since_ns = now_ns;
        if (status < 0 && status != -ECANCELED) { /* what has no seat for us is not waited for */
            port->carried[toll->node].astray++;
            status = 0;
        }
        pthread_mutex_unlock(&port->lock);
    }
    toll->todo -= bl_least(toll->todo, bytes);
    toll->left += bytes;
    return (int)status;
}

void bl_toll_end(bl_toll *toll)
{
    if (toll == NULL || toll->port == NULL || (!toll->holds && !toll->coming))
        return;
    pthread_mutex_lock(&toll->port->lock);
    bl_queue *queue = bl_port_queue(toll->port, toll->direction);
    bl_toll_drop(toll, bl_port_now_ns());
    bl_toll_say(toll, 0);
    if (queue->stat.queued == 0 && queue->stat.in_flight == 0)
        bl_queue_rest(queue);
    pthread_mutex_unlock(&toll->port->lock);
}
