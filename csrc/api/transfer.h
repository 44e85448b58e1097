/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Plans: the pieces, chunks and settings that every copy engine accepts. cffi reads this file, too;
 * beluga/transfer/plan.py makes plans.
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

/* A copy engine for callers in C. start begins the copy of a valid plan, or of a range of its
 * chunks; the arrays stay as they are until wait has returned. After an error of start, except
 * -EINPROGRESS, nothing of the copy is in progress. wait is called once for each started copy,
 * which is not NULL, in order. Both return 0 or a negative error: -EBADMSG if a read has other
 * checksums, -EINPROGRESS if a device may still write to the memory of the plan, and read the
 * plan's arrays. */
typedef int (*bl_engine_start)(void *context, const bl_plan *plan, int write, void **copy);
typedef int (*bl_engine_wait)(void *context, void *copy);

typedef struct bl_engine {
    void *context;
    bl_engine_start start;
    bl_engine_wait wait;
    uint64_t piece_size[2];     /* of a read and a write: bytes that a link admits at once */
} bl_engine;

/* Some bytes of a block's payload, and where a read puts them. */
typedef struct bl_row {
    uint64_t address;
    uint64_t place;             /* in the payload */
    uint64_t size;
    uint64_t block;             /* index of the block */
} bl_row;

/* Bytes that are contiguous on both sides, at addresses of a device that copies by itself: a part
 * of a piece. */
typedef struct bl_span {
    uint64_t pool;
    uint64_t engine;            /* 0: the bytes are only read, for their checksum */
    uint32_t length;            /* 0: a further target of a span before it */
    uint32_t power;             /* x^(8n) mod the polynomial of CRC-32C; n bytes of the chunk
                                 * follow */
    uint32_t extra;             /* write: zeros to write after it, to the end of the line;
                                 * read: how many spans after it are further targets */
    uint32_t chunk;             /* index of the chunk, counted in the whole plan */
} bl_span;

/* The addresses at which a device reaches the pool: each memory device of the pool is registered in
 * windows of 2^window_shift bytes. */
typedef struct bl_windows {
    const bl_pool *pool;
    const uint64_t *bases;      /* [memory device][window]; 0: the device does not reach it */
    uint32_t window_count;      /* of each memory device */
    uint32_t window_shift;
} bl_windows;

enum bl_span_limit {
    BL_SPAN_SIZE = 16 << 10,    /* bytes; longer pieces are cut into equal parts, in whole lines */
    BL_SPAN_WORD = 16,          /* bytes of a lane's word */
    BL_SPAN_TABLE_WORDS = 2 * 4 * 256 + 2 * 32
};

/* Set touched[memory device][window] to 1 for each window with bytes that a device reads or writes
 * for a valid plan: with checksums, all bytes of the chunks. Returns 0, or -EINVAL if a piece lies
 * in two stripes. */
int bl_spans_touch(const bl_windows *windows, const bl_plan *plan, uint8_t *touched);

/* Set reached to 0 for each chunk of a valid plan with bytes in a missing window, else to 1. */
void bl_spans_reach(const bl_windows *windows, const bl_plan *plan, const uint8_t *missing,
                    uint8_t *reached);

/* The runs of a sparse plan's chunks, which are read once for their checksum and all their targets:
 * the pieces of a run differ only in their addresses, and one without an address covers bytes that
 * no row requests. */
typedef struct bl_row_runs {
    bl_piece *pieces;
    int64_t *shared;            /* the number of further pieces of the run; -1 for these */
    uint32_t count;
    uint32_t room;
} bl_row_runs;

/* Cut the chunks of a valid plan where rows and stripes begin and end. A row that overlaps others
 * has a piece in each of its runs. Returns 0 or -ENOMEM. The runs, initially zero, may be used
 * again; bl_row_runs_free frees them. */
int bl_row_runs_make(const bl_plan *plan, bl_row_runs *runs);
void bl_row_runs_free(bl_row_runs *runs);

