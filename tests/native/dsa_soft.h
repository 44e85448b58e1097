/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A queue of a DSA in software, with faults: a portal like a device's, served by a thread of this
 * process. It accepts the same raw descriptors and writes the same records (never during their
 * submission), so that machines without a device run the same code. Its descriptors end with its
 * process. The Python half is tests/support/soft_dsa.py.
 */
#ifndef BL_DSA_SOFT_H
#define BL_DSA_SOFT_H

#include "dsa/execute.h"

/* The probability of each fault, in units of 1/65536. All zero: no faults. */
typedef struct bl_dsa_faults {
    uint64_t seed;
    uint32_t full;              /* a full queue at a submission, */
    uint32_t full_run;          /* and at up to this many that follow */
    uint32_t fault;             /* a page fault somewhere in a transfer */
    uint32_t list_fault;        /* a page fault in the list of a batch */
    uint32_t error;             /* a hardware error */
    uint32_t reorder;           /* descriptors run out of order, as far as they may */
    uint32_t late;              /* a record is written later than others */
    uint32_t delay_us;          /* before every descriptor */
} bl_dsa_faults;

/* bl_dsa_refusal() and bl_dsa_execute() of the build whose engine uses the queue: that build guards
 * accesses to its pool. */
typedef struct bl_dsa_executor {
    const bl_pool *pool;        /* NULL: a failing device ends the process */
    uint32_t (*refusal)(const bl_dsa_setting *setting, const bl_dsa_descriptor *descriptor,
                        bl_dsa_record *record);
    void (*execute)(const bl_dsa_setting *setting, const bl_dsa_descriptor *descriptor,
                    const bl_dsa_injected *injected, bl_dsa_record *record);
} bl_dsa_executor;

/* Open a queue; its close completes the descriptors in it. 0, -EINVAL or -ENOMEM. */
int bl_dsa_soft_open(const bl_dsa_executor *executor, const bl_dsa_limits *limits,
                     const bl_dsa_faults *faults, bl_dsa_queue **out);

#endif
