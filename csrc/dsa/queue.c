/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Work queues of a real device: three ways to submit.
 *
 * A portal is a page of lines, all of which lead to the queue. Stores go to each in turn, because
 * stores to the same line would wait for each other. The memory that the CPU wrote and that the
 * descriptor names must be visible before: a store fence precedes each submission.
 */
#include "dsa/queue.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "coherence/coherence.h"

_Static_assert(sizeof(bl_dsa_descriptor) == 64, "a descriptor is a line");
_Static_assert(sizeof(bl_dsa_record) == 32, "a record is half a line");

typedef struct bl_dsa_device {
    bl_dsa_queue queue;
    uint8_t *portal;
    uint64_t next;              /* line of the portal */
    uint32_t depth;
    uint32_t out;               /* descriptors in a dedicated queue */
    int fd;
} bl_dsa_device;

static void *bl_dsa_device_slot(bl_dsa_device *device)
{
    return device->portal + device->next++ * BL_LINE_SIZE % BL_PAGE_SIZE;
}

static int bl_dsa_device_enqueue(bl_dsa_queue *queue, const bl_dsa_descriptor *descriptor)
{
    bl_dsa_device *device = (bl_dsa_device *)queue;
    bl_store_fence_now();
    return bl_portal_enqueue(bl_dsa_device_slot(device), descriptor) ? 0 : -EAGAIN;
}

static int bl_dsa_device_move(bl_dsa_queue *queue, const bl_dsa_descriptor *descriptor)
{
    bl_dsa_device *device = (bl_dsa_device *)queue;
    if (device->out == device->depth)
        return -EAGAIN; /* the device silently drops a descriptor beyond its depth */
    device->out++;
    bl_store_fence_now();
    bl_portal_move(bl_dsa_device_slot(device), descriptor);
    return 0;
}

static int bl_dsa_device_write(bl_dsa_queue *queue, const bl_dsa_descriptor *descriptor)
{
    bl_dsa_device *device = (bl_dsa_device *)queue;
    bl_store_fence_now();
    ssize_t size = write(device->fd, descriptor, sizeof *descriptor);
    if (size == (ssize_t)sizeof *descriptor)
        return 0;
    return size >= 0 ? -EIO : errno == EBUSY || errno == EINTR ? -EAGAIN : -errno;
}

static void bl_dsa_device_ended(bl_dsa_queue *queue)
{
    bl_dsa_device *device = (bl_dsa_device *)queue;
    if (device->out > 0)
        device->out--;
}

static void bl_dsa_device_close(bl_dsa_queue *queue)
{
    bl_dsa_device *device = (bl_dsa_device *)queue;
    if (device->portal != NULL)
        munmap(device->portal, BL_PAGE_SIZE);
    close(device->fd); /* the kernel waits until the device has ended its descriptors */
    free(device);
}

static const bl_dsa_queue_verbs bl_dsa_device_verbs[] = {
    [BL_DSA_ENQCMD] = {bl_dsa_device_enqueue, bl_dsa_device_ended, bl_dsa_device_close},
    [BL_DSA_MOVDIR64B] = {bl_dsa_device_move, bl_dsa_device_ended, bl_dsa_device_close},
    [BL_DSA_WRITE] = {bl_dsa_device_write, bl_dsa_device_ended, bl_dsa_device_close},
};

int bl_dsa_queue_open(int fd, uint32_t submission, const bl_dsa_limits *limits, bl_dsa_queue **out)
{
    uint32_t needs = submission == BL_DSA_ENQCMD      ? BL_CPU_ENQCMD
                     : submission == BL_DSA_MOVDIR64B ? BL_CPU_MOVDIR64B
                                               : 0;
    if (submission < BL_DSA_ENQCMD || submission > BL_DSA_WRITE || limits->depth == 0)
        return -EINVAL;
    if ((bl_cpu_features() & needs) != needs)
        return -ENOTSUP;
    void *portal = NULL;
    if (submission != BL_DSA_WRITE) {
        portal = mmap(NULL, BL_PAGE_SIZE, PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
        if (portal == MAP_FAILED)
            return -errno;
        madvise(portal, BL_PAGE_SIZE, MADV_DONTFORK); /* the queue accesses the parent's memory */
    }
    bl_dsa_device *device = malloc(sizeof *device);
    if (device == NULL) {
        if (portal != NULL)
            munmap(portal, BL_PAGE_SIZE);
        return -ENOMEM;
    }
    const bl_dsa_queue_verbs *verbs = &bl_dsa_device_verbs[submission];
    *device = (bl_dsa_device){{verbs, 1}, portal, 0, limits->depth, 0, fd};
    *out = &device->queue;
    return 0;
}

int bl_dsa_submit(bl_dsa_queue *queue, const bl_dsa_descriptor *descriptor)
{
    return queue->verbs->submit(queue, descriptor);
}

void bl_dsa_queue_ended(bl_dsa_queue *queue) { queue->verbs->ended(queue); }

void bl_dsa_queue_close(bl_dsa_queue *queue) { queue->verbs->close(queue); }
