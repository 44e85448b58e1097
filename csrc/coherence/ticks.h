/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The processor's own counter of time, which costs a tenth of what a clock of the kernel costs. Its
 * rate is not known here: a reader of ticks compares them with two readings of a clock. Only
 * figures for people are made of it; the protocol uses bl_now_ns(). Other processors than x86 have
 * the kernel's clock.
 */
#ifndef BL_TICKS_H
#define BL_TICKS_H

#include <stdint.h>
#include <time.h>

static inline uint64_t bl_ticks(void)
{
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
#endif
}

#endif
