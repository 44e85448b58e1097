/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A port: one engine's queues for both directions, and threads that wait in them for their pieces
 * (api/iosched.h). Whoever waits asks for all: it may find another thread's piece admitted, and
 * wakes that thread. Only here is a clock read.
 */
#include "iosched/port.h"

#include "base/minmax.h"
#include "pool/pool.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

/* A piece that has waited for so long is copied without tokens. */
static const uint64_t BL_PORT_LONGEST_NS = 1000000000;

/* A shorter wait is not worth a timer, which wakes late by more. */
static const uint64_t BL_PORT_SPIN_NS = 50000;
static const uint64_t BL_PORT_SECOND_NS = 1000000000;

uint64_t bl_port_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * BL_PORT_SECOND_NS + (uint64_t)now.tv_nsec;
}

bl_queue *bl_port_queue(bl_port *port, int direction)
{
    return port->queues[port->count == 2 ? direction : 0];
}

int bl_port_create(bl_port **port, bl_way *read, bl_way *write, uint64_t goal_ns,
                   const bl_price *price, const bl_pool *pool)
{
    bl_port *made = calloc(1, sizeof *made);
    if (made == NULL)
        return -ENOMEM;
    made->price = *price;
    if (pool != NULL)
        made->map = pool->memory.map;
    made->count = read == write ? 1 : 2;
    int status = bl_queue_create(&made->queues[0], read, goal_ns, bl_port_now_ns());
    if (status == 0 && made->count == 2)
        status = bl_queue_create(&made->queues[1], write, goal_ns, bl_port_now_ns());
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
    *port = made;
    return 0;
}

void bl_port_destroy(bl_port *port)
{
    if (port == NULL)
        return;
    for (int i = 0; i < port->count; i++)
        bl_queue_destroy(port->queues[i]);
    pthread_cond_destroy(&port->changed);
    pthread_mutex_destroy(&port->lock);
    free(port);
}

int bl_port_add_device(bl_port *port, bl_tokens *bucket)
{
    pthread_mutex_lock(&port->lock);
    int status = 0;
    for (int i = 0; i < port->count && status >= 0; i++)
        status = bl_queue_add_device(port->queues[i], bucket);
    pthread_mutex_unlock(&port->lock);
    return status;
}

static uint64_t bl_price_tokens(uint64_t bytes, double byte_ps, double piece_ps)
{
    return bytes > 0 ? (uint64_t)((double)bytes * byte_ps + piece_ps + 0.5) : 0;
}

uint64_t bl_port_tokens(const bl_port *port, int direction, uint64_t bytes)
{
    return bl_price_tokens(bytes, port->price.byte_ps[direction], port->price.piece_ps[direction]);
}

uint64_t bl_port_device_tokens(const bl_port *port, uint64_t bytes)
{
    return bl_price_tokens(bytes, port->price.device_byte_ps, port->price.device_piece_ps);
}

void bl_port_widen(bl_port *port, uint64_t bytes, uint32_t count)
{
    pthread_mutex_lock(&port->lock);
    for (int direction = 0; direction < 2; direction++) {
        bl_queue *queue = bl_port_queue(port, direction);
        if (bl_queue_owns(queue))
            bl_seat_widen(queue->way, queue->seat, count * bl_port_tokens(port, direction, bytes));
    }
    pthread_mutex_unlock(&port->lock);
}

/* ---- Pieces */

static struct timespec bl_port_time(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / BL_PORT_SECOND_NS),
                             .tv_nsec = (long)(ns % BL_PORT_SECOND_NS)};
}

/* Let other threads have the lock until wait_ns have gone by, or there is news. */
static void bl_port_doze(bl_port *port, uint64_t wait_ns)
{
    if (wait_ns > BL_PORT_SPIN_NS) {
        struct timespec until = bl_port_time(bl_port_now_ns() + wait_ns);
        pthread_cond_timedwait(&port->changed, &port->lock, &until);
    } else {
        pthread_mutex_unlock(&port->lock);
        sched_yield();
        pthread_mutex_lock(&port->lock);
    }
}

/* Tell others whether the asking thread will be back for another piece. */
static void bl_request_say(bl_port *port, bl_io_request *request, int coming)
{
    bl_queue *queue = bl_port_queue(port, request->direction);
    if (coming != request->coming)
        queue->coming[request->node] += coming ? 1 : -1;
    request->coming = (uint8_t)coming;
}

int bl_request_queue(bl_port *port, bl_io_request *request, const uint64_t *device_bytes,
                     uint64_t now_ns)
{
    if (request->direction > 1)
        return -EINVAL;
    bl_queue *queue = bl_port_queue(port, request->direction);
    uint64_t device_tokens[BL_LINK_DEVICES];
    uint32_t devices = device_bytes == NULL ? 0 : queue->device_count;
    for (uint32_t i = 0; i < devices; i++)
        device_tokens[i] = bl_port_device_tokens(port, device_bytes[i]);
    int64_t status = bl_queue_push(
        queue, request->node, bl_port_tokens(port, request->direction, request->bytes),
        request->bytes, devices > 0 ? device_tokens : NULL, (uintptr_t)request, now_ns);
    if (status < 0)
        return (int)status;
    request->waiter = (uint64_t)status, request->since_ns = now_ns;
    request->state = BL_IO_QUEUED;
    bl_request_say(port, request, request->again);
    return 0;
}

