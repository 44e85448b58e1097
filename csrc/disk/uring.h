/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A ring of io_uring by its system calls: requests go in, and each comes out with its number. One
 * thread uses a ring at a time. Python's bindings do not serve here: they hold the interpreter's
 * lock while they wait, and take no aligned memory.
 */
#ifndef BL_URING_H
#define BL_URING_H

#include <stddef.h>
#include <stdint.h>

typedef struct bl_uring bl_uring;

typedef struct bl_uring_done {
    uint64_t number;
    int32_t result;             /* bytes, or -errno */
} bl_uring_done;

/* Create a ring for depth requests: 0, -ENOSYS or -EPERM (there is no io_uring here), -ENOMEM. */
int bl_uring_create(bl_uring **out, uint32_t depth);
void bl_uring_destroy(bl_uring *ring);

/* Put a read or write in; at most depth may be in at a time. It starts with bl_uring_enter. */
void bl_uring_push(bl_uring *ring, int file, int write, uint64_t offset, void *bytes, uint32_t size,
                   uint64_t number);

/* Start what was put in, and with wait, sleep until something is done: 0 or -errno. */
int bl_uring_enter(bl_uring *ring, int wait);

/* Take one that is done: 1, or 0. */
int bl_uring_reap(bl_uring *ring, bl_uring_done *done);

#endif
