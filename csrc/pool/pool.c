/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Maps devices, and opens a pool over mapped devices. Each device is a single mapping: one
 * contiguous view of all devices would need a mapping per stripe. beluga/pool has checked the kind,
 * size and permissions of the files.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "coherence/coherence.h"
#include "coherence/copy.h"
#include "coherence/guard.h"
#include "pool/pool.h"

/* Devdax accepts only addresses aligned to its pages: reserve a larger range, and map inside it. */
int bl_device_map(int fd, uint64_t offset, uint64_t size, void **out)
{
    if (size == 0 || size % BL_STRIPE_SIZE != 0 || offset % BL_STRIPE_SIZE != 0)
        return -EINVAL;
    uint8_t *room = mmap(NULL, size + BL_STRIPE_SIZE, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
        return -errno;
    size_t head = -(uintptr_t)room % BL_STRIPE_SIZE;
    uint8_t *address = room + head;
    if (mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, (off_t)offset) ==
        MAP_FAILED) {
        int error = errno;
        munmap(room, size + BL_STRIPE_SIZE);
        return -error;
    }
    if (head > 0)
        munmap(room, head);
    munmap(address + size, BL_STRIPE_SIZE - head);
    /* Hints only: a kernel that lacks one of them still maps the device. MADV_NOHUGEPAGE must not
     * be used: devdax would then fault at every access. */
    madvise(address, size, MADV_DONTFORK);
    madvise(address, size, MADV_DONTDUMP);
    madvise(address, size, MADV_HUGEPAGE);
    *out = address;
    return 0;
}

int bl_device_unmap(void *address, uint64_t size)
{
    return munmap(address, size) == 0 ? 0 : -errno;
}

/* The first bytes of a mapped device, which may not be part of a pool. */
typedef struct bl_device_range {
    uint8_t *address;
    uint64_t size;
    const void *source;
    void *target;
} bl_device_range;

static int bl_device_guarded(const bl_device_range *range, bl_guarded_run run)
{
    uint64_t stripes = (range->size + BL_STRIPE_SIZE - 1) >> BL_STRIPE_SHIFT;
    const bl_memory memory = {
        .map = bl_interleave_one(stripes << BL_STRIPE_SHIFT),
        .base = {range->address},
    };
    return bl_guarded(&memory, run, (void *)range);
}

static int bl_device_touch_guarded(void *context)
{
    const bl_device_range *range = context;
    volatile uint8_t *page = range->address;
    for (uint64_t at = 0; at < range->size; at += BL_PAGE_SIZE)
        page[at] = page[at];
    return 0;
}

enum { POPULATE_READ = 22, POPULATE_WRITE = 23 }; /* since Linux 5.14: many headers lack them */

int bl_device_populate(void *address, uint64_t size)
{
    if (madvise(address, size, POPULATE_WRITE) == 0)
        return 0;
    if (errno != EINVAL && errno != ENOSYS && errno != EPERM)
        return -errno;
    /* The kernel is older, or a sandbox denies the call. Plain stores are safe here: no other
     * process writes to a pool that is being created. */
    bl_device_range range = {.address = address, .size = size};
    return bl_device_guarded(&range, bl_device_touch_guarded) < 0 ? -EFAULT : 0;
}

static int bl_device_read_guarded(void *context)
{
    const bl_device_range *range = context;
    bl_drop(range->address, range->size);
    memcpy(range->target, range->address, range->size);
    return 0;
}

int bl_device_read(void *address, void *target, uint64_t size)
{
    bl_device_range range = {.address = address, .size = size, .target = target};
    return bl_device_guarded(&range, bl_device_read_guarded);
}

static int bl_device_write_guarded(void *context)
{
    const bl_device_range *range = context;
    bl_copy_stream(range->address, range->source, range->size);
    bl_drop(range->address, range->size);
    return 0;
}

int bl_device_write(void *address, const void *source, uint64_t size)
{
    bl_device_range range = {.address = address, .size = size, .source = source};
    return bl_device_guarded(&range, bl_device_write_guarded);
}

