/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The state of the DSA engine: how it cuts plans into works and groups. A *work* is a chunk with a
 * checksum, or else a piece of the plan. It goes through steps of one or more descriptors: a
 * checksum is chained through the seed of the next descriptor, and after a page fault the rest is
 * submitted again. So a work has at most one descriptor in flight.
 *
 * A *group* has up to BL_DSA_WIDTH works. It submits their next descriptors together, as a batch if
 * there are several. When all of these are complete, finished works are replaced by new ones.
 * Several groups are in flight at once. The descriptors of a group belong to different works and
 * need no order: there is no fence, and the device may reorder them.
 *
 * Pieces may begin and end within a line. The device is coherent with its host's caches, so parts
 * of a line may be written in any order. After a block's works are done and the rest of its last
 * line is zeroed, every byte of its lines has been written.
 */
#ifndef BL_DSA_GROUP_H
#define BL_DSA_GROUP_H

#include "dsa/queue.h"
#include "coherence/memory.h"

enum bl_dsa_engine_constant {
    BL_DSA_WIDTH = 16,
    BL_DSA_GROUPS_BATCHED = 8,
    BL_DSA_GROUPS_SINGLE = 64,
    BL_DSA_BOUNCE_MAX = 8 << 20,        /* bytes of bounce buffers; one work may exceed it */
    BL_DSA_STALLS_MAX = 8,              /* completions without progress of the work */
    BL_DSA_FULL_MAX = 24,               /* submissions to a full queue, then the CPU executes */
    BL_DSA_BACKOFF_NS = 500,            /* pause after the first of them; doubled after each */
    BL_DSA_BACKOFF_MAX_NS = 1000 * 1000,
    BL_DSA_MONITOR_CYCLES = 100 * 1000,
    BL_DSA_CLOSE_S = 5
};

/* The steps of a work, in this order; most works need only a few of them. */
enum bl_dsa_step {
    BL_DSA_STEP_DROP,           /* the device drops the cached lines of the range */
    BL_DSA_STEP_COPY,           /* piece by piece */
    BL_DSA_STEP_BOUNCE,         /* the whole range is read for its checksum, although only some
                                 * bytes are copied */
    BL_DSA_STEP_BLANK,          /* zeros to the end of the last line */
    BL_DSA_STEP_FLUSH,          /* the device flushes the range */
    BL_DSA_STEP_END
};

typedef struct bl_dsa_work {
    bl_dsa_transfer *transfer;  /* NULL: the entry is free */
    uint8_t *bounce;
    uint64_t offset;            /* the range in the pool */
    uint32_t length;
    uint32_t chunk;             /* index of the chunk */
    uint32_t piece;             /* index of the piece that is being copied */
    uint32_t piece_end;
    uint32_t step;
    uint32_t done;              /* completed bytes of that piece; in other steps, of the range */
    uint32_t crc;               /* CRC of the bytes copied so far */
    uint32_t submitted;         /* bytes of the descriptor in flight */
    uint32_t stalls;
} bl_dsa_work;

enum bl_dsa_group_state {
    BL_DSA_IDLE,
    BL_DSA_PREPARED,             /* the descriptors are not submitted yet */
    BL_DSA_SUBMITTED
};

typedef struct bl_dsa_group {
    _Alignas(64) bl_dsa_descriptor list[BL_DSA_WIDTH];
    bl_dsa_descriptor batch;
    _Alignas(32) bl_dsa_record records[BL_DSA_WIDTH];
    bl_dsa_record whole;        /* the batch's record */
    bl_dsa_work works[BL_DSA_WIDTH];
    uint8_t owners[BL_DSA_WIDTH];        /* index of each descriptor's work */
    uint32_t state;
    uint32_t count;             /* descriptors in the list */
    uint32_t full_count;
    uint64_t retry_ns;          /* time of the next attempt */
} bl_dsa_group;

struct bl_dsa_transfer {
    bl_plan plan;
    struct bl_dsa_transfer *next;
    uint32_t is_read;
    uint32_t by_chunk;          /* 1: works are chunks (with checksums), not pieces */
    uint32_t begun;             /* works begun */
    uint32_t count;
    uint32_t open;              /* works in progress */
    uint32_t abandoned;         /* the engine was closed */
    int status;
};

struct bl_dsa_engine {
    const bl_memory *memory;
    bl_dsa_queue *queue;
    bl_dsa_limits limits;
    bl_dsa_rules rules;
    bl_dsa_stat stat;
    bl_dsa_group *groups;
    bl_dsa_transfer *first;     /* the first transfer with works that have not started */
    bl_dsa_transfer *last;
    uint64_t bounced;           /* bytes in bounce buffers */
    uint32_t group_count;
    uint32_t width;
    int broken;                 /* the error of a queue that accepts no more, or 0 */
    int process;
};

/* ---- dsa/work.c: one work, without a queue. */

/* Begin the transfer's next work in a free entry. Returns 0, or an error of the transfer. */
int bl_dsa_work_begin(bl_dsa_engine *engine, bl_dsa_transfer *transfer, bl_dsa_work *work);

/* Fill in the work's next descriptor, all but its record address. Returns 0 if the work is done. */
int bl_dsa_work_next(const bl_dsa_engine *engine, bl_dsa_work *work, bl_dsa_descriptor *out);

/* Handle a descriptor's completion; if the device failed, the CPU executes the rest. Returns 0, or
 * an error of the transfer. */
int bl_dsa_work_handle(bl_dsa_engine *engine, bl_dsa_work *work,
                       const bl_dsa_descriptor *descriptor, const bl_dsa_record *record);

/* Finish a work that is done, and free its entry. Returns 0 or an error. */
int bl_dsa_work_end(bl_dsa_engine *engine, bl_dsa_work *work);

/* Free the entry of an unfinished work. */
void bl_dsa_work_drop(bl_dsa_engine *engine, bl_dsa_work *work);

#endif
