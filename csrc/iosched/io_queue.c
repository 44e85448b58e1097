/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The I/O queue: an engine's queues for both directions, and the threads that wait in them
 * (api/iosched.h). A waiting thread polls for all threads: if another thread's piece is admitted,
 * it wakes that thread. Only this file of the folder reads a clock.
 */
#include "iosched/io_queue.h"

#include "base/minmax.h"
#include "pool/pool.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

/* A piece that has waited this long is copied without tokens. */
static const uint64_t BL_IO_QUEUE_LONGEST_NS = 1000000000;

/* Shorter waits spin, because a timer's delay is longer. */
static const uint64_t BL_IO_QUEUE_SPIN_NS = 50000;
static const uint64_t BL_IO_QUEUE_SECOND_NS = 1000000000;

uint64_t bl_io_queue_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * BL_IO_QUEUE_SECOND_NS + (uint64_t)now.tv_nsec;
}

bl_queue *bl_io_queue_of(bl_io_queue *io_queue, int direction)
{
    return io_queue->queues[io_queue->count == 2 ? direction : 0];
}

int bl_io_queue_create(bl_io_queue **io_queue, bl_direction *read, bl_direction *write,
                       uint64_t goal_ns, const bl_price *price, const bl_pool *pool)
{
    bl_io_queue *made = calloc(1, sizeof *made);
    if (made == NULL)
        return -ENOMEM;
    made->price = *price;
    if (pool != NULL)
        made->map = pool->memory.map;
    made->count = read == write ? 1 : 2;
    int status = bl_queue_create(&made->queues[0], read, goal_ns, bl_io_queue_now_ns());
    if (status == 0 && made->count == 2)
        status = bl_queue_create(&made->queues[1], write, goal_ns, bl_io_queue_now_ns());
    if (status < 0) {
        bl_queue_destroy(made->queues[0]);
        free(made);
        return status;
    }
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&made->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&made->lock, NULL);
    *io_queue = made;
    return 0;
}

void bl_io_queue_destroy(bl_io_queue *io_queue)
{
    if (io_queue == NULL)
        return;
    for (int i = 0; i < io_queue->count; i++)
        bl_queue_destroy(io_queue->queues[i]);
    pthread_cond_destroy(&io_queue->changed);
    pthread_mutex_destroy(&io_queue->lock);
    free(io_queue);
}

int bl_io_queue_add_device(bl_io_queue *io_queue, bl_tokens *bucket)
{
    pthread_mutex_lock(&io_queue->lock);
    int status = 0;
    for (int i = 0; i < io_queue->count && status >= 0; i++)
        status = bl_queue_add_device(io_queue->queues[i], bucket);
    pthread_mutex_unlock(&io_queue->lock);
    return status;
}

static uint64_t bl_price_tokens(uint64_t bytes, double byte_ps, double piece_ps)
{
    return bytes > 0 ? (uint64_t)((double)bytes * byte_ps + piece_ps + 0.5) : 0;
}

uint64_t bl_io_queue_tokens(const bl_io_queue *io_queue, int direction, uint64_t bytes)
{
    return bl_price_tokens(bytes, io_queue->price.byte_ps[direction],
                           io_queue->price.piece_ps[direction]);
}

uint64_t bl_io_queue_device_tokens(const bl_io_queue *io_queue, uint64_t bytes)
{
    return bl_price_tokens(bytes, io_queue->price.device_byte_ps, io_queue->price.device_piece_ps);
}

void bl_io_queue_widen(bl_io_queue *io_queue, uint64_t bytes, uint32_t count)
{
    pthread_mutex_lock(&io_queue->lock);
    for (int direction = 0; direction < 2; direction++) {
        bl_queue *queue = bl_io_queue_of(io_queue, direction);
        uint64_t tokens = count * bl_io_queue_tokens(io_queue, direction, bytes);
        if (bl_queue_owns(queue))
            bl_member_widen(queue->direction, queue->member, tokens);
    }
    pthread_mutex_unlock(&io_queue->lock);
}

