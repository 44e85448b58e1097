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
    BL_WAIT_TURNS = 32                  /* checks between two readings of the clock */
};

typedef struct bl_wait {
    uint64_t start_ns;
    uint64_t deadline_ns;
    uint64_t waited_ns;
    uint32_t turns;
    uint32_t over;              /* the deadline has passed */
} bl_wait;

static inline bl_wait bl_wait_make(const bl_memory *memory, uint64_t timeout_ns)
{
    uint64_t now = bl_now_ns(memory);
    return (bl_wait){now, now + timeout_ns, 0, 0, 0};
}

static inline uint64_t bl_wait_left_ns(const bl_memory *memory, const bl_wait *wait)
{
    uint64_t now = bl_now_ns(memory);
    return now < wait->deadline_ns ? wait->deadline_ns - now : 0;
}

/* Wait once. Returns 0 if the deadline has passed and the caller has checked once since. */
static inline int bl_wait_turn(const bl_memory *memory, bl_wait *wait)
{
    if (wait->over)
        return 0;
    if (wait->waited_ns < BL_WAIT_SPIN_NS) {
        if (wait->waited_ns > 0) /* not in the first turn: a local reply arrives within a pause */
            bl_pause(memory);
        if (++wait->turns % BL_WAIT_TURNS)
            return 1;
    } else {
        bl_nap(memory, wait->waited_ns < BL_WAIT_YIELD_NS ? 0 : BL_WAIT_NAP_NS);
    }
    uint64_t now = bl_now_ns(memory);
    wait->waited_ns = now - wait->start_ns;
    wait->over = now >= wait->deadline_ns;
    return 1;
}

#endif
