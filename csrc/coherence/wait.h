/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Waiting for a line to change: spin while a reply is likely, then yield, then nap. Every wait has
 * a deadline (D12). A thread that oversleeps its deadline on a busy machine checks once more, so a
 * reply that has arrived by then is accepted.
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
    BL_YIELD_LONG_NS = 50 * 1000        /* a thread that runs for longer does not wait for a line */
};

typedef struct bl_wait {
    uint64_t start_ns;
    uint64_t deadline_ns;
    uint64_t waited_ns;
    uint32_t turns;
    uint32_t over;              /* the deadline has passed */
    uint32_t crowded;           /* 1: the last turn yielded to a thread that waits, too; set before
                                 * the first turn: it yields */
} bl_wait;

static inline bl_wait bl_wait_make(const bl_memory *memory, uint64_t timeout_ns)
{
    uint64_t now = bl_now_ns(memory);
    return (bl_wait){now, now + timeout_ns, 0, 0, 0, 0};
}

static inline uint64_t bl_wait_left_ns(const bl_memory *memory, const bl_wait *wait)
{
    uint64_t now = bl_now_ns(memory);
    return now < wait->deadline_ns ? wait->deadline_ns - now : 0;
}

/* Yield the core. Returns 1 if another thread ran, for a short time: it probably is the one that
 * writes the awaited line, and it waits for this thread. */
static inline int bl_wait_yield(const bl_memory *memory)
{
    uint64_t before = bl_now_ns(memory);
    bl_nap(memory, 0);
    uint64_t took_ns = bl_now_ns(memory) - before;
    return took_ns > BL_YIELD_SHORT_NS && took_ns < BL_YIELD_LONG_NS;
}

/* Wait once. Returns 0 if the deadline has passed and the caller has checked once since. */
static inline int bl_wait_turn(const bl_memory *memory, bl_wait *wait)
{
    if (wait->over)
        return 0;
    if (wait->waited_ns < BL_WAIT_SPIN_NS && !(wait->waited_ns == 0 && wait->crowded)) {
        wait->crowded = 0;
        if (wait->waited_ns > 0) /* not in the first turn: a local reply arrives within a pause */
            bl_pause(memory);
        if (++wait->turns % BL_WAIT_TURNS)
            return 1;
    } else if (wait->waited_ns < BL_WAIT_YIELD_NS) {
        wait->crowded = (uint32_t)bl_wait_yield(memory);
    } else {
        bl_nap(memory, BL_WAIT_NAP_NS);
    }
    uint64_t now = bl_now_ns(memory);
    wait->waited_ns = now - wait->start_ns;
    wait->over = now >= wait->deadline_ns;
    return 1;
}

#endif
