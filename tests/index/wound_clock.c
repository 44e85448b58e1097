/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A monotonic clock that a test winds forward; it is loaded before the C library.
 */
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static long ahead_s;

void wind(long seconds) { __atomic_fetch_add(&ahead_s, seconds, __ATOMIC_SEQ_CST); }

int clock_gettime(clockid_t clock, struct timespec *out)
{
    int status = (int)syscall(SYS_clock_gettime, clock, out);
    if (status == 0 && clock == CLOCK_MONOTONIC)
        out->tv_sec += __atomic_load_n(&ahead_s, __ATOMIC_SEQ_CST);
    return status;
}
