/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The policy S3-FIFO (Yang et al., SOSP 2023) of index/evict.h: a new block enters a small queue of
 * a tenth of all blocks, so blocks that nobody asks for again leave soon. A block that was hit
 * there moves to the main queue, where each hit, up to 3, gives it another round. The ghosts are
 * hashes of keys that left the small queue without a hit: when such a block comes back, it enters
 * the main queue.
 *
 * A block that is pinned keeps its place in its queue. It is not evicted from there: when its turn
 * comes, it gets another round.
 */
#ifndef BL_S3FIFO_H
#define BL_S3FIFO_H

#include <stdint.h>

typedef struct bl_s3fifo bl_s3fifo;

int bl_s3fifo_create(bl_s3fifo **out, uint32_t id_count);
void bl_s3fifo_destroy(bl_s3fifo *order);

/* See the functions of the same names in index/evict.h. */
void bl_s3fifo_assign(bl_s3fifo *order, uint32_t id, uint64_t hash);
void bl_s3fifo_touch(bl_s3fifo *order, uint32_t id);
void bl_s3fifo_cool(bl_s3fifo *order, uint32_t id);
void bl_s3fifo_remove(bl_s3fifo *order, uint32_t id);
void bl_s3fifo_forget(bl_s3fifo *order, uint32_t id);
int bl_s3fifo_has(const bl_s3fifo *order, uint32_t id);
int64_t bl_s3fifo_coldest(bl_s3fifo *order);
int64_t bl_s3fifo_warmer(const bl_s3fifo *order, uint32_t id);

#endif
