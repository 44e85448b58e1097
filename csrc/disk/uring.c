/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The ring of disk/uring.h. The kernel and this process share two queues; each queue index has one
 * writer, and is stored with release and loaded with acquire order.
 */
#include "disk/uring.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/host_atomic.h"

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>) && defined(__NR_io_uring_setup)
#include <linux/io_uring.h>
#define BL_HAS_URING 1
#endif
#endif

#ifdef BL_HAS_URING

struct bl_uring {
    int file;
    uint32_t waiting;           /* queued, not submitted yet */
    void *rings;
    size_t rings_size;
    struct io_uring_sqe *entries;
    size_t entries_size;
    uint32_t *push_tail, *push_array, push_mask;
    uint32_t *done_head, *done_tail, done_mask;
    struct io_uring_cqe *done;
};

static int bl_uring_map(bl_uring *ring, const struct io_uring_params *params)
{
    size_t push = params->sq_off.array + params->sq_entries * sizeof(uint32_t);
    size_t done = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    ring->rings_size = push > done ? push : done;
    ring->entries_size = params->sq_entries * sizeof(struct io_uring_sqe);
    int flags = MAP_SHARED | MAP_POPULATE, rights = PROT_READ | PROT_WRITE;
    ring->rings = mmap(NULL, ring->rings_size, rights, flags, ring->file, IORING_OFF_SQ_RING);
    if (ring->rings == MAP_FAILED) {
        ring->rings = NULL;
        return -ENOMEM;
    }
    void *entries = mmap(NULL, ring->entries_size, rights, flags, ring->file, IORING_OFF_SQES);
    if (entries == MAP_FAILED)
        return -ENOMEM;
    madvise(ring->rings, ring->rings_size, MADV_DONTFORK);
    madvise(entries, ring->entries_size, MADV_DONTFORK);
    char *base = ring->rings;
    ring->entries = entries;
    ring->push_tail = (uint32_t *)(base + params->sq_off.tail);
    ring->push_array = (uint32_t *)(base + params->sq_off.array);
    ring->push_mask = *(uint32_t *)(base + params->sq_off.ring_mask);
    ring->done_head = (uint32_t *)(base + params->cq_off.head);
    ring->done_tail = (uint32_t *)(base + params->cq_off.tail);
    ring->done_mask = *(uint32_t *)(base + params->cq_off.ring_mask);
    ring->done = (struct io_uring_cqe *)(base + params->cq_off.cqes);
    return 0;
}

int bl_uring_create(bl_uring **out, uint32_t depth)
{
    struct io_uring_params params;
    memset(&params, 0, sizeof params);
    bl_uring *ring = calloc(1, sizeof *ring);
    if (!ring)
        return -ENOMEM;
    ring->file = (int)syscall(__NR_io_uring_setup, depth, &params);
    int rc = ring->file < 0 ? -errno : 0;
    if (!rc && !(params.features & IORING_FEAT_SINGLE_MMAP))
        rc = -ENOSYS;
    if (!rc)
        rc = bl_uring_map(ring, &params);
    if (rc)
        bl_uring_destroy(ring);
    else
        *out = ring;
    return rc;
}

void bl_uring_destroy(bl_uring *ring)
{
    if (!ring)
        return;
    if (ring->entries)
        munmap(ring->entries, ring->entries_size);
    if (ring->rings)
        munmap(ring->rings, ring->rings_size);
    if (ring->file >= 0)
        close(ring->file);
    free(ring);
}

void bl_uring_push(bl_uring *ring, int file, int write, uint64_t offset, void *bytes, uint32_t size,
                   uint64_t number)
{
    uint32_t tail = *ring->push_tail, place = tail & ring->push_mask;
    ring->entries[place] = (struct io_uring_sqe){
        .opcode = write ? IORING_OP_WRITE : IORING_OP_READ,
        .fd = file,
        .off = offset,
        .addr = (uintptr_t)bytes,
        .len = size,
        .user_data = number,
    };
    ring->push_array[place] = place;
    bl_host_store_short(ring->push_tail, tail + 1);
    ring->waiting++;
}

int bl_uring_enter(bl_uring *ring, int wait)
{
    unsigned flags = wait ? IORING_ENTER_GETEVENTS : 0;
    long started = syscall(__NR_io_uring_enter, ring->file, ring->waiting, wait ? 1 : 0, flags,
                           NULL, 0);
    if (started < 0)
        return -errno;
    ring->waiting -= (uint32_t)started;
    return 0;
}

int bl_uring_reap(bl_uring *ring, bl_uring_done *done)
{
    uint32_t head = *ring->done_head;
    if (head == bl_host_load_short(ring->done_tail))
        return 0;
    const struct io_uring_cqe *cqe = &ring->done[head & ring->done_mask];
    *done = (bl_uring_done){cqe->user_data, cqe->res};
    bl_host_store_short(ring->done_head, head + 1);
    return 1;
}

#else

int bl_uring_create(bl_uring **out, uint32_t depth)
{
    (void)out, (void)depth;
    return -ENOSYS;
}

void bl_uring_destroy(bl_uring *ring) { (void)ring; }

void bl_uring_push(bl_uring *ring, int file, int write, uint64_t offset, void *bytes, uint32_t size,
                   uint64_t number)
{
    (void)ring, (void)file, (void)write, (void)offset, (void)bytes, (void)size, (void)number;
}

int bl_uring_enter(bl_uring *ring, int wait)
{
    (void)ring, (void)wait;
    return -ENOSYS;
}

int bl_uring_reap(bl_uring *ring, bl_uring_done *done)
{
    (void)ring, (void)done;
    return 0;
}

#endif
