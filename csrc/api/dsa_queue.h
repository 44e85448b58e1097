/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Queues of Intel DSA: portals that take raw descriptors (format/dsa.h), whatever is behind them.
 * cffi reads it too.
 */
#ifndef BL_API_DSA_QUEUE_H
#define BL_API_DSA_QUEUE_H

#include "api/pool.h"
#include "format/dsa.h"

typedef struct bl_dsa_queue bl_dsa_queue;

/* What a work queue was configured for. */
typedef struct bl_dsa_limits {
    uint64_t size_max;          /* of one transfer, in bytes */
    uint32_t batch_max;         /* descriptors in a batch; less than 2: no batches */
    uint32_t depth;             /* descriptors that the queue holds */
    uint32_t block_on_fault;    /* 1: descriptors may ask for it */
    uint32_t reserved;
} bl_dsa_limits;

enum bl_dsa_way {
    BL_DSA_ENQCMD = 1,          /* a shared queue, which answers whether it took a descriptor */
    BL_DSA_MOVDIR64B,           /* a dedicated one, which does not: the sender counts */
    BL_DSA_WRITE                /* the kernel submits: where the portal may not be mapped */
};

/* The queue of an open device file; if it opens, it closes the file. -ENOTSUP: this CPU has not
 * the instruction; -EPERM: the portal may not be mapped (INTEL-SA-01084); or another -errno. */
int bl_dsa_queue_open(int fd, uint32_t way, const bl_dsa_limits *limits, bl_dsa_queue **out);

/* 64 bytes into the portal: 0; -EAGAIN: full, try again; or another -errno: refused. */
int bl_dsa_submit(bl_dsa_queue *queue, const bl_dsa_descriptor *descriptor);

/* The record of a submitted descriptor has been seen. */
void bl_dsa_queue_ended(bl_dsa_queue *queue);

/* No descriptor should be out any more. The software queue ends them first. */
void bl_dsa_queue_close(bl_dsa_queue *queue);

/* A queue that a thread of this process serves. pool, or NULL, is one whose failing devices
 * are page faults; else they end the process. 0, -EINVAL, -ENOMEM. */
int bl_dsa_soft_open(const bl_pool *pool, const bl_dsa_limits *limits, bl_dsa_queue **out);

#endif