/* ---- Pieces */

static struct timespec bl_io_queue_time(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / BL_IO_QUEUE_SECOND_NS),
                             .tv_nsec = (long)(ns % BL_IO_QUEUE_SECOND_NS)};
}

/* Release the lock until wait_ns have passed or another thread signals a change. */
static void bl_io_queue_doze(bl_io_queue *io_queue, uint64_t wait_ns)
{
    if (wait_ns > BL_IO_QUEUE_SPIN_NS) {
        struct timespec until = bl_io_queue_time(bl_io_queue_now_ns() + wait_ns);
        pthread_cond_timedwait(&io_queue->changed, &io_queue->lock, &until);
    } else {
        pthread_mutex_unlock(&io_queue->lock);
        sched_yield();
        pthread_mutex_lock(&io_queue->lock);
    }
}

/* Announce to other engines whether this thread will request another piece. */
static void bl_request_announce(bl_io_queue *io_queue, bl_io_request *request, int coming)
{
    bl_queue *queue = bl_io_queue_of(io_queue, request->direction);
    if (coming != request->coming)
        queue->coming[request->node] += coming ? 1 : -1;
    request->coming = (uint8_t)coming;
}

int bl_request_queue(bl_io_queue *io_queue, bl_io_request *request, const uint64_t *device_bytes,
                     uint64_t now_ns)
{
    if (request->direction > 1)
        return -EINVAL;
    bl_queue *queue = bl_io_queue_of(io_queue, request->direction);
    uint64_t device_tokens[BL_LINK_DEVICES];
    uint32_t devices = device_bytes == NULL ? 0 : queue->device_count;
    for (uint32_t i = 0; i < devices; i++)
        device_tokens[i] = bl_io_queue_device_tokens(io_queue, device_bytes[i]);
    int64_t status = bl_queue_push(
        queue, request->node, bl_io_queue_tokens(io_queue, request->direction, request->bytes),
        request->bytes, devices > 0 ? device_tokens : NULL, (uintptr_t)request, now_ns);
    if (status < 0)
        return (int)status;
    request->waiter = (uint64_t)status, request->since_ns = now_ns;
    request->state = BL_IO_QUEUED;
    bl_request_announce(io_queue, request, request->again);
    return 0;
}

/* Admit one piece of this queue, for any waiting thread. Returns 0; or -EAGAIN, and *wait_ns is the
 * time until the next poll. */
static int bl_io_queue_admit(bl_io_queue *io_queue, bl_queue *queue, const bl_io_request *request,
                             uint64_t now_ns, uint64_t *wait_ns)
{
    bl_admission admission;
    int status = bl_queue_poll(queue, now_ns, &admission, wait_ns);
    if (status < 0)
        return status;
    bl_io_request *admitted = (bl_io_request *)(uintptr_t)admission.id;
    bl_transfer_stats *stats = &io_queue->stats[admission.node];
    uint64_t waited = now_ns - admission.queued_ns;
    stats->pieces++, stats->bytes += admission.bytes, stats->waited_ns += waited;
    if (waited > stats->longest_ns)
        stats->longest_ns = waited;
    admitted->waiter = admission.waiter, admitted->state = BL_IO_ADMITTED;
    if (admitted != request)
        pthread_cond_broadcast(&io_queue->changed);
    return 0;
}

int bl_request_wait(bl_io_queue *io_queue, bl_io_request *request, uint64_t timeout_ns,
                    uint64_t *now_ns)
{
    bl_queue *queue = bl_io_queue_of(io_queue, request->direction);
    uint64_t start_ns = *now_ns;
    while (request->state == BL_IO_QUEUED) {
        uint64_t wait, waited = *now_ns - start_ns;
        int status = -ETIMEDOUT;
        if (io_queue->stopped)
            status = -ECANCELED;
        else if (*now_ns - request->since_ns <= BL_IO_QUEUE_LONGEST_NS)
            status = bl_io_queue_admit(io_queue, queue, request, *now_ns, &wait);
        if (status == -EAGAIN && waited >= timeout_ns)
            return status;
        if (status == -EAGAIN) {
            bl_io_queue_doze(io_queue, bl_min(wait, timeout_ns - waited));
            *now_ns = bl_io_queue_now_ns();
        } else if (status < 0) {
            bl_request_end(io_queue, request, *now_ns);
            if (status == -ECANCELED)
                return status;
            request->state = BL_IO_UNTHROTTLED;
            io_queue->stats[request->node].unthrottled++;
        }
    }
    return 0;
}

