/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Work queues of Intel DSA: portals that take raw descriptors (format/dsa.h). cffi reads it too.
 * The Python half is beluga/transfer/dsa.py.
 */
#ifndef BL_API_DSA_QUEUE_H
#define BL_API_DSA_QUEUE_H

#include "api/pool.h"
#include "format/dsa.h"

typedef struct bl_dsa_queue bl_dsa_queue;

/* The limits that a work queue was configured with. */
typedef struct bl_dsa_limits {
    uint64_t size_max;          /* bytes of one transfer */
    uint32_t batch_max;         /* descriptors in a batch; less than 2: no batches */
    uint32_t depth;             /* descriptors that the queue holds */
    uint32_t block_on_fault;    /* 1: descriptors may set this flag */
    uint32_t reserved;
} bl_dsa_limits;

enum bl_dsa_way {
    BL_DSA_ENQCMD = 1,          /* a shared queue, which reports whether it accepted a descriptor */
    BL_DSA_MOVDIR64B,           /* a dedicated queue: the submitter counts the descriptors in it */
    BL_DSA_WRITE                /* write(): the kernel submits, if the portal may not be mapped */
};

/* Open the queue of an open device file, and take ownership of the file on success. Returns 0;
 * -ENOTSUP: this CPU lacks the instruction; -EPERM: the portal may not be mapped (INTEL-SA-01084);
 * or another -errno. */
int bl_dsa_queue_open(int fd, uint32_t way, const bl_dsa_limits *limits, bl_dsa_queue **out);

/* Write a descriptor to the portal. Returns 0; -EAGAIN: the queue is full; or another -errno:
 * refused. */
int bl_dsa_submit(bl_dsa_queue *queue, const bl_dsa_descriptor *descriptor);

/* Count a submitted descriptor as complete: its record has been read. */
void bl_dsa_queue_ended(bl_dsa_queue *queue);

/* Close a queue. No descriptors may be in flight. */
void bl_dsa_queue_close(bl_dsa_queue *queue);

#endif
