/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The policy S3-FIFO (Yang et al., SOSP 2023) of index/evict.h. A new block enters a small queue of
 * a tenth of all blocks, so a block without a hit is evicted soon. A block that was hit moves to
 * the main queue, where each hit, up to 3, earns another round. The ghosts are hashes of keys that
 * were evicted from the small queue without a hit: if such a block is stored again, it enters the
 * main queue.
 *
 * A pinned block keeps its place in its queue; when its turn comes, it gets another round instead
 * of being evicted.
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
