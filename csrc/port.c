/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A port: one engine's queues for both directions, which threads push into and one thread takes
 * from (api_link.h). Only here is a clock read.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "queue.h"

/* A shorter wait is not worth a timer, which wakes late by more. */
static const uint64_t BL_PORT_SPIN_NS = 50000;
static const uint64_t BL_PORT_SECOND_NS = 1000000000;

struct bl_port {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int woken;
    int next;                   /* the direction to ask first */
    int count;                  /* queues: 1 where the link is not duplex */
    bl_queue *queues[2];
};

uint64_t bl_port_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * BL_PORT_SECOND_NS + (uint64_t)now.tv_nsec;
}

static bl_queue *bl_port_queue(bl_port *port, int direction)
{
    return port->queues[port->count == 2 ? direction : 0];
}

int bl_port_create(bl_port **port, bl_way *read, bl_way *write, uint64_t goal_ns)
{
    bl_port *made = calloc(1, sizeof *made);
    if (made == NULL)
        return -ENOMEM;
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

int bl_port_push(bl_port *port, int direction, uint32_t node, uint32_t count,
                 const uint64_t *tokens, const uint64_t *bytes, const uint64_t *device_tokens,
                 uint64_t first_id, uint64_t *waiters)
{
    int64_t status = 0;
    pthread_mutex_lock(&port->lock);
    bl_queue *queue = bl_port_queue(port, direction);
    uint32_t devices = queue->device_count;
    for (uint32_t i = 0; i < count && status >= 0; i++) {
        const uint64_t *own = device_tokens == NULL ? NULL : device_tokens + (size_t)i * devices;
        status = bl_queue_push(queue, node, tokens[i], bytes[i], own, first_id + i,
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

/* Ask both queues, in turns: the directions of a duplex link do not disturb each other. */
static int bl_port_poll(bl_port *port, bl_admission *admission, uint64_t *delay_ns,
                        uint64_t *wait_ns)
{
    *wait_ns = UINT64_MAX;
    for (int asked = 0; asked < port->count; asked++) {
        int direction = port->next;
        port->next = (port->next + 1) % port->count;
        uint64_t now = bl_port_now_ns(), wait;
        int status = bl_queue_poll(port->queues[direction], now, admission, &wait);
        if (status == 0)
            *delay_ns = now - admission->queued_ns;
        if (status != -EAGAIN)
            return status == 0 ? direction : status;
        *wait_ns = wait < *wait_ns ? wait : *wait_ns;
    }
    return -EAGAIN;
}

int bl_port_take(bl_port *port, uint64_t timeout_ns, bl_admission *admission, uint64_t *delay_ns)
{
    uint64_t start = bl_port_now_ns();
    pthread_mutex_lock(&port->lock);
    int status;
    for (;;) {
        uint64_t wait;
        status = bl_port_poll(port, admission, delay_ns, &wait);
        uint64_t waited = bl_port_now_ns() - start;
        if (status != -EAGAIN || waited >= timeout_ns || port->woken == 2)
            break;
        uint64_t left = timeout_ns - waited;
        wait = wait < left ? wait : left;
        if (wait > BL_PORT_SPIN_NS && !port->woken) {
            struct timespec until = bl_port_time(bl_port_now_ns() + wait);
            pthread_cond_timedwait(&port->changed, &port->lock, &until);
        } else {
            pthread_mutex_unlock(&port->lock);
            sched_yield();
            pthread_mutex_lock(&port->lock);
        }
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
