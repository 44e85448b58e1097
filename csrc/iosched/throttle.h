/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The leave of a link, for a thread that copies by itself: it pays for bytes just before it moves
 * them, and what it has paid for lasts for a piece (256 KiB). So a copy stops wherever a piece
 * ends, in the midst of a fragment or a chunk too, with its sums and its place where they are.
 */
#ifndef BL_THROTTLE_H
#define BL_THROTTLE_H

#include <stddef.h>

#include "api/iosched.h"

/* Of one thread: in lines that no other one's is in. */
typedef struct bl_throttle {
    bl_io_queue *io_queue __attribute__((aligned(128)));    /* NULL: no link */
    bl_io_request request;      /* what is under way, if it is admitted: */
    uint64_t todo;              /* bytes of the copy that were not asked for yet */
    uint64_t left;              /* bytes that may be moved */
    uint64_t piece;             /* to ask for in one go */
    uint64_t since_ns;          /* since when it is */
    uint64_t owed;              /* bytes that were renewed for, and not accounted for yet */
    uint32_t owed_pieces;
    uint32_t device;            /* that what is under way lies on */
    uint8_t again;              /* it may be back for another part, after todo */
} bl_throttle;

enum { BL_THROTTLE_STEP = 64 << 10 };   /* what is paid for at a time of a long run */

/* For size bytes by one of so many threads. Nothing is asked for yet. */
bl_throttle bl_throttle_make(bl_io_queue *io_queue, int direction, uint32_t node, uint64_t size,
                             uint32_t threads);

/* The same for another thread, which is to take parts of it. */
bl_throttle bl_throttle_other(const bl_throttle *throttle);

/* A part of so many bytes is copied next, and maybe another one again. What is under way for the
 * last one may be renewed for it. */
void bl_throttle_begin(bl_throttle *throttle, uint64_t size, int again);

/* What was under way has been copied, or will not be. */
void bl_throttle_end(bl_throttle *throttle);

/* Wait for the next piece: 0, or -ECANCELED. offset: where in the pool its first byte lies. */
int bl_throttle_wait(bl_throttle *throttle, uint64_t offset, uint64_t size);

/* These bytes are moved next: 0, or -ECANCELED. */
static inline int bl_throttle_pay(bl_throttle *throttle, uint64_t offset, uint64_t size)
{
    if (throttle == NULL || throttle->io_queue == NULL)
        return 0;
    if (throttle->left < size) {
        int status = bl_throttle_wait(throttle, offset, size);
        if (status < 0)
            return status;
    }
    throttle->left -= size;
    return 0;
}

#endif
