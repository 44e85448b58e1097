/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Waits for lines on a core that another thread also uses, in virtual time: waited PERIOD BURST
 * REPLY SECONDS, all but the last in microseconds. The other thread computes for BURST of each
 * PERIOD; a line that is awaited arrives after REPLY. Prints how many waits ended in a nap and in a
 * yield, how often the other thread was yielded to, and the mean delay of a line in microseconds.
 */
#define _GNU_SOURCE
#include "base/minmax.h"
#include "coherence/coherence.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    SLICE_NS = 3 * 1000 * 1000, /* of a thread that is yielded to (Linux 6.18) */
    WAKE_NS = 5 * 1000,         /* from the end of a nap to its return */
    STEP_NS = 25                /* of the clock, a pause and a yield without effect */
};

static struct {
    uint64_t now_ns, period_ns, burst_ns;
    uint64_t due_ns;            /* work of the other thread that is not done yet */
    uint64_t next_ns;           /* the start of its next period */
    uint64_t naps, yields, runs;
} core;

static void core_pass(uint64_t ns)
{
    core.now_ns += ns;
    for (; core.now_ns >= core.next_ns; core.next_ns += core.period_ns)
        core.due_ns += core.burst_ns;
}

/* The other thread runs for at most this time. Returns how long it ran. */
static uint64_t core_run(uint64_t most_ns)
{
    uint64_t ns = bl_min(core.due_ns, most_ns);
    core.due_ns -= ns;
    return ns;
}

static uint64_t core_now_ns(void)
{
    core_pass(STEP_NS);
    return core.now_ns;
}

static void core_nap(uint64_t ns)
{
    if (ns > 0) {
        core.naps++;
        core_run(ns);
        core_pass(ns + WAKE_NS);
        return;
    }
    core.yields++;
    uint64_t ran_ns = core_run(SLICE_NS);
    core.runs += ran_ns > 0;
    core_pass(ran_ns + STEP_NS);
}

#define bl_now_ns(memory) ((void)(memory), core_now_ns())
#define bl_nap(memory, ns) ((void)(memory), core_nap(ns))
#define bl_pause(memory) ((void)(memory), core_pass(STEP_NS))
#include "coherence/wait.h"

int main(int count, char **words)
{
    if (count != 5)
        return 2;
    core.period_ns = strtoull(words[1], NULL, 10) * 1000;
    core.burst_ns = strtoull(words[2], NULL, 10) * 1000;
    uint64_t reply_ns = strtoull(words[3], NULL, 10) * 1000, waits = 0, delay_ns = 0;
    uint64_t end_ns = strtoull(words[4], NULL, 10) * 1000000000u, napped = 0, yielded = 0;
    bl_core known = {0, 0};
    while (core.now_ns < end_ns) {
        uint64_t naps = core.naps, yields = core.yields, arrives_ns = core.now_ns + reply_ns;
        bl_wait wait = bl_wait_make(NULL, UINT64_C(1000000000));
        wait.core = known; /* it outlives a wait, as in bl_session */
        while (core.now_ns < arrives_ns && bl_wait_turn(NULL, &wait))
            ;
        known = wait.core;
        waits++;
        delay_ns += core.now_ns - arrives_ns;
        napped += core.naps > naps;
        yielded += core.naps == naps && core.yields > yields;
    }
    printf("waits %llu napped %llu yielded %llu runs %llu delay_ns %llu\n",
           (unsigned long long)waits, (unsigned long long)napped, (unsigned long long)yielded,
           (unsigned long long)core.runs, (unsigned long long)(delay_ns / waits));
    return 0;
}