void bl_pool_prefault(const bl_pool *pool, uint64_t offset, uint64_t size)
{
#ifndef BL_SIM
    uint64_t end = offset + size;
    for (uint64_t at = offset / BL_PAGE_SIZE * BL_PAGE_SIZE; at < end;) {
        uint64_t piece = bl_stripe_rest(at) < end - at ? bl_stripe_rest(at) : end - at;
        if (madvise(bl_pool_address(pool, at), piece, POPULATE_READ) < 0) /* also maps the pages
                                                                           * for writing */
            return; /* not an error: pages are then mapped at their first access */
        at += piece;
    }
#else
    (void)pool, (void)offset, (void)size;
#endif
}

void bl_pool_back(bl_pool *pool, const int32_t *fds, const uint64_t *offsets)
{
    for (uint32_t i = 0; i < pool->geometry.device_count; i++)
        pool->backing[i] = (bl_backing){fds[i], offsets[i]};
    pool->memory.backing = pool->backing;
}

#ifndef BL_SIM

/* Allocate one stripe of a sparse file, without access to its bytes, because other processes may be
 * writing them. */
static int bl_stripe_reserve(const bl_pool *pool, bl_place place)
{
    const bl_backing *backing = pool->backing + place.device;
    off_t at = (off_t)(backing->offset + place.device_offset);
    int status;
    do
        status = fallocate(backing->fd, FALLOC_FL_KEEP_SIZE, at, BL_STRIPE_SIZE);
    while (status < 0 && errno == EINTR);
    if (status == 0 || errno == ENOSPC || errno == EDQUOT || errno == ENOMEM)
        return status == 0 ? 0 : -errno;
    /* The file system does not support fallocate(), or a sandbox denies it. Populating may be
     * unsupported, too. */
    uint8_t *address = pool->memory.base[place.device] + place.device_offset;
    return madvise(address, BL_STRIPE_SIZE, POPULATE_WRITE) < 0 && errno == EFAULT ? -ENOSPC : 0;
}

int bl_pool_reserve(const bl_pool *pool)
{
    const bl_memory *memory = &pool->memory;
    int status = 0;
    for (uint32_t i = 0; memory->backing && status == 0 && i < memory->map.device_count; i++)
        if (memory->backing[i].fd >= 0)
            status = bl_stripe_reserve(pool, (bl_place){i, 0}); /* the superblock's stripe */
    for (uint64_t at = 0; memory->backing && status == 0 && at < pool->geometry.data_offset;
         at += BL_STRIPE_SIZE) {
        bl_place place = bl_interleave_place(&memory->map, at);
        if (memory->backing[place.device].fd >= 0)
            status = bl_stripe_reserve(pool, place);
    }
    return status;
}

#else

int bl_pool_reserve(const bl_pool *pool)
{
    (void)pool;
    return 0;
}

#endif

/* Return 1 if this superblock belongs to another pool, or to another index. */
static int bl_superblock_strange(const bl_superblock *first, const bl_superblock *superblock,
                                 uint32_t index)
{
    return bl_superblock_fault(superblock) != BL_SUPERBLOCK_GOOD ||
           superblock->device_index != index ||
           memcmp(superblock->pool_id, first->pool_id, sizeof first->pool_id) != 0 ||
           memcmp(&superblock->geometry, &first->geometry, sizeof first->geometry) != 0;
}

int bl_pool_open(const bl_superblock *superblocks, void *const *devices, bl_pool **out)
{
    if (bl_superblock_fault(superblocks) != BL_SUPERBLOCK_GOOD)
        return -EINVAL;
    const bl_geometry *g = &superblocks->geometry;
    for (uint32_t i = 0; i < g->device_count; i++)
        if (bl_superblock_strange(superblocks, superblocks + i, i))
            return -EINVAL;
        else if (superblocks[i].coherence != BL_COHERENCE_HARDWARE && bl_flush_fault() < 0)
            return bl_flush_fault();
    bl_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return -ENOMEM;
    pool->geometry = *g;
    memcpy(pool->pool_id, superblocks->pool_id, sizeof pool->pool_id);
    pool->memory.map = bl_interleave_of(g);
    pool->memory.size = g->size;
    pool->memory.flush_choice = bl_flush_choice(bl_cpu_features());
    for (uint32_t i = 0; i < g->device_count; i++) {
        pool->memory.base[i] = devices[i];
        pool->memory.coherent[i] = superblocks[i].coherence == BL_COHERENCE_HARDWARE;
        /* The memory of a metadata device may be coherent between hosts; that of data devices is
         * one host's own. */
        pool->one_host |= i >= pool->memory.map.data_device && pool->memory.coherent[i];
    }
    *out = pool;
    return 0;
}

