/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Waiting for a line to change: spin while a reply is likely, then yield, then nap. On a core that
 * other processes use, a nap takes the place of a yield. Every wait has a deadline (D12). A thread
 * that oversleeps its deadline on a busy machine checks once more, so a reply that has arrived by
 * then is accepted.
 */
#ifndef BL_WAIT_H
#define BL_WAIT_H

#include "coherence/coherence.h"

enum {
    BL_WAIT_SPIN_NS = 20 * 1000,        /* a few round trips through a switch */
    BL_WAIT_YIELD_NS = 1000 * 1000,
    BL_WAIT_NAP_NS = 50 * 1000,
    BL_WAIT_TURNS = 32,                 /* checks between two readings of the clock */
    BL_YIELD_SHORT_NS = 1000,           /* a yield that takes longer lets another thread run */
    BL_YIELD_LONG_NS = 50 * 1000,       /* a thread that runs for longer does not wait for a line */
    BL_TAKEN_TIMES = 16,                /* the core then counts as taken for 16 times as long, */
    BL_TAKEN_MAX_NS = 1000 * 1000 * 1000 /* at most: a suspended machine also looks like a yield */
};

/* What yields show about the core of a waiting thread. It outlives a wait. */
typedef struct bl_core {
    uint64_t taken_until_ns;    /* until then a compute-bound thread probably uses it */
    uint32_t crowded;           /* 1: the last yield ran another waiting thread */
} bl_core;

typedef struct bl_wait {
    uint64_t start_ns;
    uint64_t deadline_ns;
    uint64_t waited_ns;
    uint32_t turns;
    uint32_t over;              /* the deadline has passed */
    bl_core core;
} bl_wait;

static inline bl_wait bl_wait_make(const bl_memory *memory, uint64_t timeout_ns)
{
    uint64_t now = bl_now_ns(memory);
    return (bl_wait){now, now + timeout_ns, 0, 0, 0, {0, 0}};
}

static inline uint64_t bl_wait_left_ns(const bl_memory *memory, const bl_wait *wait)
{
    uint64_t now = bl_now_ns(memory);
    return now < wait->deadline_ns ? wait->deadline_ns - now : 0;
}

/* Return 1 if the core should not be yielded: another thread uses whole time slices of it. Linux
 * counts a yield as a used time slice, so a thread that yields runs after that thread's slice, and
 * one that naps before its end. */
static inline int bl_core_taken(const bl_core *core, uint64_t now_ns)
{
    return now_ns < core->taken_until_ns;
}

/* Yield the core. If another thread runs for a short time, it probably is the one that writes the
 * awaited line, and it waits for this thread. */
static inline void bl_core_yield(const bl_memory *memory, bl_core *core)
{
    uint64_t before = bl_now_ns(memory);
    bl_nap(memory, 0);
    uint64_t now = bl_now_ns(memory), took_ns = now - before;
    core->crowded = took_ns > BL_YIELD_SHORT_NS && took_ns < BL_YIELD_LONG_NS;
    if (took_ns >= BL_YIELD_LONG_NS)
        core->taken_until_ns = now + bl_min(BL_TAKEN_TIMES * took_ns, BL_TAKEN_MAX_NS);
}

/* Wait once. Returns 0 if the deadline has passed and the caller has checked once since. In the
 * first turn a thread yields if its core was crowded at the end of the last wait. */
static inline int bl_wait_turn(const bl_memory *memory, bl_wait *wait)
{
    if (wait->over)
        return 0;
    if (wait->waited_ns < BL_WAIT_SPIN_NS && !(wait->waited_ns == 0 && wait->core.crowded)) {
        wait->core.crowded = 0;
        if (wait->waited_ns > 0) /* not in the first turn: a local reply arrives within a pause */
            bl_pause(memory);
        if (++wait->turns % BL_WAIT_TURNS)
            return 1;
    } else if (wait->waited_ns < BL_WAIT_YIELD_NS &&
               !bl_core_taken(&wait->core, wait->start_ns + wait->waited_ns)) {
        bl_core_yield(memory, &wait->core);
    } else {
        bl_nap(memory, BL_WAIT_NAP_NS);
    }
    uint64_t now = bl_now_ns(memory);
    wait->waited_ns = now - wait->start_ns;
    wait->over = now >= wait->deadline_ns;
    return 1;
}

#endif
