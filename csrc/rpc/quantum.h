/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The server's fairness: whose turn it is, and how much one turn may do, counted in work and not in
 * time. It has no state and no clock.
 *
 * Always true: between the moment at which a lane's oldest unanswered request is in memory and its
 * reply, every other lane has at most one turn, of at most one quantum. A lane that was served goes
 * behind all that were not, so a lane that waits is before every lane that was served since it
 * began to wait. It need not be seen at once: the round that misses it is the one turn of the
 * others. Before that, a quiet lane (rpc/doorbell.h) waits for the next poll of its doorbell:
 * for less than BL_DOORBELL_REQUESTS calls and BL_DOORBELL_KEYS keys of the others.
 *
 * The caller decides what a request is, and handlers make sure that a request has at most
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

/* A number of requests and keys: of a turn, of a quantum, or of all that a server has done. */
typedef struct bl_work {
    uint64_t requests;
    uint64_t keys;
} bl_work;

/* Return an upper bound for the keys of a request, as far as a handler accepts it, before any of it
 * is handled. The size in the request is not trusted: a request counts as at least one key. */
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

/* Return 1 if a turn has room for this number of keys; 0 if they must wait for the lane's next
 * turn. */
static inline int bl_quantum_fits(const bl_work *turn, uint64_t keys)
{
    return turn->requests < BL_QUANTUM_REQUESTS && turn->keys + keys <= BL_QUANTUM_KEYS;
}

/* Raise each number of most to at least the given value. */
static inline void bl_work_raise(bl_work *most, uint64_t requests, uint64_t keys)
{
    most->requests = requests > most->requests ? requests : most->requests;
    most->keys = keys > most->keys ? keys : most->keys;
}

/* Make the order of the next round: lanes that were not served, then those that were, each group in
 * the order of this round. The first kept_count numbers of live are the former. */
static inline void bl_quantum_order(uint32_t *live, uint32_t kept_count, const uint32_t *served,
                                    uint32_t served_count)
{
    memcpy(live + kept_count, served, served_count * sizeof *served);
}

#endif
