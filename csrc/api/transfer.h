/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Plans: the pieces, chunks and settings that every copy engine takes. cffi reads it too;
 * beluga/transfer/plan/plan.py makes plans.
 */
#ifndef BL_API_TRANSFER_H
#define BL_API_TRANSFER_H

#include "api/iosched.h"
#include "api/pool.h"

/* A run of private memory of this process. */
typedef struct bl_fragment {
    uint64_t address;
    uint64_t size;
} bl_fragment;

/* Bytes that lie in one run on both sides: in one stripe of the pool, in one chunk of one block. */
typedef struct bl_piece {
    uint64_t address;           /* in the engine's memory: this process's, or a GPU's */
    uint64_t offset;            /* in the pool */
    uint32_t length;
    uint32_t chunk;             /* the plan's, counted from the whole plan's first */
} bl_piece;

/* A chunk is what one checksum covers: a run of the pool, perhaps over the end of a stripe. Its
 * pieces tile it in order; those of a sparse read lie in it. */
typedef struct bl_chunk {
    uint64_t offset;            /* in the pool; a multiple of a line */
    uint32_t length;
    uint32_t first;             /* piece, counted from the whole plan's first */
} bl_chunk;

/* A plan, or a run of its chunks with their pieces. */
typedef struct bl_plan {
    const bl_piece *pieces;     /* of chunks[0] first */
    const bl_chunk *chunks;
    uint32_t *checksums;        /* CRC-32C per chunk: a write fills, a read compares; or NULL */
    uint32_t piece_count;
    uint32_t chunk_count;
    uint32_t piece_base;        /* what the first of pieces and chunks counts as */
    uint32_t chunk_base;
    uint32_t sparse;            /* 1: a chunk has bytes that no piece asks for */
    uint32_t reserved;
} bl_plan;

/* For an engine that is not in C: 0, or -EINVAL: its pieces are not of its chunks, or these not in
 * the pool, or a dense plan's pieces do not tile them. */
int bl_plan_check(const bl_pool *pool, const bl_plan *plan);

/* The cache maintenance of the CPU for a device, before the device reads the pool or after it has
 * written (beluga/transfer/engines/policy.py). */
enum bl_maintenance {
    BL_MAINTENANCE_FENCE,       /* orders only: the device's bytes pass no cache */
    BL_MAINTENANCE_INVALIDATE,  /* before a read, after the look at the entry */
    BL_MAINTENANCE_FLUSH        /* after a write, its completion seen, before the publication */
};

/* For all that a plan makes a device read or write: 0, -EINVAL if that leaves the pool, or
 * -BL_ERROR_DEVICE_FAULT. */
int bl_plan_maintenance(const bl_pool *pool, const bl_plan *plan, uint32_t maintenance);

/* How the CPU copies, in bytes but for threads: measured on the machine
 * (beluga/transfer/engines/cpu/tuning.py). Any numbers give the same bytes and checksums. */
typedef struct bl_copy_settings {
    uint32_t threads;           /* that copy, the caller's among them; 0 is 1 */
    uint32_t part;              /* of a thread at least: less is not worth waking anybody */
    uint32_t window;            /* reading: lines are dropped, and fenced, so many at a time */
    uint32_t step;              /* reading: copied between two drops of the next window's lines */
    uint32_t ahead;             /* reading: asked for so far ahead of what is copied; 0: nothing */
    uint32_t past;              /* reading: a dense plan of so many goes past the cache */
    uint32_t head;              /* writing: asked for of the next piece, while this one goes out */
    uint32_t direct;            /* writing: a run this long is streamed from where it lies */
} bl_copy_settings;

/* Those of a machine that was not measured; one thread. */
void bl_copy_defaults(bl_copy_settings *settings);

/* Execute a plan by the CPU: 0, or -EINVAL: it is no plan of this pool, and nothing has moved;
 * -BL_ERROR_DEVICE_FAULT; of a read -EBADMSG: bytes are not those that were written. After a write
 * all is in the pool's memory, ahead of what this thread streams next. settings: NULL is the
 * default. With an I/O queue, bytes move as its link lets them on, in this class; -ECANCELED once
 * it is stopped. */
int bl_plan_write(const bl_pool *pool, const bl_plan *plan, const bl_copy_settings *settings,
                  bl_io_queue *io_queue, uint32_t transfer_class);
int bl_plan_read(const bl_pool *pool, const bl_plan *plan, const bl_copy_settings *settings,
                 bl_io_queue *io_queue, uint32_t transfer_class);

#endif
