/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * An io_uring by its system calls: each request completes with its number. One thread uses a ring
 * at a time. Python's bindings are not usable here: they hold the interpreter's lock while they
 * wait, and do not accept aligned memory.
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

/* Create a ring for depth requests. Returns 0, -ENOSYS or -EPERM (io_uring is not available), or
 * -ENOMEM. */
int bl_uring_create(bl_uring **out, uint32_t depth);
void bl_uring_destroy(bl_uring *ring);

/* Queue a read or write; at most depth may be in the ring at a time. bl_uring_enter() submits
 * it. */
void bl_uring_push(bl_uring *ring, int file, int write, uint64_t offset, void *bytes, uint32_t size,
                   uint64_t number);

/* Submit what was queued; with wait, sleep until a request is complete. Returns 0 or -errno. */
int bl_uring_enter(bl_uring *ring, int wait);

/* Take a completion. Returns 0 if there is none. */
int bl_uring_reap(bl_uring *ring, bl_uring_done *done);

#endif
