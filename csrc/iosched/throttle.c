/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The admission of a copying thread, piece by piece (iosched/throttle.h).
 *
 * A thread that is alone on the link renews its piece without the lock and without an atomic
 * instruction: a locked instruction waits until all streamed bytes are in memory, which costs as
 * much as the rest of the admission.
 */
#include "iosched/throttle.h"
#include "base/host_atomic.h"
#include "base/minmax.h"

#include <errno.h>

#include "iosched/io_queue.h"

enum { BL_THROTTLE_LEAST = 64 << 10 };  /* the smallest piece, even with many threads */

bl_throttle bl_throttle_make(bl_io_queue *io_queue, int direction, uint32_t node, uint64_t size,
                             uint32_t threads)
{
    bl_throttle throttle = {.io_queue = io_queue, .todo = size};
    throttle.request.node = node, throttle.request.direction = (uint8_t)direction;
    if (io_queue != NULL) { /* all threads have a piece in flight at the same time */
        const bl_price *price = &io_queue->price;
        throttle.piece = price->piece_size;
        if (threads > price->piece_count)
            throttle.piece = throttle.piece * price->piece_count / threads;
        if (throttle.piece < BL_THROTTLE_LEAST)
            throttle.piece = price->piece_size < BL_THROTTLE_LEAST ? price->piece_size
                : BL_THROTTLE_LEAST;
    }
    return throttle;
}

bl_throttle bl_throttle_other(const bl_throttle *throttle)
{
    bl_throttle other = {.io_queue = throttle->io_queue, .piece = throttle->piece};
    other.request.node = throttle->request.node,
        other.request.direction = throttle->request.direction;
    return other;
}

void bl_throttle_begin(bl_throttle *throttle, uint64_t size, int again)
{
    throttle->todo = size, throttle->left = 0, throttle->again = (uint8_t)again;
}

static uint32_t bl_throttle_device(const bl_io_queue *io_queue, uint64_t offset)
{
    if (io_queue->queues[0]->device_count == 0)
        return BL_LINK_DEVICES;
    return bl_interleave_place(&io_queue->map, offset).device;
}

/* Returns 1 if the next bytes may reuse the tokens of the last ones: no other thread or engine
 * waits for the link, and the last bytes took as long as their tokens, so the bucket has been
 * refilled by as many. The next operation under the lock accounts for the renewals. */
static int bl_throttle_renew(bl_throttle *throttle, uint64_t offset, uint64_t bytes)
{
    const bl_io_queue *io_queue = throttle->io_queue;
    const bl_io_request *held = &throttle->request;
    if (held->state != BL_IO_ADMITTED || bytes > held->bytes || io_queue->stopped ||
        bl_throttle_device(io_queue, offset) != throttle->device)
        return 0;
    const bl_queue *queue = bl_io_queue_of(throttle->io_queue, held->direction);
    if (bl_host_load(&queue->stat.queued) > 0 || !bl_queue_owns(queue) ||
        bl_queue_limited(queue, held->node))
        return 0;
    uint64_t now_ns = bl_io_queue_now_ns(), took = now_ns - throttle->since_ns;
    uint64_t in_flight = bl_host_load(&queue->stat.in_flight);
    uint32_t engines;
    if (took * 1000 < in_flight * bl_io_queue_tokens(io_queue, held->direction, held->bytes) ||
        took > BL_STALL_NS ||
        bl_direction_demand(queue->direction, queue->member, now_ns, &engines) != 0)
        return 0;
    bl_host_store(&queue->member->seen_ns, now_ns);
    bl_host_store(&queue->member->until_ns, now_ns + took + took / 2);
    throttle->since_ns = now_ns, throttle->owed += bytes, throttle->owed_pieces++;
    return 1;
}

/* ---- Under the I/O queue's lock */

/* Account for renewed pieces. */
static void bl_throttle_settle(bl_throttle *throttle)
{
    bl_io_queue *io_queue = throttle->io_queue;
    const bl_io_request *held = &throttle->request;
    if (throttle->owed == 0)
        return;
    bl_queue_renewed(bl_io_queue_of(io_queue, held->direction), held->waiter, throttle->owed,
                     throttle->owed_pieces,
                     bl_io_queue_tokens(io_queue, held->direction, throttle->owed),
                     throttle->device, bl_io_queue_device_tokens(io_queue, throttle->owed),
                     throttle->since_ns);
    io_queue->stats[held->node].bytes += throttle->owed;
    io_queue->stats[held->node].pieces += throttle->owed_pieces;
    throttle->owed = throttle->owed_pieces = 0;
}

/* Replace the piece in flight by one of this many bytes. All of them count for the device of the
 * first byte. */
static int bl_throttle_change(bl_throttle *throttle, uint64_t offset, uint64_t bytes)
{
    bl_io_queue *io_queue = throttle->io_queue;
    uint64_t device_bytes[BL_LINK_DEVICES] = {0};
    pthread_mutex_lock(&io_queue->lock);
    uint64_t now_ns = bl_io_queue_now_ns();
    bl_throttle_settle(throttle);
    bl_request_end(io_queue, &throttle->request, now_ns);
    throttle->request.bytes = bytes;
    throttle->request.again = throttle->again || throttle->todo > bytes;
    throttle->device = bl_throttle_device(io_queue, offset);
    if (throttle->device < BL_LINK_DEVICES)
        device_bytes[throttle->device] = bytes;
    int status = bl_request_queue(io_queue, &throttle->request, device_bytes, now_ns);
    if (status == 0)
        status = bl_request_wait(io_queue, &throttle->request, UINT64_MAX, &now_ns);
    throttle->since_ns = now_ns;
    pthread_mutex_unlock(&io_queue->lock);
    return status;
}

int bl_throttle_wait(bl_throttle *throttle, uint64_t offset, uint64_t size)
{
    uint64_t need = size - throttle->left, bytes = bl_min(throttle->todo, throttle->piece);
    bytes = bytes > need ? bytes : need;
    int status = 0;
    if (!bl_throttle_renew(throttle, offset, bytes))
        status = bl_throttle_change(throttle, offset, bytes);
    throttle->todo -= bl_min(throttle->todo, bytes);
    throttle->left += bytes;
    return status;
}

void bl_throttle_end(bl_throttle *throttle)
{
    if (throttle == NULL || throttle->io_queue == NULL ||
        (throttle->request.state == BL_IO_IDLE && !throttle->request.coming))
        return;
    pthread_mutex_lock(&throttle->io_queue->lock);
    bl_throttle_settle(throttle);
    pthread_mutex_unlock(&throttle->io_queue->lock);
    bl_io_queue_release(throttle->io_queue, &throttle->request);
}
