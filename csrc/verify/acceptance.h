/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The acceptance test of a pool's memory: two sides, a and b, on two hosts or one, run litmus
 * programs against each other in lockstep and count violations.
 *
 *   verify/talk.c    how the two sides meet and stay in step
 *   verify/litmus.c  the programs
 *   verify/verify.c  where they run, for how long, and their results
 *
 * Invariants: the sides write to free stripes of an idle pool only (one of each device), each to
 * its own control lines; both get every result; a leads, b follows.
 */
#ifndef BL_VERIFY_H
#define BL_VERIFY_H

#include "api/verify.h"
#include "coherence/coherence.h"
#include "pool/pool.h"

enum bl_acceptance_constant {
    BL_ACCEPTANCE_AREA = 4096,  /* bytes of one trial */
    BL_ACCEPTANCE_AREA_COUNT = 4,
    BL_ACCEPTANCE_PAIRS = 16,   /* pairs of lines in a trial of store buffering */
    BL_ACCEPTANCE_UNITS = 32,   /* stores in a trial of tearing */
    BL_ACCEPTANCE_BATCH = 4,    /* trials of one kind in a row */
    BL_ACCEPTANCE_PAYLOAD = 4,  /* lines of a payload */
    BL_ACCEPTANCE_WORDS = 2     /* words that a step can carry */
};

/* The line that one side writes at each step. Each side has two such lines and alternates between
 * them: the other side may still have to read the previous one, but never an older one. */
typedef struct bl_acceptance_line {
    uint64_t nonce;             /* identifies this run of this side */
    uint64_t peer_nonce;        /* identifies the peer's run; 0: not known yet */
    uint64_t step;
    uint64_t word[BL_ACCEPTANCE_WORDS];
    uint64_t reserved[2];
    uint32_t reserved_tail;
    uint32_t check;
} bl_acceptance_line;

struct bl_acceptance {
    bl_pool pool;               /* as opened, but all devices with software coherence */
    bl_acceptance_config config;
    uint64_t epoch;             /* epoch of the last server; a change ends the test */
    uint64_t scratch[BL_DEVICE_COUNT_MAX]; /* offsets, on the devices with a stripe for it */
    uint32_t device[BL_DEVICE_COUNT_MAX];
    uint32_t device_count;
    uint32_t raw_width;         /* the most bytes of one raw store */
    uint64_t nonce;
    uint64_t peer_nonce;
    uint64_t step;
    uint64_t number;            /* number of the trial */
    uint64_t random;
    uint64_t stopped;
    bl_acceptance_line received; /* the peer's line of this step */
    bl_acceptance_cell *cells;
    uint32_t cell_count;
};

/* ---- verify/talk.c. Results: 0, -ECANCELED (stopped), -ETIMEDOUT (no peer appeared) or -EPIPE
 * (the peer stopped responding). */

/* Wait for the peer's first line. */
int bl_acceptance_meet(bl_acceptance *acceptance);

/* Publish the next step, after all earlier accesses of this side are complete. */
void bl_acceptance_publish(bl_acceptance *acceptance, uint64_t first, uint64_t second);

/* Return 1 if the peer has published the current step plus ahead. Its line is then in received. */
int bl_acceptance_poll(bl_acceptance *acceptance, uint32_t ahead);
int bl_acceptance_receive(bl_acceptance *acceptance);

/* End the exchange: wait until the peer's lines are clear, if it responds; clear this side's
 * lines. */
void bl_acceptance_finish(const bl_acceptance *acceptance);
void bl_acceptance_fall_silent(const bl_acceptance *acceptance);

/* ---- verify/litmus.c: one trial of a cell's kind; both sides get its counts. */
int bl_acceptance_trial(bl_acceptance *acceptance, bl_acceptance_cell *cell);

#endif
