/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A port: one engine's queues for both directions, which threads push into and one thread takes
 * from (api/iosched.h), or which threads pass by themselves (iosched/toll.c). Only here is a clock
 * read.
 */
#include "iosched/port.h"

#include "pool/pool.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

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

int64_t bl_port_queue_piece(bl_port *port, int direction, uint32_t node, uint64_t bytes,
                            const uint64_t *device_bytes, uint64_t id, uint64_t now_ns)
{
    bl_queue *queue = bl_port_queue(port, direction);
    uint64_t device_tokens[BL_LINK_DEVICES];
    uint32_t devices = device_bytes == NULL ? 0 : queue->device_count;
    for (uint32_t i = 0; i < devices; i++)
        device_tokens[i] = bl_port_device_tokens(port, device_bytes[i]);
    return bl_queue_push(queue, node, bl_port_tokens(port, direction, bytes), bytes,
                         devices > 0 ? device_tokens : NULL, id, now_ns);
}

int bl_port_push(bl_port *port, int direction, uint32_t node, uint32_t count,
                 const uint64_t *bytes, const uint64_t *device_bytes, uint64_t first_id,
                 uint64_t *waiters)
{
    int64_t status = 0;
    pthread_mutex_lock(&port->lock);
    bl_queue *queue = bl_port_queue(port, direction);
    uint32_t devices = queue->device_count;
    for (uint32_t i = 0; i < count && status >= 0; i++) {
        const uint64_t *own = device_bytes == NULL ? NULL : device_bytes + (size_t)i * devices;
        status = bl_port_queue_piece(port, direction, node, bytes[i], own, first_id + i,
                                     bl_port_now_ns());
        if (status >= 0)
            waiters[i] = (uint64_t)status;
        else
            while (i > 0)
                bl_queue_cancel(queue, waiters[--i]), count = 0;
    }
    port->woken = 1;
    pthread_cond_signal(&port->changed);
    pthread_mutex_unlock(&port->lock);
    return status < 0 ? (int)status : 0;
}

int bl_port_cancel(bl_port *port, int direction, uint64_t waiter)
{
    pthread_mutex_lock(&port->lock);
    int status = bl_queue_cancel(bl_port_queue(port, direction), waiter);
    pthread_mutex_unlock(&port->lock);
    return status;
}

static struct timespec bl_port_time(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / BL_PORT_SECOND_NS),
                             .tv_nsec = (long)(ns % BL_PORT_SECOND_NS)};
}

int bl_port_ask(bl_port *port, bl_queue *queue, uint64_t now_ns, bl_admission *admission,
                uint64_t *wait_ns)
{
    int status = bl_queue_poll(queue, now_ns, admission, wait_ns);
    if (status == 0) {
        bl_carried *carried = &port->carried[admission->node];
        uint64_t waited = now_ns - admission->queued_ns;
        carried->pieces++, carried->bytes += admission->bytes, carried->waited_ns += waited;
        if (waited > carried->longest_ns)
            carried->longest_ns = waited;
    }
    return status;
}

void bl_port_doze(bl_port *port, uint64_t wait_ns)
{
    if (wait_ns > BL_PORT_SPIN_NS && !port->woken) {
        struct timespec until = bl_port_time(bl_port_now_ns() + wait_ns);
        pthread_cond_timedwait(&port->changed, &port->lock, &until);
    } else {
        pthread_mutex_unlock(&port->lock);
        sched_yield();
        pthread_mutex_lock(&port->lock);
    }
}

/* Ask both queues, in turns: the directions of a duplex link do not disturb each other. */
static int bl_port_poll(bl_port *port, bl_admission *admission, uint64_t *wait_ns)
{
    *wait_ns = UINT64_MAX;
    for (int asked = 0; asked < port->count; asked++) {
        int direction = port->next;
        port->next = (port->next + 1) % port->count;
        uint64_t wait;
        int status = bl_port_ask(port, port->queues[direction], bl_port_now_ns(), admission, &wait);
        if (status != -EAGAIN)
            return status == 0 ? direction : status;
        *wait_ns = wait < *wait_ns ? wait : *wait_ns;
    }
    return -EAGAIN;
}

int bl_port_take(bl_port *port, uint64_t timeout_ns, bl_admission *admission)
{
    uint64_t start = bl_port_now_ns();
    pthread_mutex_lock(&port->lock);
    int status;
    for (;;) {
        uint64_t wait;
        status = bl_port_poll(port, admission, &wait);
        uint64_t waited = bl_port_now_ns() - start;
        if (status != -EAGAIN || waited >= timeout_ns || port->woken == 2)
            break;
        uint64_t left = timeout_ns - waited;
        bl_port_doze(port, wait < left ? wait : left);
        port->woken = port->woken == 2 ? 2 : 0;
    }
    port->woken = 0;
    pthread_mutex_unlock(&port->lock);
    return status;
}

void bl_port_wake(bl_port *port)
{
    pthread_mutex_lock(&port->lock);
    port->woken = 2;
    pthread_cond_signal(&port->changed);
    pthread_mutex_unlock(&port->lock);
}

void bl_port_complete(bl_port *port, int direction, uint64_t waiter)
{
    pthread_mutex_lock(&port->lock);
    bl_queue_complete(bl_port_queue(port, direction), waiter, bl_port_now_ns());
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
