/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Admits the bytes of a copying thread to a link. The thread acquires tokens just before it moves
 * the bytes, one piece (at most 256 KiB) at a time. So a copy may pause at the end of any piece,
 * even inside a fragment or a chunk; it keeps its checksums and its position.
 */
#ifndef BL_THROTTLE_H
#define BL_THROTTLE_H

#include <stddef.h>

#include "api/iosched.h"

/* Each thread has its own throttle, in cache lines of its own. */
typedef struct bl_throttle {
    bl_io_queue *io_queue __attribute__((aligned(128)));    /* NULL: no link */
    bl_io_request request;      /* the piece in flight, if it is admitted */
    uint64_t todo;              /* bytes of the copy not requested yet */
    uint64_t left;              /* admitted bytes not moved yet */
    uint64_t piece;             /* bytes per request */
    uint64_t since_ns;          /* when the request was admitted */
    uint64_t owed;              /* renewed bytes that are not accounted for yet */
    uint32_t owed_pieces;
    uint32_t device;            /* the device of the piece in flight */
    uint8_t again;              /* another part may follow after todo */
} bl_throttle;

enum { BL_THROTTLE_STEP = 64 << 10 };   /* bytes of a long run to admit at once */

/* Return a throttle for size bytes, copied by one of this many threads. It requests nothing yet. */
bl_throttle bl_throttle_make(bl_io_queue *io_queue, int direction, uint32_t node, uint64_t size,
                             uint32_t threads);

/* Return a throttle for another thread of the same copy. */
bl_throttle bl_throttle_other(const bl_throttle *throttle);

/* Begin a part of this many bytes; again: another part may follow. The piece of the last part may
 * be renewed for this one. */
void bl_throttle_begin(bl_throttle *throttle, uint64_t size, int again);

/* End the piece in flight: its bytes were copied, or will not be. */
void bl_throttle_end(bl_throttle *throttle);

/* Wait for the next piece. Returns 0 or -ECANCELED. The first byte lies at offset in the pool. */
int bl_throttle_wait(bl_throttle *throttle, uint64_t offset, uint64_t size);

/* Wait until the next size bytes are admitted. Returns 0 or -ECANCELED. */
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
