/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Copies a block between scattered private memory and its range in the pool. It makes no RPC and
 * reads no table: the caller holds a grant, or checks the entry before and after.
 *
 * The fragments, end to end, are the block's payload of length bytes. If chunk_size is not 0,
 * checksums has one CRC-32C per chunk_size bytes of payload; the last one covers the rest. offset
 * is a multiple of a line. In the pool, only [offset, offset + length rounded up to a line) is
 * touched. The functions return -EINVAL if the arguments contradict each other or leave the pool.
 */
#ifndef BL_BLOCK_H
#define BL_BLOCK_H

#include "transfer/cpu.h"

/* Stream the fragments to the pool, pad the last line with zeros, and fill in the checksums. This
 * does not fence: one bl_fence_store covers a batch. No checksums are computed if chunk_size is 0
 * or checksums is NULL. */
int bl_gather_write(const bl_memory *memory, uint64_t offset, const bl_fragment *fragments,
                    uint32_t count, uint64_t length, uint32_t chunk_size, uint32_t *checksums,
                    const bl_copy_settings *settings, bl_throttle *throttle);

/* Invalidate the range in this host's cache, copy it to the fragments, and check the checksums of
 * the copy (not of the pool's bytes, which may change meanwhile). Returns -EBADMSG if they differ.
 * Nothing is compared if chunk_size is 0 or checksums is NULL. */
int bl_scatter_read(const bl_memory *memory, uint64_t offset, const bl_fragment *fragments,
                    uint32_t count, uint64_t length, uint32_t chunk_size, const uint32_t *checksums,
                    const bl_copy_settings *settings, bl_throttle *throttle);

#endif
