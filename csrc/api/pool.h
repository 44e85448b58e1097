/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Pools: layout, mapping, formatting, and reads and writes without a protocol (beluga/pool).
 */
#ifndef BL_API_POOL_H
#define BL_API_POOL_H

#include "api/error.h"
#include "format/placement.h"
#include "format/pool_format.h"

typedef struct bl_pool bl_pool;

typedef struct bl_pool_config {
    uint8_t pool_id[16];
    uint64_t device_size;       /* of each device with data; a multiple of a stripe, the
                                 * superblock's included */
    uint64_t created_s;
    uint32_t device_count;      /* with the metadata device */
    uint32_t interleaved;       /* bits of bl_placement */
    uint32_t lane_count;
    uint32_t slot_count;
    uint32_t bulk_size;
    uint32_t block_count_max;
    uint32_t sparse;
} bl_pool_config;

/* Compute a pool's layout. Returns 0, -EINVAL, or -ENOSPC if no data stripe would remain. */
int bl_geometry_make(const bl_pool_config *config, bl_geometry *out);

/* Fill in the superblock of device device_index. */
void bl_superblock_make(const bl_pool_config *config, const bl_geometry *geometry,
                        uint32_t device_index, uint32_t coherence, bl_superblock *out);

/* Why this program cannot use a superblock, in the order of the checks. */
enum bl_superblock_fault {
    BL_SUPERBLOCK_GOOD = 0,
    BL_SUPERBLOCK_EMPTY,        /* all zero: never formatted */
    BL_SUPERBLOCK_FOREIGN,      /* other data */
    BL_SUPERBLOCK_VERSION,
    BL_SUPERBLOCK_DAMAGED,      /* the check is wrong */
    BL_SUPERBLOCK_FORMAT,       /* right version, but another format hash */
    BL_SUPERBLOCK_GEOMETRY      /* right check, but fields that contradict each other */
};
int bl_superblock_fault(const bl_superblock *superblock);

/* Map [offset, offset + size) of fd as shared memory, aligned to 2 MiB, with huge pages if
 * possible, not inherited by fork and excluded from core dumps. Returns 0 or -errno. */
int bl_device_map(int fd, uint64_t offset, uint64_t size, void **out);
int bl_device_unmap(void *address, uint64_t size);

/* Fault in a range of a mapped device for writing; its bytes do not change. Any number of threads
 * may populate different ranges. Returns 0 or -errno (-EFAULT: the file has no space there). */
int bl_device_populate(void *address, uint64_t size);

/* Read the first bytes of a mapped device from memory, in whole lines. Returns 0 or
 * -BL_ERROR_DEVICE_FAULT. */
int bl_device_read(void *address, void *target, uint64_t size);
int bl_device_write(void *address, const void *source, uint64_t size);

/* Open a pool over mapped devices, in superblock order. The caller keeps ownership of the
 * devices. */
int bl_pool_open(const bl_superblock *superblocks, void *const *devices, bl_pool **out);
void bl_pool_close(bl_pool *pool);

/* Set the files of a sparse pool's devices: a descriptor (-1: none) and the device's offset in the
 * file. The caller keeps the descriptors open as long as the pool. */
void bl_pool_back(bl_pool *pool, const int32_t *fds, const uint64_t *offsets);

/* Allocate the memory of all bytes before the data in sparse files: the server and its sessions
 * would fail if a page were missing. Existing bytes do not change. Returns 0 or -errno (-ENOSPC:
 * the file system is full). */
int bl_pool_reserve(const bl_pool *pool);

/* Map the pages of a range at once: a page fault for each costs more than the accesses. */
void bl_pool_prefault(const bl_pool *pool, uint64_t offset, uint64_t size);

/* Zero all bytes before the data, then write the superblocks: the pool is empty. zeroed: the
 * devices are new files, which are zero already. */
int bl_pool_format(bl_pool *pool, const bl_superblock *superblocks, uint32_t zeroed);

/* Return the address of offset, valid to the end of its stripe; NULL outside the pool. */
void *bl_pool_address(const bl_pool *pool, uint64_t offset);

/* Return the address of a mapped device: its superblock's stripe. */
void *bl_pool_device(const bl_pool *pool, uint32_t device);

/* Write or read bytes of the linear range without any protocol, for tools and benchmarks. A write
 * is streamed and fenced; a read invalidates first. Offset and size are multiples of a line.
 * Returns 0 or -EINVAL. */
int bl_pool_write(const bl_pool *pool, uint64_t offset, const void *source, uint64_t size);
int bl_pool_read(const bl_pool *pool, uint64_t offset, void *target, uint64_t size);

#endif
