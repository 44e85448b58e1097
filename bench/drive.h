/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The stopwatch: runs an operation over a list of offsets and times it, Beluga's and the limit's
 * alike. Prototypes only, read by cffi as they stand.
 */
#ifndef DRIVE_H
#define DRIVE_H

#include <stdint.h>

/* limit_read and its like, or bl_pool_read. */
typedef int (*drive_operation)(const void *context, uint64_t offset, void *buffer, uint64_t size);

/* A device that is slower than this machine's memory, by a token clock that all its users share:
 * operations queue for its bandwidth, then each waits out its latency. */
typedef struct drive_pace {
    uint64_t free_ns;           /* when the device has moved all bytes asked of it so far */
    uint64_t latency_ns;
    uint64_t bytes_per_s;       /* never 0 */
} drive_pace;

/* An operation of size bytes begins at now_ns: when it is done. Any number of threads. */
uint64_t drive_pace_take(drive_pace *pace, uint64_t now_ns, uint64_t size);

typedef struct drive_plan {
    drive_operation operation;
    const void *context;
    void *buffer;               /* private memory of this thread */
    const uint64_t *offsets;    /* taken in turn, again and again */
    drive_pace *const *paces;   /* the device under each offset, or NULL */
    uint64_t *samples_ns;       /* room for as many operations as are done, or NULL */
    uint64_t offset_count;
    uint64_t size;
    uint64_t count;             /* of operations, at most */
    uint64_t start_ns;          /* not before: so that threads start together */
    uint64_t duration_ns;       /* no operation but the first is begun later; 0: no such time */
    uint64_t period_ns;         /* between the starts of operations: a fixed rate; 0: at once */
    uint64_t done;              /* out: operations */
    uint64_t elapsed_ns;        /* out: from the first start to the last end */
} drive_plan;

/* 0, or the first error of an operation. */
int drive_run(drive_plan *plan);

/* The clock that start_ns and stop_ns are of. */
uint64_t drive_now_ns(void);

#endif
