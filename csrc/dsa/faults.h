/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What befalls the software queue in tests, which find it in _sim; cffi reads it too. In _core
 * nothing does.
 */
#ifndef BL_DSA_WEATHER_H
#define BL_DSA_WEATHER_H

#include "api/dsa_queue.h"

/* Chances out of 65536. All zero: nothing. */
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

/* A software queue in this faults. Failing devices of a pool end the process. 0, -EINVAL or
 * -ENOMEM. */
int bl_dsa_faults_open(const bl_dsa_limits *limits, const bl_dsa_faults *faults,
                        bl_dsa_queue **out);

#endif