/* What of this queue may start, whoever waits for it: 0, or -EAGAIN and when to ask again. */
static int bl_port_ask(bl_port *port, bl_queue *queue, const bl_io_request *request,
                       uint64_t now_ns, uint64_t *wait_ns)
{
    bl_admission admission;
    int status = bl_queue_poll(queue, now_ns, &admission, wait_ns);
    if (status < 0)
        return status;
    bl_io_request *admitted = (bl_io_request *)(uintptr_t)admission.id;
    bl_carried *carried = &port->carried[admission.node];
    uint64_t waited = now_ns - admission.queued_ns;
    carried->pieces++, carried->bytes += admission.bytes, carried->waited_ns += waited;
    if (waited > carried->longest_ns)
        carried->longest_ns = waited;
    admitted->waiter = admission.waiter, admitted->state = BL_IO_ADMITTED;
    if (admitted != request)
        pthread_cond_broadcast(&port->changed);
    return 0;
}

int bl_request_wait(bl_port *port, bl_io_request *request, uint64_t timeout_ns, uint64_t *now_ns)
{
    bl_queue *queue = bl_port_queue(port, request->direction);
    uint64_t start_ns = *now_ns;
    while (request->state == BL_IO_QUEUED) {
        uint64_t wait, waited = *now_ns - start_ns;
        int status = port->stopped                                     ? -ECANCELED
                     : *now_ns - request->since_ns > BL_PORT_LONGEST_NS ? -ETIMEDOUT
                                      : bl_port_ask(port, queue, request, *now_ns, &wait);
        if (status == -EAGAIN && waited >= timeout_ns)
            return status;
        if (status == -EAGAIN) {
            bl_port_doze(port, bl_least(wait, timeout_ns - waited));
            *now_ns = bl_port_now_ns();
        } else if (status < 0) {
            bl_request_end(port, request, *now_ns);
            if (status == -ECANCELED)
                return status;
            request->state = BL_IO_UNTHROTTLED;
            port->carried[request->node].astray++;
        }
    }
    return 0;
}

void bl_request_end(bl_port *port, bl_io_request *request, uint64_t now_ns)
{
    bl_queue *queue = bl_port_queue(port, request->direction);
    if (request->state == BL_IO_QUEUED)
        bl_queue_cancel(queue, request->waiter);
    if (request->state == BL_IO_ADMITTED)
        bl_queue_complete(queue, request->waiter, now_ns);
    if (request->state != BL_IO_IDLE && queue->stat.queued > 0)
        pthread_cond_broadcast(&port->changed);
    request->state = BL_IO_IDLE;
}

/* Nobody waits for what does not come: neither this thread, nor others for its queue. */
static void bl_request_rest(bl_port *port, bl_io_request *request)
{
    bl_queue *queue = bl_port_queue(port, request->direction);
    bl_request_say(port, request, 0);
    if (queue->stat.queued == 0 && queue->stat.in_flight == 0)
        bl_queue_rest(queue);
}

int bl_port_acquire(bl_port *port, bl_io_request *request, const uint64_t *device_bytes,
                    uint64_t timeout_ns)
{
    pthread_mutex_lock(&port->lock);
    uint64_t now_ns = bl_port_now_ns();
    int status = port->stopped && request->state == BL_IO_IDLE ? -ECANCELED : 0;
    if (status == 0 && request->state == BL_IO_IDLE)
        status = bl_request_queue(port, request, device_bytes, now_ns);
    if (status == 0)
        status = bl_request_wait(port, request, timeout_ns, &now_ns);
    if (status == -ECANCELED)
        bl_request_rest(port, request);
    pthread_mutex_unlock(&port->lock);
    return status;
}

void bl_port_release(bl_port *port, bl_io_request *request)
{
    pthread_mutex_lock(&port->lock);
    bl_request_end(port, request, bl_port_now_ns());
    bl_request_rest(port, request);
    pthread_mutex_unlock(&port->lock);
}

void bl_port_stat(bl_port *port, int direction, bl_queue_stat *stat)
{
    pthread_mutex_lock(&port->lock);
    bl_queue_stat_read(bl_port_queue(port, direction), stat);
    pthread_mutex_unlock(&port->lock);
}

uint64_t bl_port_stalls(bl_port *port)
{
    uint64_t stalls = 0;
    pthread_mutex_lock(&port->lock);
    for (int i = 0; i < port->count; i++)
        stalls += port->queues[i]->stat.stalls;
    pthread_mutex_unlock(&port->lock);
    return stalls;
}

void bl_port_carried(bl_port *port, uint32_t node, bl_carried *carried)
{
    pthread_mutex_lock(&port->lock);
    *carried = node < BL_LINK_NODES ? port->carried[node] : (bl_carried){0};
    pthread_mutex_unlock(&port->lock);
}

void bl_port_stop(bl_port *port, int stopped)
{
    pthread_mutex_lock(&port->lock);
    port->stopped = stopped;
    pthread_cond_broadcast(&port->changed);
    pthread_mutex_unlock(&port->lock);
}
