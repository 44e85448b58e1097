/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The engine for Intel DSA, which turns plans into descriptors. One thread uses it at a time. The
 * simulator does not have it, but a device of its own (tests/sim/native/device.h). cffi reads it
 * too. The Python half is beluga/transfer/dsa.py.
 */
#ifndef BL_API_DSA_H
#define BL_API_DSA_H

#include "api/dsa_queue.h"
#include "api/transfer.h"

typedef struct bl_dsa_engine bl_dsa_engine;
typedef struct bl_dsa_transfer bl_dsa_transfer;

/* How the host's cache is flushed: after a write, and before a read. */
enum bl_dsa_flush {
    BL_DSA_FLUSH_NONE = 0,
    BL_DSA_FLUSH_CPU,
    BL_DSA_FLUSH_DEVICE
};

typedef struct bl_dsa_rules {
    uint32_t after_write;       /* bl_dsa_flush */
    uint32_t before_read;
    uint32_t write_to_cache;    /* 1: cache control for writes to the pool */
    uint32_t reserved;
} bl_dsa_rules;

typedef struct bl_dsa_stat {
    uint64_t descriptors;       /* submitted, those in batches too */
    uint64_t batches;
    uint64_t full;              /* submissions to a full queue */
    uint64_t faults;            /* page faults, resumed */
    uint64_t by_cpu;            /* descriptors that the CPU executed in place of the device */
} bl_dsa_stat;

/* Open an engine, which takes ownership of the queue. Returns 0 or -ENOMEM. */
int bl_dsa_engine_open(const bl_pool *pool, bl_dsa_queue *queue, const bl_dsa_limits *limits,
                       const bl_dsa_rules *rules, bl_dsa_engine **out);

/* Wait some seconds for descriptors in flight, and close the queue; unfinished transfers get
 * -ECANCELED. If the device does not complete them, the memory that it may still write to is not
 * freed. A forked child only frees memory. */
void bl_dsa_engine_close(bl_dsa_engine *engine);

/* Start a plan; its arrays and memory must stay valid until it has ended. Returns 0; -EINVAL: the
 * plan is inconsistent or outside the pool; -ENOMEM; or -BL_ERROR_FORKED. After an error nothing
 * was copied. */
int bl_dsa_start(bl_dsa_engine *engine, const bl_plan *plan, uint32_t is_read,
                 bl_dsa_transfer **out);

/* Handle completions and submit more descriptors, without waiting. Returns 1 if there was a
 * completion or a submission. */
int bl_dsa_poll(bl_dsa_engine *engine);

/* Wait until the transfer has ended. Returns 0; -BL_ERROR_TIMEOUT: it is still in progress; or
 * -BL_ERROR_FORKED. */
int bl_dsa_wait(bl_dsa_engine *engine, const bl_dsa_transfer *transfer, uint64_t timeout_ns);

int bl_dsa_ended(const bl_dsa_transfer *transfer);

/* Return the status of a transfer that has ended: 0; -EBADMSG: the bytes differ from their
 * checksums; -BL_ERROR_DEVICE_FAULT; -EFAULT: engine memory that is not mapped; -EIO: neither
 * device nor CPU could execute a descriptor; -ENOMEM; -ECANCELED. */
int bl_dsa_status(const bl_dsa_transfer *transfer);

/* Free a transfer that has ended, or whose engine is closed. */
void bl_dsa_free(bl_dsa_transfer *transfer);

void bl_dsa_engine_stat(const bl_dsa_engine *engine, bl_dsa_stat *out);

/* Copy one run in one stripe and wait for it, for measurements. Offset and size are multiples of a
 * line. */
int bl_dsa_write_one(bl_dsa_engine *engine, uint64_t offset, void *buffer, uint64_t size);
int bl_dsa_read_one(bl_dsa_engine *engine, uint64_t offset, void *buffer, uint64_t size);

#endif