void bl_request_end(bl_io_queue *io_queue, bl_io_request *request, uint64_t now_ns)
{
    bl_queue *queue = bl_io_queue_of(io_queue, request->direction);
    if (request->state == BL_IO_QUEUED)
        bl_queue_cancel(queue, request->waiter);
    if (request->state == BL_IO_ADMITTED)
        bl_queue_complete(queue, request->waiter, now_ns);
    if (request->state != BL_IO_IDLE && queue->stat.queued > 0)
        pthread_cond_broadcast(&io_queue->changed);
    request->state = BL_IO_IDLE;
}

/* The thread will not request more pieces: other threads and engines need not wait for it. */
static void bl_request_rest(bl_io_queue *io_queue, bl_io_request *request)
{
    bl_queue *queue = bl_io_queue_of(io_queue, request->direction);
    bl_request_announce(io_queue, request, 0);
    if (queue->stat.queued == 0 && queue->stat.in_flight == 0)
        bl_queue_rest(queue);
}

int bl_io_queue_acquire(bl_io_queue *io_queue, bl_io_request *request, const uint64_t *device_bytes,
                        uint64_t timeout_ns)
{
    pthread_mutex_lock(&io_queue->lock);
    uint64_t now_ns = bl_io_queue_now_ns();
    int status = io_queue->stopped && request->state == BL_IO_IDLE ? -ECANCELED : 0;
    if (status == 0 && request->state == BL_IO_IDLE)
        status = bl_request_queue(io_queue, request, device_bytes, now_ns);
    if (status == 0)
        status = bl_request_wait(io_queue, request, timeout_ns, &now_ns);
    if (status == -ECANCELED)
        bl_request_rest(io_queue, request);
    pthread_mutex_unlock(&io_queue->lock);
    return status;
}

void bl_io_queue_release(bl_io_queue *io_queue, bl_io_request *request)
{
    pthread_mutex_lock(&io_queue->lock);
    bl_request_end(io_queue, request, bl_io_queue_now_ns());
    bl_request_rest(io_queue, request);
    pthread_mutex_unlock(&io_queue->lock);
}

void bl_io_queue_stat(bl_io_queue *io_queue, int direction, bl_queue_stat *stat)
{
    pthread_mutex_lock(&io_queue->lock);
    bl_queue_stat_read(bl_io_queue_of(io_queue, direction), stat);
    pthread_mutex_unlock(&io_queue->lock);
}

uint64_t bl_io_queue_stalls(bl_io_queue *io_queue)
{
    uint64_t stalls = 0;
    pthread_mutex_lock(&io_queue->lock);
    for (int i = 0; i < io_queue->count; i++)
        stalls += io_queue->queues[i]->stat.stalls;
    pthread_mutex_unlock(&io_queue->lock);
    return stalls;
}

void bl_io_queue_transfer_stats(bl_io_queue *io_queue, uint32_t node, bl_transfer_stats *stats)
{
    pthread_mutex_lock(&io_queue->lock);
    *stats = node < BL_LINK_NODES ? io_queue->stats[node] : (bl_transfer_stats){0};
    pthread_mutex_unlock(&io_queue->lock);
}

void bl_io_queue_stop(bl_io_queue *io_queue, int stopped)
{
    pthread_mutex_lock(&io_queue->lock);
    io_queue->stopped = stopped;
    pthread_cond_broadcast(&io_queue->changed);
    pthread_mutex_unlock(&io_queue->lock);
}
