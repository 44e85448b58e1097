/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Intel DSA. Queues take raw descriptors (format/dsa.h); the engine makes them of plans.
 * In _core alone: the simulator has a device of its own (sim/device.h). cffi reads it too.
 */
#ifndef BL_API_DSA_H
#define BL_API_DSA_H

#include "api/transfer.h"
#include "format/dsa.h"

/* ---- Queues: a portal that takes descriptors, whatever is behind it. */

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

/* What befalls the software queue, in tests: chances out of 65536. All zero: nothing. */
typedef struct bl_dsa_faults {
    uint64_t seed;
    uint32_t full;              /* a descriptor finds the queue full, */
    uint32_t full_run;          /* and so do as many after it, at most */
    uint32_t fault;             /* a page fault somewhere in a transfer */
    uint32_t list_fault;        /* a page fault in the list of a batch */
    uint32_t error;             /* a hardware error */
    uint32_t reorder;           /* descriptors run out of order, as far as they may */
    uint32_t late;              /* a record is written later than others */
    uint32_t delay_us;          /* before every descriptor */
} bl_dsa_faults;

/* A queue that a thread of this process serves. pool, or NULL, is one whose failing devices
 * are page faults; else they end the process. faults may be NULL. 0, -EINVAL, -ENOMEM. */
int bl_dsa_soft_open(const bl_pool *pool, const bl_dsa_limits *limits,
                     const bl_dsa_faults *faults, bl_dsa_queue **out);

/* ---- The engine: plans into descriptors. One thread at a time. */

typedef struct bl_dsa_engine bl_dsa_engine;
typedef struct bl_dsa_transfer bl_dsa_transfer;

/* Who flushes the host's cache: of what was written, after it; of what will be read, before it. */
enum bl_dsa_flush {
    BL_DSA_FLUSH_NONE = 0,
    BL_DSA_FLUSH_CPU,
    BL_DSA_FLUSH_DEVICE
};

typedef struct bl_dsa_rules {
    uint32_t after_write;       /* bl_dsa_flush */
    uint32_t before_read;
    uint32_t write_to_cache;    /* 1: cache control on for what goes to the pool */
    uint32_t reserved;
} bl_dsa_rules;

typedef struct bl_dsa_stat {
    uint64_t descriptors;       /* submitted, those in batches too */
    uint64_t batches;
    uint64_t full;              /* answers that the queue is full */
    uint64_t faults;            /* page faults, resumed */
    uint64_t by_hand;           /* descriptors that the CPU executed, for want of the device */
} bl_dsa_stat;

/* The queue is the engine's from now on. 0 or -ENOMEM. */
int bl_dsa_engine_open(const bl_pool *pool, bl_dsa_queue *queue, const bl_dsa_limits *limits,
                       const bl_dsa_rules *rules, bl_dsa_engine **out);

/* Waits some seconds for what is out, and closes the queue; transfers that had not ended have
 * -ECANCELED. A device that does not answer keeps the memory that it may still write to. In a
 * forked child nothing but memory is given back. */
void bl_dsa_engine_close(bl_dsa_engine *engine);

/* Begin to execute a plan, whose arrays and memory stay until it has ended. -EINVAL: the plan
 * contradicts itself or leaves the pool; -ENOMEM; -BL_ERROR_FORKED. Nothing has moved then. */
int bl_dsa_start(bl_dsa_engine *engine, const bl_plan *plan, uint32_t is_read,
                 bl_dsa_transfer **out);

/* See what has ended, and send more out: whether anything had. Never waits. */
int bl_dsa_poll(bl_dsa_engine *engine);

/* Until the transfer has ended: 0, or -BL_ERROR_TIMEOUT: it goes on; or -BL_ERROR_FORKED. */
int bl_dsa_wait(bl_dsa_engine *engine, const bl_dsa_transfer *transfer, uint64_t timeout_ns);

int bl_dsa_ended(const bl_dsa_transfer *transfer);

/* Of one that has ended: 0; -EBADMSG: bytes read are not those summed; -BL_ERROR_DEVICE_FAULT;
 * -EFAULT: engine memory that is not there; -EIO: nobody could execute a descriptor; -ENOMEM;
 * -ECANCELED. */
int bl_dsa_status(const bl_dsa_transfer *transfer);

/* Of one that has ended, or whose engine is closed. */
void bl_dsa_free(bl_dsa_transfer *transfer);

void bl_dsa_engine_stat(const bl_dsa_engine *engine, bl_dsa_stat *out);

#endif
