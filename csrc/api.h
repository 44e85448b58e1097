/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What Python may call: prototypes only, read by cffi as they stand. Functions return 0 or a count,
 * or a negative errno or bl_error; they never print, exit or touch Python.
 */
#ifndef BL_API_H
#define BL_API_H

#include <stddef.h>

#include "pool_format.h"

/* What errno has no word for; returned negative. errors.py gives each its exception. */
enum bl_error {
    BL_ERROR_FORKED = 1001,     /* the session belongs to the parent process */
    BL_ERROR_NO_SERVER,         /* nobody serves this pool */
    BL_ERROR_TIMEOUT,           /* the server did not answer in time */
    BL_ERROR_DEPOSED,           /* another server has taken the pool over */
    BL_ERROR_SERVER_ALIVE,      /* the pool's server lives, or is not proven gone */
    BL_ERROR_HOST_CLASH,        /* another machine uses this host number */
    BL_ERROR_NO_LANE,           /* every lane is taken or in quarantine */
    BL_ERROR_SESSION_LOST,      /* the server gave this session up */
    BL_ERROR_NO_METHOD,         /* the server has no handler for the method */
    BL_ERROR_BAD_REQUEST,       /* a field of the request is out of range */
    BL_ERROR_BAD_REPLY,         /* a field of the reply is out of range */
    BL_ERROR_HANDLER,           /* a Python handler raised */
    BL_ERROR_NO_SPACE,          /* nothing could be evicted for the block */
    BL_ERROR_TABLE_FULL,        /* max_blocks blocks, none can be evicted */
    BL_ERROR_CLASS_LIMIT,       /* too many different block sizes */
    BL_ERROR_NO_GRANT,          /* the session does not hold that grant (any more) */
    BL_ERROR_PIN_LIMIT,         /* the session has too many blocks pinned */
    BL_ERROR_QUARANTINE         /* this host's dead writers hold too much space */
};

/* ---- L1 primitives (beluga.primitives) */

enum bl_cpu_feature {
    BL_CPU_CLFLUSHOPT = 1,
    BL_CPU_CLWB = 2,
    BL_CPU_SSE42 = 4,           /* the crc32 instruction */
    BL_CPU_AVX2 = 8,
    BL_CPU_AVX512 = 16,         /* F, with the operating system saving its state */
    BL_CPU_MOVDIR64B = 32,
    BL_CPU_PCLMUL = 64
};

/* Features found and not taken away. */
uint32_t bl_cpu_features(void);

/* Take away every feature that is not in mask; ~0 gives all back. Before pools are opened. */
void bl_cpu_limit(uint32_t mask);

/* The streaming path in use: "sse2", "avx2", "avx512" or "movdir64b". */
const char *bl_copy_isa(void);

/* Copy round the cache: whole lines by non-temporal stores, a ragged head and tail by plain stores
 * that are flushed. Ends with a store fence. */
void bl_ntstore_copy(void *target, const void *source, size_t size);

/* Write dirty lines back; they may stay cached (clwb), or are dropped where there is no clwb. */
void bl_flush(const void *address, size_t size);

/* Write back and drop, between full fences: the loads that follow go to memory. */
void bl_drop(const void *address, size_t size);

void bl_fence(void);

/* CRC-32C of bytes, seed 0 or the result for those before. */
uint32_t bl_crc32c(uint32_t seed, const void *bytes, size_t size);

/* ---- L2 pool */

typedef struct bl_pool bl_pool;

typedef struct bl_pool_config {
    uint8_t pool_id[16];
    uint64_t device_size;       /* a multiple of a stripe, superblock's included */
    uint64_t created_s;
    uint32_t device_count;
    uint32_t interleaved;
    uint32_t lane_count;
    uint32_t slot_count;
    uint32_t bulk_size;
    uint32_t block_count_max;
    uint32_t sparse;
} bl_pool_config;

/* Lay a pool out: 0 or -EINVAL, or -ENOSPC if no data stripe would be left. */
int bl_geometry_make(const bl_pool_config *config, bl_geometry *out);

uint64_t bl_format_hash(void);

/* Fill in the superblock of device device_index. */
void bl_superblock_make(const bl_pool_config *config, const bl_geometry *geometry,
                        uint32_t device_index, uint32_t discipline, bl_superblock *out);

/* Why a superblock cannot be used by this program, in order of what is asked first. */
enum bl_superblock_fault {
    BL_SUPERBLOCK_GOOD = 0,
    BL_SUPERBLOCK_EMPTY,        /* all zero: never formatted */
    BL_SUPERBLOCK_FOREIGN,      /* something else's bytes */
    BL_SUPERBLOCK_VERSION,
    BL_SUPERBLOCK_DAMAGED,      /* the check is wrong */
    BL_SUPERBLOCK_FORMAT,       /* right version, but another format hash */
    BL_SUPERBLOCK_GEOMETRY      /* right check, but fields that contradict each other */
};
int bl_superblock_fault(const bl_superblock *superblock);

/* Map [offset, offset + size) of fd, shared, 2 MiB-aligned in memory, not inherited by fork and not
 * in core dumps. Huge pages are asked for. 0 or -errno. */
int bl_device_map(int fd, uint64_t offset, uint64_t size, void **out);
int bl_device_unmap(void *address, uint64_t size);

/* A pool over mapped devices, in superblock order. The devices stay the caller's. */
int bl_pool_open(const bl_superblock *superblocks, void *const *devices, bl_pool **out);
void bl_pool_close(bl_pool *pool);

/* Write zeros over all that lies before the data, then the superblocks: the pool is empty. zeroed:
 * the devices are new files, zero as they are. */
int bl_pool_format(bl_pool *pool, const bl_superblock *superblocks, uint32_t zeroed);

void bl_pool_geometry(const bl_pool *pool, bl_geometry *out);

/* The address of offset, valid to the end of its stripe; NULL outside the pool. */
void *bl_pool_address(const bl_pool *pool, uint64_t offset);

#endif
