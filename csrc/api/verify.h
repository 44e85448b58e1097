/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The calls of the acceptance test of a pool's memory (`beluga verify`, verify/acceptance.h). The
 * Python half is beluga/verify.
 */
#ifndef BL_API_VERIFY_H
#define BL_API_VERIFY_H

#include "api/pool.h"

enum bl_acceptance_test {
    BL_ACCEPTANCE_MESSAGE_PASSING = 0,
    BL_ACCEPTANCE_STORE_BUFFERING,
    BL_ACCEPTANCE_TEARING_8,    /* 8 bytes; each further test has twice as many */
    BL_ACCEPTANCE_TEARING_16,
    BL_ACCEPTANCE_TEARING_32,
    BL_ACCEPTANCE_TEARING_64,
    BL_ACCEPTANCE_LATE_EVICTION,
    BL_ACCEPTANCE_PREFETCH,
    BL_ACCEPTANCE_TEST_COUNT
};

/* The two modes: by the rules of software coherence; by plain loads and stores. */
enum bl_acceptance_mode {
    BL_ACCEPTANCE_SOFTWARE = 0,
    BL_ACCEPTANCE_BARE,
    BL_ACCEPTANCE_MODE_COUNT
};

typedef struct bl_acceptance_config {
    uint64_t duration_ns;       /* how long the tests repeat, at least once; side 0's value is
                                 * used */
    uint64_t patience_ns;       /* how long the other side may be silent */
    uint32_t role;              /* 0: side a, which leads; 1: side b */
    uint32_t tests;             /* bit per bl_acceptance_test; side 0's value is used */
    uint32_t modes;             /* bit per bl_acceptance_mode; side 0's value is used */
    uint32_t reserved;
} bl_acceptance_config;

/* The result of one test, for one initiator in one mode on one device. */
typedef struct bl_acceptance_cell {
    uint64_t trials;
    uint64_t violations;
    uint64_t rejected;          /* torn lines that failed their check: legal */
    uint32_t test;
    uint32_t mode;
    uint32_t initiator;         /* role of the side that writes; in store buffering both do */
    uint32_t device;            /* index in the pool */
    uint32_t place;             /* index among the devices that are tested */
    uint32_t reserved;
} bl_acceptance_cell;

typedef struct bl_acceptance bl_acceptance;

/* Create one side of a test of an idle pool. Returns 0; -EBUSY (a server is running, or was
 * killed); -ENOSPC (a device has no free stripe near its end); -ENOMEM. Nothing is written yet. */
int bl_acceptance_create(const bl_pool *pool, const bl_acceptance_config *config,
                         bl_acceptance **out);
void bl_acceptance_destroy(bl_acceptance *acceptance);

/* Run it with the other side, which another process or thread runs. Returns 0; -ETIMEDOUT (it did
 * not come); -EPIPE (it stopped responding); -ECANCELED (bl_acceptance_stop, from any thread);
 * -EBUSY (a server took the pool meanwhile). Afterwards the test's lines are zero again. */
int bl_acceptance_run(bl_acceptance *acceptance);
void bl_acceptance_stop(bl_acceptance *acceptance);

/* Return the cells and their number. The cells of tests that did not run have no trials. */
uint32_t bl_acceptance_cells(const bl_acceptance *acceptance, const bl_acceptance_cell **out);

#endif
