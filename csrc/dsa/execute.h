/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A descriptor executed by a CPU, as the device would: the same checks in the same words, the same
 * record. For the software queue, and for what a device could not be got to do.
 *
 * It reaches memory by address, the pool's too, and without sites: it stands for a device, which
 * knows nothing of hosts, offsets or verbs, and whose every access may come at any time. What it is
 * owed before and after is for who submits (transfer/device_range.h), here as with the real one;
 * the simulator, which judges that, has a device of its own (sim/device.h).
 */
#ifndef BL_DSA_EXECUTE_H
#define BL_DSA_EXECUTE_H

#include "api/dsa.h"
#include "coherence/memory.h"

enum bl_dsa_upset_kind {
    BL_DSA_UPSET_NONE = 0,
    BL_DSA_UPSET_FAULT,         /* a page fault */
    BL_DSA_UPSET_ERROR          /* the device fails */
};

/* What goes wrong with one descriptor. */
typedef struct bl_dsa_upset {
    uint32_t kind;
    uint32_t at;                /* after this many bytes; past the end: not at all */
    uint32_t is_write;          /* the fault */
} bl_dsa_upset;

/* Where it is executed: the queue's limits; the pool whose failing is a page fault, or NULL. */
typedef struct bl_dsa_place {
    const bl_dsa_limits *limits;
    const bl_memory *memory;
    uint32_t in_batch;
} bl_dsa_place;

/* Why the descriptor cannot be executed, before anything is: a bl_dsa_status, or BL_DSA_NONE. */
uint32_t bl_dsa_refusal(const bl_dsa_place *place, const bl_dsa_descriptor *descriptor,
                        bl_dsa_record *record);

/* Execute all but batches and drains, which are the queue's. upset may be NULL. */
void bl_dsa_execute(const bl_dsa_place *place, const bl_dsa_descriptor *descriptor,
                    const bl_dsa_upset *upset, bl_dsa_record *record);

#endif
