/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What a router computes for every block of a prompt: its hashes, where it was sent lately, and
 * which workers have it in use. No pool and no clock; the caller has a lock, or one thread.
 */
#ifndef BL_ROUTING_H
#define BL_ROUTING_H

#include <stdint.h>

#include "api/prefix.h"

/* Return the XXH3-64 of some bytes, as the library xxHash defines it. */
uint64_t bl_xxh3(const void *data, uint64_t size, uint64_t seed);

/* Hash count windows of window bytes each, which begin stride bytes apart. */
void bl_hash_windows(const uint8_t *data, uint64_t stride, uint64_t window, uint64_t seed,
                     uint64_t *hashes, uint32_t count);

/* Chain hashes: the first stays, and each later one is hashed behind the result before it. */
void bl_hash_chain(const uint64_t *hashes, uint32_t count, uint64_t seed, uint64_t *chained);

/* ---- What was sent to workers lately: each block counts for a rank until ttl_s after the last
 * request with it. The tree, which the caller keeps, has these blocks. */

typedef struct bl_sent bl_sent;

/* Create the account of a tree's ranks: 0, -EINVAL or -ENOMEM. Beyond block_max entries (one for
 * each block and rank) those that would expire first are forgotten, until four fifths are left. */
int bl_sent_create(bl_sent **out, bl_prefix *tree, uint32_t rank_max, uint32_t block_max,
                   double ttl_s);
void bl_sent_destroy(bl_sent *sent);

/* Note that a prompt of these blocks was sent to a rank at time now. */
void bl_sent_add(bl_sent *sent, uint32_t rank, const uint64_t *locals, uint32_t count, double now);

/* Forget what has expired. */
void bl_sent_expire(bl_sent *sent, double now);

/* Forget all of a rank. */
void bl_sent_clear(bl_sent *sent, uint32_t rank);

/* Return how many entries there are. */
uint32_t bl_sent_count(const bl_sent *sent);

/* ---- The blocks that the requests under way of one worker hold, with how many hold each. A
 * request's blocks are hashes of their whole prefixes, so the set is closed under prefixes, and the
 * counts never grow along a request. */

typedef struct bl_active bl_active;

int bl_active_create(bl_active **out);
void bl_active_destroy(bl_active *active);

/* Return how many different blocks are held. */
uint32_t bl_active_count(const bl_active *active);

/* Return how many requests hold a block. */
uint32_t bl_active_holders(const bl_active *active, uint64_t block);

/* Add a request's blocks: 0 or -ENOMEM, with nothing done. */
int bl_active_add(bl_active *active, const uint64_t *blocks, uint32_t count);
void bl_active_remove(bl_active *active, const uint64_t *blocks, uint32_t count);

/* Return for each worker how many leading blocks of a request it holds, and how many of these the
 * request would hold alone, if alone[k] is the share of its time in which it holds one alone that k
 * others hold now. Blocks with more holders than alone has do not count. */
void bl_active_states(bl_active *const *workers, uint32_t worker_count, const uint64_t *blocks,
                      uint32_t count, const double *alone, uint32_t alone_count, uint32_t *held,
                      double *held_alone);

#endif
