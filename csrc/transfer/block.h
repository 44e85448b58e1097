/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Moving a block between scattered private memory and its one range in the pool: what every engine
 * does. No RPC, no table: whoever calls holds a grant or looks at the entry before and after.
 *
 * The fragments, end to end, are the block's payload: together length bytes. With a chunk_size, the
 * checksum vector has one CRC-32C per chunk_size bytes of payload, the last of what is left.
 * offset is a multiple of a line. In the pool nothing outside [offset, offset + length rounded up
 * to a line) is touched. -EINVAL if the arguments contradict each other or leave the pool.
 */
#ifndef BL_TRANSFER_H
#define BL_TRANSFER_H

#include "api/transfer.h"
#include "coherence/memory.h"
#include "iosched/toll.h"

enum bl_transfer_constant {
    BL_STAGE_SIZE = 4 << 10,    /* of small runs put together before they are streamed */
    BL_PARTS_PER_THREAD = 4     /* so that a slow one is waited for a quarter of its time */
};

/* Runs of private memory on their way into one range of the pool (transfer/gather.c). */
typedef struct bl_gather {
    const bl_memory *memory;
    uint64_t offset;            /* where the stage goes */
    uint32_t direct;            /* a run this long, a line at least, is streamed from its place */
    uint32_t staged;
    _Alignas(BL_LINE_SIZE) uint8_t stage[BL_STAGE_SIZE];
} bl_gather;

/* What was given, or the default; none at a time, which would have no end, is a line at a time. */
bl_copy_settings bl_copy_settings_of(const bl_copy_settings *given);

/* Do a plan's pieces lie in its chunks, tile them if they must, and all of it in the pool? */
int bl_plan_valid(const bl_memory *memory, const bl_plan *plan);

/* A plan (transfer/cpu.c): 0, -EINVAL: it is none, -EBADMSG: a read's checksum differs, -ENOMEM or
 * -BL_ERROR_DEVICE_FAULT. A write does not fence for this thread: one bl_fence_store covers a
 * batch. With a toll the bytes are paid for (-ECANCELED); one thread leaves it open. */
int bl_plan_execute(const bl_memory *memory, const bl_plan *plan,
                    const bl_copy_settings *settings, int write, bl_toll *toll);

/* Stream the fragments to the pool, the last line filled up with zeros, and fill in the vector. No
 * fence: one bl_fence_store covers a batch. No checksums if chunk_size is 0 or vector NULL. */
int bl_gather_write(const bl_memory *memory, uint64_t offset, const bl_fragment *fragments,
                    uint32_t count, uint64_t length, uint32_t chunk_size, uint32_t *vector,
                    const bl_copy_settings *settings, bl_toll *toll);

/* Drop what this host holds of the range, copy it to the fragments, and compare the copy (never
 * the pool's bytes, which may change under the reader) with the vector: -EBADMSG if they
 * differ. Nothing is compared if chunk_size is 0 or vector NULL. */
int bl_scatter_read(const bl_memory *memory, uint64_t offset, const bl_fragment *fragments,
                    uint32_t count, uint64_t length, uint32_t chunk_size, const uint32_t *vector,
                    const bl_copy_settings *settings, bl_toll *toll);

#endif
