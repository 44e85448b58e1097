/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The limit of a block's size. It is not part of the pool format: programs with different limits
 * can share a pool, and a block above a reader's limit is a miss.
 */
#ifndef BL_BLOCK_LIMIT_H
#define BL_BLOCK_LIMIT_H

enum bl_block_limit {
    BL_BLOCK_SIZE_MAX = 1 << 30 /* bytes in the pool: payload and checksums */
};

#endif
