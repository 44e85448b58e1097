/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * How large a block may be. It is no part of the bytes in a pool: programs with other limits share
 * one, and a reader that meets a larger block than it knows takes it for a miss.
 */
#ifndef BL_BLOCK_LIMIT_H
#define BL_BLOCK_LIMIT_H

enum bl_block_limit {
    BL_BLOCK_SIZE_MAX = 1 << 30 /* bytes in the pool: payload and checksums */
};

#endif
