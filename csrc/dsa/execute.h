/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Executes a descriptor on the CPU as the device would: with the same checks, the same status codes
 * and the same record. The engine uses it for work that a device could not do, and so does the
 * queue in software that tests have (tests/native/dsa_soft.c; cffi reads this header for it).
 *
 * It accesses memory by address, the pool's too, and without sites: it stands for a device, which
 * has no hosts, offsets or verbs, and whose accesses come at any time. The submitter does the cache
 * maintenance before and after (transfer/device_range.h), as for a real device; the simulator,
 * which checks that, has a device of its own
 * (tests/sim/native/device.h).
 */
#ifndef BL_DSA_EXECUTE_H
#define BL_DSA_EXECUTE_H

#include "api/dsa.h"

enum bl_dsa_upset_kind {
    BL_DSA_INJECT_NONE = 0,
    BL_DSA_INJECT_FAULT,         /* a page fault */
    BL_DSA_INJECT_ERROR          /* a hardware error */
};

/* The fault to inject into one descriptor. */
typedef struct bl_dsa_injected {
    uint32_t kind;
    uint32_t at;                /* the fault comes after this many bytes; past the end: no fault */
    uint32_t is_write;          /* 1: a faulting write */
} bl_dsa_injected;

/* The context of an execution: the queue's limits, and the pool whose device failures are page
 * faults, or NULL. */
typedef struct bl_dsa_setting {
    const bl_dsa_limits *limits;
    const bl_pool *pool;
    uint32_t in_batch;
} bl_dsa_setting;

/* Check a descriptor before it is executed. Returns a bl_dsa_status if it is invalid, or
 * BL_DSA_NONE. */
uint32_t bl_dsa_refusal(const bl_dsa_setting *setting, const bl_dsa_descriptor *descriptor,
                        bl_dsa_record *record);

/* Execute a descriptor. The queue itself handles batches and drains. injected may be NULL. */
void bl_dsa_execute(const bl_dsa_setting *setting, const bl_dsa_descriptor *descriptor,
                    const bl_dsa_injected *injected, bl_dsa_record *record);

#endif
