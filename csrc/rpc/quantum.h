/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Whose turn it is, and how long a turn may be: fairness counted in work, not in time. Pure.
 *
 * Always true: between the moment at which a lane's oldest unanswered request is in memory and its
 * reply, every other lane has at most one turn, of at most one quantum. A lane that was served goes
 * behind all that were not, so who waits is before everybody who was served since it began to
 * wait. Whether it is seen at once does not matter: the round that misses it is the one turn of
 * the others.
 *
 * Leaves to the caller: what a request is, and to handlers, that one of them has at most
 * BL_CALL_KEYS_MAX keys.
 */
#ifndef BL_QUANTUM_H
#define BL_QUANTUM_H

#include <string.h>

#include "api/rpc.h"
#include "format/pool_format.h"


enum {
    BL_QUANTUM_REQUESTS = 64,
    BL_QUANTUM_KEYS = BL_CALL_KEYS_MAX,
    BL_QUANTUM_KEY_SIZE = 16            /* no item of a request is smaller */
};

/* Requests and keys: of a turn, of a quantum, or of all that a server has done. */
typedef struct bl_work {
    uint64_t requests;
    uint64_t keys;
} bl_work;

/* At least as many keys as the request has, as far as a handler accepts it; known before any of it
 * is done. What it says of itself is believed only so far: whatever it says, it has one. */
static inline uint64_t bl_quantum_keys(const bl_request *request)
{
    uint32_t size = request->size;
    if (request->flags & BL_MESSAGE_BULK)
        memcpy(&size, request->payload, sizeof size); /* bl_bulk.size */
    uint64_t keys = size > sizeof(bl_block_request)
                        ? (size - sizeof(bl_block_request)) / BL_QUANTUM_KEY_SIZE
                        : 0;
    keys = keys > 0 ? keys : 1;
    return keys < BL_QUANTUM_KEYS ? keys : BL_QUANTUM_KEYS;
}

/* Has a turn room for so many keys more, or must they wait for the lane's next one? */
static inline int bl_quantum_fits(const bl_work *turn, uint64_t keys)
{
    return turn->requests < BL_QUANTUM_REQUESTS && turn->keys + keys <= BL_QUANTUM_KEYS;
}

/* The greatest of each. */
static inline void bl_work_raise(bl_work *most, uint64_t requests, uint64_t keys)
{
    most->requests = requests > most->requests ? requests : most->requests;
    most->keys = keys > most->keys ? keys : most->keys;
}

/* The order of the next round: lanes that were not served, then those that were, each in the order
 * of this round. live holds kept_count of the former at its start. */
static inline void bl_quantum_order(uint32_t *live, uint32_t kept_count, const uint32_t *served,
                                 uint32_t served_count)
{
    memcpy(live + kept_count, served, served_count * sizeof *served);
}

#endif
