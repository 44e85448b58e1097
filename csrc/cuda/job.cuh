/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The arguments of one launch. The CPU writes the spans (transfer/spans.c) into pinned memory, from
 * where the kernels read them: a launch uploads nothing, and its results need no download.
 */
#ifndef BL_CUDA_JOB_CUH
#define BL_CUDA_JOB_CUH

#include "api/transfer.h"

/* Tests build the kernels with planted bugs, to test that the tests find them. */
#ifndef BL_PLANT
#define BL_PLANT 0
#endif
enum bl_plant {
    BL_PLANT_SHIFT = 1,         /* the pool's bytes are those of the next line */
    BL_PLANT_SWAP,              /* the engine's bytes of a neighboring span */
    BL_PLANT_TAIL,              /* the bytes after the last whole word are missing */
    BL_PLANT_SUM,               /* the checksum goes to another span */
    BL_PLANT_TWICE,             /* a word is written twice */
    BL_PLANT_STRIDED,           /* right bytes, but uncoalesced accesses */
    BL_PLANT_PAD,               /* the last line is not padded */
    BL_PLANT_AGAIN              /* bytes of two rows are read twice */
};

enum bl_cuda_constant {
    BL_UNROLL = 8,              /* words per lane in flight */
    BL_THREADS_MAX = 512,
    BL_BATCH = 1024,            /* spans in shared memory: 32 KiB */
    BL_STEP = 16                /* adjacent spans that a block takes at a time */
};

/* The bytes of one access. */
template <int WIDTH> struct bl_word {
    uint32_t part[(WIDTH + 3) / 4];
};

typedef struct bl_thread {
    uint32_t block, block_count, thread, thread_count;
} bl_thread;

/* The arguments of every kernel, in this order, 8 bytes each. */
typedef struct bl_job {
    const bl_span *spans;
    uint32_t *sums;             /* of each span, its part of its chunk's checksum */
    const uint32_t *tables;     /* for checksums: of this group size (crc32c.cuh) */
    uint64_t count;             /* number of spans */
} bl_job;

#endif
