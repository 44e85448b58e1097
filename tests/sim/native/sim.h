/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The simulator's own calls: a run of a scenario, its sites, and its verdicts (tests only). The
 * Python half is tests/sim/simulator.py.
 */
#ifndef BL_SIM_H
#define BL_SIM_H

#include <stdint.h>

/* Verdicts of the oracles, as negative results of a run; bl_sim_stat's report has details. */
enum bl_sim_verdict {
    BL_SIM_COHERENCE = 3001,    /* bytes were used that were not published or not invalidated */
    BL_SIM_OWNERSHIP = 3002,    /* a line had two writers at a time */
    BL_SIM_RAW_ACCESS = 3003    /* an address of the pool was used without a verb */
};

/* The coherence of the devices; mixed: the seed makes every other one of hardware coherence;
 * metadata: the pool has a metadata device, which alone is of hardware coherence. */
enum bl_sim_coherence {
    BL_SIM_SOFTWARE = 0,
    BL_SIM_COHERENT = 1,
    BL_SIM_MIXED = 2,
    BL_SIM_METADATA = 3
};

/* How a run changes one site. A range's first or last line is skipped only if the range has more;
 * the other half is that of a structure that the server has twice. */
enum bl_sim_change {
    BL_SIM_SKIPPED = 0,         /* does nothing (a check passes, a load finds zeros) */
    BL_SIM_DEFERRED = 1,        /* stores, flushes and fences take effect after the process's next
                                 * verb */
    BL_SIM_FIRST_LINE = 2,      /* skips the first line of its range */
    BL_SIM_LAST_LINE = 3,       /* skips the last line */
    BL_SIM_LINE_MORE = 4,       /* streams its last line again, after it */
    BL_SIM_OTHER_HALF = 5,      /* applies to the same place in the other half */
    BL_SIM_TRUE = 6,            /* a condition counts as true: BL_CONDITION() */
    BL_SIM_FALSE = 7,           /* a condition counts as false */
    BL_SIM_CHANGE_COUNT = 8
};

/* The configuration of one run. Zero means the default where one is named. */
typedef struct bl_sim_config {
    uint64_t seed;
    uint64_t step_limit;        /* verbs until the run counts as stuck; default: four million */
    uint32_t skip_site;         /* number of the site to change; 0: none */
    uint32_t change;            /* how: bl_sim_change */
    uint32_t coherent;          /* bl_sim_coherence */
    uint64_t *idle;             /* if not NULL: for each site, how often a fence or an invalidation
                                 * had no effect; room for bl_sim_site_count() + 1 */
    uint64_t *matters;          /* if not NULL: for each site and change, how often the change would
                                 * have made a difference; room for (bl_sim_site_count() + 1) times
                                 * BL_SIM_CHANGE_COUNT */
} bl_sim_config;

typedef struct bl_sim_stat {
    uint64_t steps;             /* verbs, counted by line */
    uint64_t switches;
    uint64_t evictions;
    uint64_t prefetches;
    uint64_t pieces;            /* 8-byte pieces that arrived in memory */
    uint64_t stale_loads;       /* loads answered from a copy that differs from memory */
    uint64_t dirty_invalidations; /* invalidations that would overwrite memory with stores (D4) */
    uint64_t shared_lines;      /* lines outside of data stripes that more than one host streamed */
    uint64_t torn_lines;        /* lines that a scenario rejected */
    uint64_t deaths;            /* deaths of processes; a host's crash is one for each of them */
    uint64_t host_crashes;
    uint64_t takeovers;         /* servers that began to serve */
    uint64_t device_lines;      /* read or written by DMA */
    uint64_t results;           /* the scenario's own count: messages, calls, blocks */
    char report[256];           /* the report of the oracle that ended the run, or "" */
} bl_sim_stat;

/* A verb or check in the source. */
typedef struct bl_sim_site {
    const char *file;
    const char *function;
    const char *verb;
    uint32_t line;
    uint32_t order;             /* increases along the source, also within a line */
    uint32_t number;            /* 1 .. bl_sim_site_count(); of this build only */
} bl_sim_site;

uint32_t bl_sim_site_count(void);
int bl_sim_site_get(uint32_t number, bl_sim_site *out);

/* Return a scenario's name: NULL after the last. */
const char *bl_sim_scenario_name(uint32_t index);

/* Run a scenario: 0; -ETIME (no progress); -EBADMSG (wrong bytes); -ENOENT (no such scenario); or
 * the error of a protocol call that had to succeed. stale and hits, if not NULL, have room for
 * bl_sim_site_count() + 1 numbers each: for each site, loads that were stale, and how often that
 * mattered (for a check: how often its condition was false). */
int bl_sim_play(const char *scenario, const bl_sim_config *config, bl_sim_stat *stat,
                uint64_t *stale, uint64_t *hits);

#endif
