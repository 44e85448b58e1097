/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The state of the DSA engine: how it cuts plans into works and flights. A plan consists of
 * *works*: a chunk that is summed, else a piece. A work goes through steps; each step is a sequence
 * of descriptors, because a checksum is chained through the seed of the next, and the rest after a
 * page fault is submitted again. So a work has at most one descriptor in flight.
 *
 * A *flight* carries up to BL_DSA_WIDTH works, whose next descriptors are submitted together, as a
 * batch if there are several. It lands when all have ended; then works that are done leave, and
 * others board. Several flights are in the air at once. Descriptors of a flight belong to different
 * works and need no order: there is no fence, and the device may reorder them.
 *
 * Pieces may begin and end within a line. The device and its host's caches are coherent with each
 * other, so parts of a line may be written in any order. When a block's works are done and the rest
 * of its last line is zeroed, every byte of its lines has been written.
 */
#ifndef BL_DSA_ENGINE_H
#define BL_DSA_ENGINE_H

#include "dsa/queue.h"
#include "coherence/memory.h"

enum bl_dsa_engine_constant {
    BL_DSA_WIDTH = 16,
    BL_DSA_FLIGHTS_BATCHED = 8,
    BL_DSA_FLIGHTS_SINGLE = 64,
    BL_DSA_BOUNCE_MAX = 8 << 20,        /* bytes of bouncing works; one may exceed it */
    BL_DSA_STALLS_MAX = 8,              /* completions without progress of the work */
    BL_DSA_FULL_MAX = 24,               /* submissions to a full queue, before the CPU does it */
    BL_DSA_BACKOFF_NS = 500,            /* after the first of them; doubled after each */
    BL_DSA_BACKOFF_MAX_NS = 1000 * 1000,
    BL_DSA_MONITOR_CYCLES = 100 * 1000,
    BL_DSA_CLOSE_S = 5
};

/* Steps are taken in this order; most works skip most of them. */
enum bl_dsa_step {
    BL_DSA_STEP_DROP,           /* the device drops the cached lines of the range */
    BL_DSA_STEP_COPY,           /* piece by piece */
    BL_DSA_STEP_BOUNCE,         /* the whole range is read for its checksum, though only some bytes
                                 * are copied */
    BL_DSA_STEP_BLANK,          /* zeros to the end of the last line */
    BL_DSA_STEP_FLUSH,          /* the device flushes the range */
    BL_DSA_STEP_END
};

typedef struct bl_dsa_work {
    bl_dsa_transfer *transfer;  /* NULL: the entry is free */
    uint8_t *bounce;
    uint64_t offset;            /* the range in the pool */
    uint32_t length;
    uint32_t chunk;             /* chunk of the part */
    uint32_t piece;             /* the next piece, or the one that is not done */
    uint32_t piece_end;
    uint32_t step;
    uint32_t done;              /* bytes of that piece, or of the range in other steps */
    uint32_t crc;               /* CRC of all that is copied */
    uint32_t asked;             /* bytes of the descriptor that is out */
    uint32_t stalls;
} bl_dsa_work;

enum bl_dsa_flight_state {
    BL_DSA_GROUNDED,
    BL_DSA_LEAVING,             /* its descriptors are made but not submitted */
    BL_DSA_FLYING
};

typedef struct bl_dsa_flight {
    _Alignas(64) bl_dsa_descriptor list[BL_DSA_WIDTH];
    bl_dsa_descriptor batch;
    _Alignas(32) bl_dsa_record records[BL_DSA_WIDTH];
    bl_dsa_record whole;        /* the batch's record */
    bl_dsa_work works[BL_DSA_WIDTH];
    uint8_t owners[BL_DSA_WIDTH];        /* the work of each descriptor of the list */
    uint32_t state;
    uint32_t count;             /* descriptors in the list */
    uint32_t full_count;
    uint64_t retry_ns;          /* the next try is not before this time */
} bl_dsa_flight;

struct bl_dsa_transfer {
    bl_plan plan;
    struct bl_dsa_transfer *next;
    uint32_t is_read;
    uint32_t by_chunk;          /* its works are chunks: there are checksums */
    uint32_t begun;             /* works begun */
    uint32_t count;
    uint32_t open;              /* works begun and not ended */
    uint32_t abandoned;         /* the engine was closed */
    int status;
};

struct bl_dsa_engine {
    const bl_memory *memory;
    bl_dsa_queue *queue;
    bl_dsa_limits limits;
    bl_dsa_rules rules;
    bl_dsa_stat stat;
    bl_dsa_flight *flights;
    bl_dsa_transfer *first;     /* the first transfer with works that have not begun */
    bl_dsa_transfer *last;
    uint64_t bounced;           /* bytes in bounce buffers */
    uint32_t flight_count;
    uint32_t width;
    int broken;                 /* the error of a queue that accepts no more, or 0 */
    int process;
};

/* ---- dsa/work.c: one work, without a queue. */

/* Begin the transfer's next work in a free entry. Returns 0, or an error of the transfer. */
int bl_dsa_work_begin(bl_dsa_engine *engine, bl_dsa_transfer *transfer, bl_dsa_work *work);

/* Make the work's next descriptor, without a record: 1; 0 if the work is done. */
int bl_dsa_work_ask(const bl_dsa_engine *engine, bl_dsa_work *work, bl_dsa_descriptor *out);

/* Handle a descriptor's completion; if the device failed, the CPU executes the rest. Returns 0, or
 * an error of the transfer. */
int bl_dsa_work_hear(bl_dsa_engine *engine, bl_dsa_work *work, const bl_dsa_descriptor *descriptor,
                     const bl_dsa_record *record);

/* Finish a work that is done, and free its entry: 0 or an error. */
int bl_dsa_work_end(bl_dsa_engine *engine, bl_dsa_work *work);

/* Free the entry of a work that will not be done. */
void bl_dsa_work_drop(bl_dsa_engine *engine, bl_dsa_work *work);

#endif
