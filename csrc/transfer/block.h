/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Moving a block between scattered private memory and its one range in the pool: what every engine
 * does. No RPC, no table: whoever calls holds a grant or looks at the entry before and after.
 *
 * The fragments, end to end, are the block's payload: together length bytes. With a chunk_size, the
 * checksums has one CRC-32C per chunk_size bytes of payload, the last of what is left.
 * offset is a multiple of a line. In the pool nothing outside [offset, offset + length rounded up
 * to a line) is touched. -EINVAL if the arguments contradict each other or leave the pool.
 */
#ifndef BL_BLOCK_H
#define BL_BLOCK_H

#include "transfer/cpu.h"

/* Stream the fragments to the pool, the last line filled up with zeros, and fill in the vector. No
 * fence: one bl_fence_store covers a batch. No checksums if chunk_size is 0 or vector NULL. */
int bl_gather_write(const bl_memory *memory, uint64_t offset, const bl_fragment *fragments,
                    uint32_t count, uint64_t length, uint32_t chunk_size, uint32_t *checksums,
                    const bl_copy_settings *settings, bl_throttle *throttle);

/* Drop what this host holds of the range, copy it to the fragments, and compare the copy (never
 * the pool's bytes, which may change under the reader) with the vector: -EBADMSG if they
 * differ. Nothing is compared if chunk_size is 0 or vector NULL. */
int bl_scatter_read(const bl_memory *memory, uint64_t offset, const bl_fragment *fragments,
                    uint32_t count, uint64_t length, uint32_t chunk_size, const uint32_t *checksums,
                    const bl_copy_settings *settings, bl_throttle *throttle);

#endif