void bl_pool_close(bl_pool *pool)
{
    free(pool);
}

static void bl_superblock_write(uint8_t *device, const bl_superblock *superblock)
{
    bl_copy_stream(device, superblock, sizeof *superblock);
    bl_drop(device, sizeof *superblock);
}

typedef struct bl_pool_blank {
    const bl_pool *pool;
    const bl_superblock *superblocks;
    uint32_t zeroed;
} bl_pool_blank;

/* The superblocks are zeroed first and written last: after a crash in between, the pool cannot be
 * opened. */
static int bl_pool_format_guarded(void *context)
{
    const bl_pool_blank *blank = context;
    const bl_pool *pool = blank->pool;
    static const bl_superblock no_superblock;
    static const uint8_t zeros[64 << 10] __attribute__((aligned(BL_LINE_SIZE)));
    const bl_memory *memory = &pool->memory;
    _Static_assert(BL_STRIPE_SIZE % sizeof zeros == 0, "data_offset is whole pieces of zeros");
    for (uint32_t i = 0; i < pool->geometry.device_count; i++)
        bl_superblock_write(memory->base[i], &no_superblock);
    if (!blank->zeroed)
        for (uint64_t at = 0; at < pool->geometry.data_offset; at += sizeof zeros)
            bl_stream(memory, at, zeros, sizeof zeros);
    bl_fence_store(memory);
    for (uint32_t i = 0; i < pool->geometry.device_count; i++)
        bl_superblock_write(memory->base[i], blank->superblocks + i);
    return 0;
}

int bl_pool_format(bl_pool *pool, const bl_superblock *superblocks, uint32_t zeroed)
{
    bl_pool_blank blank = {pool, superblocks, zeroed};
    return bl_guarded(&pool->memory, bl_pool_format_guarded, &blank);
}

void *bl_pool_address(const bl_pool *pool, uint64_t offset)
{
    if (offset >= pool->memory.size)
        return NULL;
    bl_place place = bl_interleave_place(&pool->memory.map, offset);
    return pool->memory.base[place.device] + place.device_offset;
}

void *bl_pool_device(const bl_pool *pool, uint32_t device) { return pool->memory.base[device]; }

/* Return 1 unless this is a range of whole lines in the linear range. */
static int bl_pool_range_bad(const bl_pool *pool, uint64_t offset, uint64_t size)
{
    return (offset | size) % BL_LINE_SIZE != 0 || size > pool->memory.size ||
           offset > pool->memory.size - size;
}

typedef struct bl_pool_range {
    const bl_memory *memory;
    uint64_t offset;
    uint64_t size;
    const void *source;
    void *target;
} bl_pool_range;

static int bl_pool_write_guarded(void *context)
{
    const bl_pool_range *range = context;
    bl_stream(range->memory, range->offset, range->source, range->size);
    bl_fence_store(range->memory);
    return 0;
}

int bl_pool_write(const bl_pool *pool, uint64_t offset, const void *source, uint64_t size)
{
    bl_pool_range range = {&pool->memory, offset, size, source, NULL};
    if (bl_pool_range_bad(pool, offset, size))
        return -EINVAL;
    return bl_guarded(&pool->memory, bl_pool_write_guarded, &range);
}

static int bl_pool_read_guarded(void *context)
{
    const bl_pool_range *range = context;
    bl_refetch(range->memory, range->offset, range->size);
    bl_fetch(range->memory, range->offset, range->target, range->size);
    return 0;
}

int bl_pool_read(const bl_pool *pool, uint64_t offset, void *target, uint64_t size)
{
    bl_pool_range range = {&pool->memory, offset, size, NULL, target};
    if (bl_pool_range_bad(pool, offset, size))
        return -EINVAL;
    return bl_guarded(&pool->memory, bl_pool_read_guarded, &range);
}
