/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Plans: the pieces, chunks and settings that every copy engine accepts. cffi reads this file, too;
 * beluga/transfer/plan/plan.py makes plans.
 */
#ifndef BL_API_TRANSFER_H
#define BL_API_TRANSFER_H

#include "api/iosched.h"
#include "api/pool.h"

/* A contiguous range of this process's private memory. */
typedef struct bl_fragment {
    uint64_t address;
    uint64_t size;
} bl_fragment;

/* Bytes that are contiguous on both sides: in one stripe of the pool, and in one chunk of one
 * block. */
typedef struct bl_piece {
    uint64_t address;           /* in the engine's memory: this process's, or a GPU's */
    uint64_t offset;            /* in the pool */
    uint32_t length;
    uint32_t chunk;             /* index of the chunk, counted in the whole plan */
} bl_piece;

/* A chunk is the range of the pool that one checksum covers; it may cross the end of a stripe. Its
 * pieces tile it in order; in a sparse read they only lie in it. */
typedef struct bl_chunk {
    uint64_t offset;            /* in the pool; a multiple of a line */
    uint32_t length;
    uint32_t first;             /* index of a piece, counted in the whole plan */
} bl_chunk;

/* A plan, or a range of its chunks with their pieces. */
typedef struct bl_plan {
    const bl_piece *pieces;     /* of chunks[0] first */
    const bl_chunk *chunks;
    uint32_t *checksums;        /* CRC-32C per chunk: a write fills them, a read compares them; or
                                 * NULL */
    uint32_t piece_count;
    uint32_t chunk_count;
    uint32_t piece_base;        /* index of the first piece and chunk in the whole plan */
    uint32_t chunk_base;
    uint32_t sparse;            /* 1: a chunk has bytes that no piece covers */
    uint32_t reserved;
} bl_plan;

/* Validate a plan for an engine that is not in C. Returns 0, or -EINVAL if a piece is not in its
 * chunk, a chunk is not in the pool, or the pieces of a dense plan do not tile its chunks. */
int bl_plan_check(const bl_pool *pool, const bl_plan *plan);

/* The CPU's cache maintenance for a device, before the device reads the pool or after it has
 * written (beluga/transfer/engines/policy.py). */
enum bl_maintenance {
    BL_MAINTENANCE_FENCE,       /* only order: the device bypasses the cache */
    BL_MAINTENANCE_INVALIDATE,  /* before a read, after the check of the entry */
    BL_MAINTENANCE_FLUSH        /* after the completion of a write, before the publication */
};

/* Maintain the cache lines that a device reads or writes by a plan. Returns 0, -EINVAL if the plan
 * is not within the pool, or -BL_ERROR_DEVICE_FAULT. */
int bl_plan_maintenance(const bl_pool *pool, const bl_plan *plan, uint32_t maintenance);

/* The CPU's copy settings, as measured on the machine (beluga/transfer/engines/cpu/tuning.py). All
 * fields but threads are bytes. They affect only the speed. */
typedef struct bl_copy_settings {
    uint32_t threads;           /* copying threads, including the caller's; 0 means 1 */
    uint32_t part;              /* the fewest bytes per thread: fewer do not pay off a wake-up */
    uint32_t window;            /* reading: bytes to invalidate per fence */
    uint32_t step;              /* reading: bytes to copy between invalidations of the next
                                 * window */
    uint32_t ahead;             /* reading: prefetch distance; 0: none */
    uint32_t past;              /* reading: dense plans of at least this size bypass the cache */
    uint32_t head;              /* writing: bytes of the next piece to prefetch */
    uint32_t direct;            /* writing: runs of at least this size are streamed directly */
} bl_copy_settings;

/* Fill in the settings of an uncalibrated machine, with one thread. */
void bl_copy_defaults(bl_copy_settings *settings);

/* Execute a plan on the CPU. Returns 0; -EINVAL if the plan is invalid for this pool (nothing is
 * copied then); -BL_ERROR_DEVICE_FAULT; or, for a read, -EBADMSG if bytes differ from the written
 * ones. After a write, the bytes are in the pool's memory before this thread's next streamed store.
 * settings NULL means the defaults. With an I/O queue, its link admits the bytes in this class; the
 * result is -ECANCELED once the queue is stopped. */
int bl_plan_write(const bl_pool *pool, const bl_plan *plan, const bl_copy_settings *settings,
                  bl_io_queue *io_queue, uint32_t transfer_class);
int bl_plan_read(const bl_pool *pool, const bl_plan *plan, const bl_copy_settings *settings,
                 bl_io_queue *io_queue, uint32_t transfer_class);

#endif
