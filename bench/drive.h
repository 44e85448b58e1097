/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The stopwatch: it runs an operation over a list of offsets and times it, in the same way for
 * Beluga's and the limit's operations. cffi reads this file, so it has only prototypes.
 */
#ifndef DRIVE_H
#define DRIVE_H

#include <stdint.h>

/* An operation such as limit_read or bl_pool_read. */
typedef int (*drive_operation)(const void *context, uint64_t offset, void *buffer, uint64_t size);

/* A call of a session, such as bl_session_call. */
typedef int (*drive_session_call)(void *session, const void *message, uint64_t timeout_ns);

typedef struct drive_session {
    drive_session_call call;
    void *session;
    const void *message;
    uint64_t timeout_ns;
} drive_session;

/* An operation whose context is a drive_session; it uses nothing else. */
int drive_call(const void *context, uint64_t offset, void *buffer, uint64_t size);

/* One direction of a device that is slower than this machine's memory: a link moves reads and
 * writes at the same time. All users of the direction share its token clock: operations queue for
 * its bandwidth, then each waits for its latency. */
typedef struct drive_pace {
    uint64_t free_ns;           /* time at which the device has moved all requested bytes */
    uint64_t latency_ns;
    uint64_t bytes_per_s;       /* never 0 */
} drive_pace;

/* Start an operation of size bytes at now_ns. Returns the time of its end. Any thread may call
 * this. */
uint64_t drive_pace_take(drive_pace *pace, uint64_t now_ns, uint64_t size);

typedef struct drive_plan {
    drive_operation operation;
    const void *context;
    void *buffer;               /* private memory of this thread */
    const uint64_t *offsets;    /* used in turn, repeatedly */
    drive_pace *const *paces;   /* the clock of the device under each offset, or NULL */
    uint64_t *samples_ns;       /* space for every operation, or NULL */
    uint64_t offset_count;
    uint64_t size;
    uint64_t count;             /* the most operations */
    uint64_t start_ns;          /* the start time, so that threads start together */
    uint64_t duration_ns;       /* only the first operation may start later; 0: no limit */
    uint64_t period_ns;         /* between the starts of operations; 0: no pause */
    uint32_t overlaps;          /* not 0: no operation waits for the device to end the one before */
    uint32_t stopped;           /* not 0: drive_stop was called, no further operation starts */
    uint64_t done;              /* out: operations */
    uint64_t elapsed_ns;        /* out: from the first start to the last end */
} drive_plan;

/* Run the plan. Returns 0, or the first error of an operation. */
int drive_run(drive_plan *plan);

/* End drive_run of this plan after the operation in progress. A run that has not started does
 * nothing. Any thread may call this. */
void drive_stop(drive_plan *plan);

/* The clock of start_ns. */
uint64_t drive_now_ns(void);

#endif
