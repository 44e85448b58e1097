/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The router's computations per block of a prompt (its hashes, the ranks it was recently sent to,
 * the workers that use it) and per worker (its load, and the cost of a request there). They use no
 * pool and no clock; the caller serializes calls. The Python half is in beluga/router and
 * beluga/router/policies.
 */
#ifndef BL_ROUTING_H
#define BL_ROUTING_H

#include <stdint.h>

#include "api/prefix.h"

/* Return the XXH3-64 of some bytes, as defined by the library xxHash. */
uint64_t bl_xxh3(const void *data, uint64_t size, uint64_t seed);

/* Hash count windows of window bytes each, which begin stride bytes apart. */
void bl_hash_windows(const uint8_t *data, uint64_t stride, uint64_t window, uint64_t seed,
                     uint64_t *hashes, uint32_t count);

/* Chain hashes: the first is unchanged, and each later one is hashed together with the result
 * before it. */
void bl_hash_chain(const uint64_t *hashes, uint32_t count, uint64_t seed, uint64_t *chained);

/* ---- The blocks that were recently sent to workers: each counts for a rank until ttl_s after the
 * last request with it. They are stored in the caller's tree. */

typedef struct bl_sent bl_sent;

/* Create the records for a tree's ranks. Beyond block_max entries (one for each block and rank)
 * those that would expire first are removed, until four fifths remain. Returns 0, -EINVAL or
 * -ENOMEM. */
int bl_sent_create(bl_sent **out, bl_prefix *tree, uint32_t rank_max, uint32_t block_max,
                   double ttl_s);
void bl_sent_destroy(bl_sent *sent);

/* Record that a prompt of these blocks was sent to a rank at time now. */
void bl_sent_add(bl_sent *sent, uint32_t rank, const uint64_t *locals, uint32_t count, double now);

/* Remove expired entries. */
void bl_sent_expire(bl_sent *sent, double now);

/* Remove all entries of a rank. */
void bl_sent_clear(bl_sent *sent, uint32_t rank);

/* Return how many entries there are. */
uint32_t bl_sent_count(const bl_sent *sent);

/* ---- The blocks that the running requests of one worker hold, with a count of holders each. A
 * block is the hash of its whole prefix, so the set is closed under prefixes, and counts never
 * increase along a request. */

typedef struct bl_active bl_active;

int bl_active_create(bl_active **out);
void bl_active_destroy(bl_active *active);

/* Return how many different blocks are held. */
uint32_t bl_active_count(const bl_active *active);

/* Return how many requests hold a block. */
uint32_t bl_active_holders(const bl_active *active, uint64_t block);

/* Add a request's blocks. Returns 0, or -ENOMEM with nothing done. */
int bl_active_add(bl_active *active, const uint64_t *blocks, uint32_t count);
void bl_active_remove(bl_active *active, const uint64_t *blocks, uint32_t count);

/* ---- The workers' figures for policies, documented in beluga/router/worker.py. Every field has
 * eight bytes, so an array of these structs is also a numpy table. */

typedef struct bl_load {
    int64_t request_active_slots;       /* published by the worker */
    int64_t request_total_slots;
    int64_t kv_active_blocks;
    int64_t kv_total_blocks;
    int64_t num_requests_waiting;
    double gpu_cache_usage_perc;
    double gpu_prefix_cache_hit_rate;
    int64_t active_requests;            /* counted by the router */
    int64_t active_prefill_tokens;
    double prefill_s;
    int64_t active_decode_blocks;
    int64_t outstanding_tokens;
} bl_load;

typedef struct bl_candidate {
    bl_load load;
    int64_t device;             /* leading blocks of the request by tier, beyond those before it */
    int64_t host;
    int64_t disk;
    int64_t shared;
    int64_t new_blocks;
    double held_alone;
    double taint_weight;
} bl_candidate;

/* The prompts that a worker has not prefilled yet, in the order of their requests. */
typedef struct bl_prefills {
    int64_t count;
    int64_t unpredicted;        /* prompts without a duration */
    int64_t tokens;
    double seconds;             /* of all durations */
    int64_t oldest_tokens;      /* of the prompt that was sent first */
    int64_t oldest_predicted;
    double oldest_s;
    double oldest_since;        /* when it could begin */
} bl_prefills;

/* Return the expected remaining tokens at time now, and the seconds until all are prefilled. */
int64_t bl_prefills_tokens(const bl_prefills *prefills, double now);
double bl_prefills_seconds(const bl_prefills *prefills, double now);

/* Write both into the loads of count workers. */
void bl_loads_refresh(bl_load *const *loads, bl_prefills *const *prefills, uint32_t count,
                      double now);

/* Fill in a row for each worker: its load, how many blocks of a request would be new there, and how
 * many of the others the request would hold alone. alone[k] is the fraction of its time in which
 * the request is the only holder of a block that k others hold now; blocks with more holders than
 * alone has elements do not count. Without active every block is new. */
void bl_candidates_fill(const bl_load *const *loads, bl_active *const *active,
                        uint32_t worker_count, const uint64_t *blocks, uint32_t count,
                        const double *alone, uint32_t alone_count, bl_candidate *rows);

/* ---- The cost of a request on each worker, in seconds. beluga/router/costs.py and
 * beluga/router/policies/timed.py explain the terms; the results are bit-identical. */

typedef struct bl_costs {
    double a, b, c, e, f, g, h; /* milliseconds (beluga/router/costs.py) */
    double bytes_per_s;         /* from the pool, and from a worker's own memory */
    double host_bytes_per_s;
    int64_t step_tokens;
    int64_t block_tokens;
    int64_t block_bytes;
} bl_costs;

typedef struct bl_estimate {
    double queue_s;
    double prefill_s;
    double transfer_s;
    double between_tokens_s;
} bl_estimate;

/* Estimate the times of a request of input_tokens on each worker. With fetched, a worker copies
 * this many blocks beyond its hits. */
void bl_estimates(const bl_costs *costs, int64_t input_tokens, const bl_candidate *rows,
                  const int64_t *fetched, uint32_t count, bl_estimate *estimates);

/* The inputs of a request's cost that are the same for all workers. */
typedef struct bl_pressure {
    int64_t tail;               /* blocks of the prompt that have no hash */
    int64_t device_blocks;      /* assumed for a worker that does not publish its number */
    int64_t ended;              /* requests that change_sum covers, and one more */
    double answer_s;
    double reuse;
    double typical_square;
    double change_sum;
} bl_pressure;

/* Compute the costs of a request on each worker. */
void bl_least_costs(const bl_pressure *pressure, const bl_candidate *rows,
                    const bl_estimate *estimates, uint32_t count, double *costs);

#endif
