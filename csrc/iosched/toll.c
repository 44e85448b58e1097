/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A thread that copies (iosched/toll.h) changes the piece that it holds for the next one.
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

bl_toll bl_toll_make(bl_port *port, int direction, uint32_t node, uint64_t size, uint32_t threads)
{
    bl_toll toll = {.port = port, .todo = size};
    toll.request.node = node, toll.request.direction = (uint8_t)direction;
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
    bl_toll other = {.port = toll->port, .piece = toll->piece};
    other.request.node = toll->request.node, other.request.direction = toll->request.direction;
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
    const bl_io_request *held = &toll->request;
    if (held->state != BL_IO_ADMITTED || bytes > held->bytes || port->stopped ||
        bl_toll_device(port, offset) != toll->device)
        return 0;
    const bl_queue *queue = bl_port_queue(toll->port, held->direction);
    if (bl_host_load(&queue->stat.queued) > 0 || !bl_queue_owns(queue) ||
        bl_queue_limited(queue, held->node))
        return 0;
    uint64_t now_ns = bl_port_now_ns(), took = now_ns - toll->since_ns;
    uint64_t in_flight = bl_host_load(&queue->stat.in_flight);
    uint32_t engines;
    if (took * 1000 < in_flight * bl_port_tokens(port, held->direction, held->bytes) ||
        took > BL_STALL_NS || bl_way_demand(queue->way, queue->seat, now_ns, &engines) != 0)
        return 0;
    bl_host_store(&queue->seat->seen_ns, now_ns);
    bl_host_store(&queue->seat->until_ns, now_ns + took + took / 2);
    toll->since_ns = now_ns, toll->owed += bytes, toll->owed_pieces++;
    return 1;
}

/* ---- Under the port's lock */

/* Account for what was renewed. */
static void bl_toll_settle(bl_toll *toll)
{
    bl_port *port = toll->port;
    const bl_io_request *held = &toll->request;
    if (toll->owed == 0)
        return;
    bl_queue_renewed(bl_port_queue(port, held->direction), held->waiter, toll->owed,
                     toll->owed_pieces, bl_port_tokens(port, held->direction, toll->owed),
                     toll->device, bl_port_device_tokens(port, toll->owed), toll->since_ns);
    port->carried[held->node].bytes += toll->owed;
    port->carried[held->node].pieces += toll->owed_pieces;
    toll->owed = toll->owed_pieces = 0;
}

/* Change what is under way for a piece of so many bytes; they count for the device that the first
 * of them lies on. */
static int bl_toll_change(bl_toll *toll, uint64_t offset, uint64_t bytes)
{
    bl_port *port = toll->port;
    uint64_t device_bytes[BL_LINK_DEVICES] = {0};
    pthread_mutex_lock(&port->lock);
    uint64_t now_ns = bl_port_now_ns();
    bl_toll_settle(toll);
    bl_request_end(port, &toll->request, now_ns);
    toll->request.bytes = bytes;
    toll->request.again = toll->again || toll->todo > bytes;
    toll->device = bl_toll_device(port, offset);
    if (toll->device < BL_LINK_DEVICES)
        device_bytes[toll->device] = bytes;
    int status = bl_request_queue(port, &toll->request, device_bytes, now_ns);
    if (status == 0)
        status = bl_request_wait(port, &toll->request, UINT64_MAX, &now_ns);
    toll->since_ns = now_ns;
    pthread_mutex_unlock(&port->lock);
    return status;
}

int bl_toll_wait(bl_toll *toll, uint64_t offset, uint64_t size)
{
    uint64_t need = size - toll->left, bytes = bl_least(toll->todo, toll->piece);
    bytes = bytes > need ? bytes : need;
    int status = bl_toll_renew(toll, offset, bytes) ? 0 : bl_toll_change(toll, offset, bytes);
    toll->todo -= bl_least(toll->todo, bytes);
    toll->left += bytes;
    return status;
}

void bl_toll_end(bl_toll *toll)
{
    if (toll == NULL || toll->port == NULL ||
        (toll->request.state == BL_IO_IDLE && !toll->request.coming))
        return;
    pthread_mutex_lock(&toll->port->lock);
    bl_toll_settle(toll);
    pthread_mutex_unlock(&toll->port->lock);
    bl_port_release(toll->port, &toll->request);
}
