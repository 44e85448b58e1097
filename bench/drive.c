/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The stopwatch (see drive.h). Reading the clock costs about as much as a fence, so operations are
 * timed one by one only when samples are needed; ratios are computed from whole runs without them.
 */
#include "drive.h"

#include <time.h>

uint64_t drive_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void drive_stop(drive_plan *plan)
{
    __atomic_store_n(&plan->stopped, 1, __ATOMIC_RELAXED);
}

static int stopped(const drive_plan *plan)
{
    return __atomic_load_n(&plan->stopped, __ATOMIC_RELAXED) != 0;
}

static uint64_t wait_until(const drive_plan *plan, uint64_t then_ns)
{
    uint64_t now = drive_now_ns();
    for (; now < then_ns && !stopped(plan); now = drive_now_ns())
#ifdef __x86_64__
        __builtin_ia32_pause();
#else
        __asm__ volatile("isb" ::: "memory");
#endif
    return now;
}

int drive_call(const void *context, uint64_t offset, void *buffer, uint64_t size)
{
    const drive_session *at = context;
    (void)offset, (void)buffer, (void)size;
    return at->call(at->session, at->message, at->timeout_ns);
}

uint64_t drive_pace_take(drive_pace *pace, uint64_t now_ns, uint64_t size)
{
    uint64_t move_ns = size * 1000000000u / pace->bytes_per_s, end;
    uint64_t free_ns = __atomic_load_n(&pace->free_ns, __ATOMIC_RELAXED);
    do
        end = (free_ns > now_ns ? free_ns : now_ns) + move_ns;
    while (!__atomic_compare_exchange_n(&pace->free_ns, &free_ns, end, 1, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
    return end + pace->latency_ns;
}

int drive_run(drive_plan *plan)
{
    uint64_t start = wait_until(plan, plan->start_ns), at = 0;
    int clocked = plan->samples_ns || plan->duration_ns || plan->period_ns || plan->paces;
    plan->done = 0;
    while (plan->done < plan->count && !stopped(plan)) {
        uint64_t begin = 0, ready = 0;
        if (clocked)
            begin = wait_until(plan, start + plan->done * plan->period_ns);
        if (stopped(plan))
            break;
        if (plan->duration_ns && plan->done > 0 && begin >= start + plan->duration_ns)
            break;
        if (plan->paces)
            ready = drive_pace_take(plan->paces[at], begin, plan->size);
        int status = plan->operation(plan->context, plan->offsets[at], plan->buffer, plan->size);
        if (status < 0)
            return status;
        if (plan->paces && !plan->overlaps)
            wait_until(plan, ready);
        if (plan->samples_ns)
            plan->samples_ns[plan->done] = drive_now_ns() - begin;
        plan->done++;
        at = at + 1 < plan->offset_count ? at + 1 : 0;
    }
    plan->elapsed_ns = drive_now_ns() - start;
    return 0;
}