/* Cut the pieces of a valid plan into spans. spans has room for piece_count plus one for each
 * BL_SPAN_SIZE bytes. bounced: NULL, or for each chunk the device's address of a buffer with its
 * bytes, 0 for those in the pool. shared: NULL, or that of bl_row_runs. Returns the number of
 * spans, or -EFAULT if the device does not reach a piece. */
int64_t bl_spans_make(const bl_windows *windows, const bl_plan *plan, const uint64_t *bounced,
                      const int64_t *shared, int write, bl_span *spans);

/* Fill in the BL_SPAN_TABLE_WORDS words by which groups of lanes compute checksums
 * (cuda/crc32c.cuh). */
void bl_spans_tables(uint32_t lanes, uint32_t *words);

/* Combine what the device computed for each span to the checksums of the plan's chunks. spans are
 * those of these chunks. A write stores the checksums in the plan and returns 0; a read returns the
 * number of chunks whose checksum differs. */
int64_t bl_spans_sum(const bl_span *spans, const uint32_t *sums, uint64_t count,
                     const bl_plan *plan, int write);

/* Plan whole blocks, of block_count x fragment_count addresses; the fragments of a block have these
 * sizes, and a block's chunks have chunk_size bytes, except for the last one. Pieces are cut where
 * fragments, chunks and stripes end. pieces has room for fragment_count pieces of each block, plus
 * one for each of its chunks and each stripe in which it lies. Returns the number of pieces. */
uint64_t bl_plan_blocks(const uint64_t *addresses, const uint64_t *sizes, const uint64_t *offsets,
                        uint32_t block_count, uint32_t fragment_count, uint64_t chunk_size,
                        bl_piece *pieces, bl_chunk *chunks);

/* Return the number of pieces of a plan of rows. */
uint64_t bl_plan_rows_count(const bl_row *rows, uint64_t row_count, const uint64_t *offsets,
                            uint64_t chunk_size);

/* Plan the reading of rows, in any order, of blocks of length bytes at these offsets. Chunks have
 * chunk_size bytes, except for the last one of a block; the plan has those that contain bytes of
 * rows. Rows are cut where chunks and stripes end. checksums, if not NULL, has those of each
 * block; sums gets those of the plan's chunks. pieces, chunks and sums have room for
 * bl_plan_rows_count(). Returns the number of chunks, or -ENOMEM. */
int64_t bl_plan_rows(const bl_row *rows, uint64_t row_count, const uint64_t *offsets,
                     uint64_t length, uint64_t chunk_size, const uint32_t *checksums,
                     bl_piece *pieces, bl_chunk *chunks, uint32_t *sums);

/* Returns 1 if no piece and no chunk of a plan ends beyond size bytes of the pool. */
int bl_plan_within(const bl_plan *plan, uint64_t size);

/* Validate a plan for an engine that is not in C. Returns 0, or -EINVAL if a piece is not in its
 * chunk, a chunk is not in the pool, or the pieces of a dense plan do not tile its chunks. */
int bl_plan_check(const bl_pool *pool, const bl_plan *plan);

/* The CPU's cache maintenance for a device, before the device reads the pool or after it has
 * written (beluga/transfer/policy.py). */
enum bl_maintenance {
    BL_MAINTENANCE_FENCE,       /* only order: the device bypasses the cache */
    BL_MAINTENANCE_INVALIDATE,  /* before a read, after the check of the entry */
    BL_MAINTENANCE_FLUSH        /* after the completion of a write, before the publication */
};

/* Maintain the cache lines that a device reads or writes by a plan, on at most threads threads.
 * Returns 0, -EINVAL if the plan is not within the pool, or -BL_ERROR_DEVICE_FAULT. */
int bl_plan_maintenance(const bl_pool *pool, const bl_plan *plan, uint32_t maintenance,
                        uint32_t threads);

/* The CPU's copy settings. All fields but threads are bytes. They affect only the speed. */
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

/* Fill in the defaults for memory of software coherence or of hardware coherence (0), with one
 * thread. */
void bl_copy_defaults(bl_copy_settings *settings, int software);

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
