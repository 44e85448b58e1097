/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The arguments of one launch, and the GPU address of a pool offset. The kernels, their host build
 * and beluga/transfer/engines/cuda/tables.py use the same arithmetic.
 *
 * A plan's pieces are cut into equal tiles; a group of lanes (a warp or half a warp) copies a tile
 * at a time. The pool is registered with the driver in windows, each a power of two of stripes of
 * one device; a piece lies in one stripe, and so in one window.
 */
#ifndef BL_CUDA_JOB_CUH
#define BL_CUDA_JOB_CUH

#include "api/transfer.h"

#ifdef __CUDACC__
#define BL_BOTH __host__ __device__ __forceinline__
#else
#define BL_BOTH inline
#endif

/* Tests build the kernels with planted bugs, to test that the tests find them. */
#ifndef BL_PLANT
#define BL_PLANT 0
#endif
enum bl_plant {
    BL_PLANT_TILE = 1,          /* off by one tile */
    BL_PLANT_STRIDE,            /* wrong stride over the devices */
    BL_PLANT_SWAP,              /* K and V, which are neighbors, swapped */
    BL_PLANT_TAIL,              /* the bytes after the last whole word are missing */
    BL_PLANT_CHUNK,             /* the checksum of another chunk */
    BL_PLANT_TWICE,             /* a word is written twice */
    BL_PLANT_STRIDED,           /* right bytes, but uncoalesced accesses */
    BL_PLANT_PAD,               /* the last line is not padded */
    BL_PLANT_AGAIN              /* bytes of two rows are read twice */
};

enum bl_cuda_constant {
    BL_UNROLL = 8,              /* words per lane in flight */
    BL_THREADS_MAX = 512,
    BL_SLICES = 16,             /* bytes of the widest word */
    BL_TABLE_WORDS = (BL_SLICES + 4) * 256 + 64
};

/* The bytes of one access. */
template <int WIDTH> struct bl_word {
    uint32_t part[(WIDTH + 3) / 4];
};

typedef struct bl_thread {
    uint32_t block, block_count, thread, thread_count;
} bl_thread;

typedef struct bl_tile {
    uint32_t piece;             /* of the launch's pieces */
    uint32_t start;             /* byte of the piece */
    uint32_t power;             /* x^(8n) mod P, n bytes of the chunk after it */
    uint32_t extra;             /* gather: zeros to write after it, to the end of the line;
                                 * scatter: following pieces with the same source bytes */
} bl_tile;

/* The state of a chunk's checksum. */
typedef struct bl_sum {
    uint32_t crc;               /* initially the CRC of size zeros */
    uint32_t left;              /* lanes that have not added their part yet */
    uint32_t expected;          /* the checksum that a read expects */
    uint32_t reserved;
} bl_sum;

typedef struct bl_verdict {
    uint32_t bad_count;         /* chunks whose checksum differs */
    uint32_t first_bad;         /* the lowest of them, relative to the launch's first */
    uint32_t reserved[2];
} bl_verdict;

typedef struct bl_windows {
    const uint64_t *bases;      /* GPU addresses: window_count of each device, from first_window */
    uint64_t device_count;
    uint64_t device_stripes;    /* stripes of the linear range on each device */
    uint64_t interleaved;
    uint64_t skipped_stripes;   /* stripes of a device before the linear range */
    uint64_t window_shift;      /* log2 of a window's stripes */
    uint64_t first_window;
    uint64_t window_count;
} bl_windows;

/* The arguments of every kernel, in this order, 8 bytes each. */
typedef struct bl_job {
    bl_windows windows;
    const bl_piece *pieces;
    const bl_tile *tiles;
    bl_sum *sums;
    bl_verdict *verdict;
    const uint32_t *tables;     /* for checksums: BL_TABLE_WORDS, of this group size */
    uint64_t tile_count;
    uint64_t tile_size;         /* bytes, a multiple of 16 */
    uint64_t chunk_base;        /* number of the launch's first chunk */
} bl_job;

BL_BOTH uint64_t bl_window_address(const bl_windows *windows, uint64_t offset)
{
    uint32_t stripe = (uint32_t)(offset >> BL_STRIPE_SHIFT), device, row;
    if (windows->interleaved) {
        uint32_t stride = (uint32_t)windows->device_count + (BL_PLANT == BL_PLANT_STRIDE);
        device = stripe % stride;
        row = stripe / stride;
    } else {
        device = stripe / (uint32_t)windows->device_stripes;
        row = stripe % (uint32_t)windows->device_stripes;
    }
    row += (uint32_t)windows->skipped_stripes;
    uint32_t window = row >> windows->window_shift;
    uint64_t base = windows->bases[device * windows->window_count + window - windows->first_window];
    uint64_t inside = row - (window << windows->window_shift);
    return base + (inside << BL_STRIPE_SHIFT) + (offset & (BL_STRIPE_SIZE - 1));
}

BL_BOTH uint32_t bl_tile_length(const bl_tile *tile, const bl_piece *piece, uint64_t tile_size)
{
    uint32_t rest = piece->length - tile->start;
    return rest < tile_size ? rest : (uint32_t)tile_size;
}

#endif
