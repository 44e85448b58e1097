/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The faults of the software queue, for tests. Only _sim has them (cffi reads this header, too); in
 * _core the queue has no faults.
 */
#ifndef BL_DSA_FAULTS_H
#define BL_DSA_FAULTS_H

#include "api/dsa_queue.h"

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

/* Open a software queue with these faults. A failing device of a pool ends the process. 0, -EINVAL
 * or -ENOMEM. */
int bl_dsa_faults_open(const bl_dsa_limits *limits, const bl_dsa_faults *faults,
                       bl_dsa_queue **out);

#endif
