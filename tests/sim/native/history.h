/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The history of a simulated run: which writes each process has knowledge of, in the sense of
 * happens-before. The oracles use it in addition to values.
 *
 *   version    one write of one line. Every piece in memory or in a cache has the version that
 *              wrote it.
 *   clock      of a process: counts its versions. *Released* are the versions that its last fence
 *              covered: they are in memory before anything that it streams later.
 *   known      of a process, for each process: versions up to this clock are published, and the
 *              process has accepted a line that publishes them, or learned it from its kernel (a
 *              lock).
 *
 * Accepting a version (bl_believe) transfers what its writer had released and what its writer knew;
 * and the version itself, if no earlier write of its writer is missing. The time of the acceptance
 * is that of the load: an invalidation covers what was accepted before it.
 */
#ifndef BL_SIM_ORDER_H
#define BL_SIM_ORDER_H

#include "coherence/coherence.h"

enum bl_sim_order_limit {
    BL_SIM_PROCESS_COUNT = 32,
    BL_SIM_PIECE_COUNT = 8,     /* pieces of a line: 8 bytes each */
    BL_SIM_RAISE_COUNT = 16,
    BL_SIM_UNFLUSHED = -1       /* clock of a dirty line that was not flushed */
};

typedef struct bl_sim_version {
    const bl_site *site;
    uint32_t line;
    uint32_t process;
    uint32_t clock;
    uint32_t released;          /* snapshot that its acceptance transfers */
} bl_sim_version;

/* The knowledge of processes at one time. */
typedef struct bl_sim_snapshot {
    uint32_t clock[BL_SIM_PROCESS_COUNT];
} bl_sim_snapshot;

/* A line that some process touched. */
typedef struct bl_sim_track {
    uint32_t issued;            /* the last version, wherever its bytes are */
    uint32_t piece[BL_SIM_PIECE_COUNT]; /* versions of the bytes in memory */
} bl_sim_track;

/* The loads of a line by a process. Times are world steps; an invalidation has the time of the full
 * fence before it, since it is not ordered after later loads. */
typedef struct bl_sim_look {
    const bl_site *site;        /* site of the last load */
    uint32_t loaded_at;         /* 0: never, or judged already */
    uint32_t invalidated_at;    /* time of the last invalidation that was complete at that load */
    uint32_t pending_at;        /* time of the last issued invalidation */
    uint32_t pending_fence;     /* 1 + full fences of its process then; 0: none is pending */
    uint32_t seen;              /* newest version in the loaded bytes */
    uint32_t believed;          /* the last accepted version */
    uint32_t arrived;           /* newest version in memory at that time */
    uint32_t issued;            /* last version anywhere at that time */
    uint32_t fenced_at;         /* time of the process's last full fence then */
    uint32_t streamed_at;       /* when it last wrote the line itself */
} bl_sim_look;

typedef struct bl_sim_raise {
    uint32_t clock;
    uint32_t at;
} bl_sim_raise;

/* The knowledge of a process, and what it has written. */
typedef struct bl_sim_order {
    bl_sim_snapshot known;      /* its own element: what it has released */
    uint32_t streamed[BL_SIM_PROCESS_COUNT]; /* clocks of accepted versions of other processes */
    uint32_t clock;
    uint32_t snapshot;          /* snapshot of known; 0: known has changed since */
    uint32_t fences;            /* full fences */
    uint32_t streamed_at;       /* world step of its last write, */
    uint32_t touched_at;        /* and of its last load or invalidation */
    uint32_t look_count;
    bl_sim_look *looks;         /* by track */
    bl_sim_raise raise[BL_SIM_PROCESS_COUNT][BL_SIM_RAISE_COUNT];
    uint32_t raises[BL_SIM_PROCESS_COUNT];
} bl_sim_order;

/* The history of a world. Number 0 of each array is nothing: never written, nothing known. */
typedef struct bl_sim_history {
    bl_sim_version *versions;
    bl_sim_snapshot *snapshots;
    bl_sim_track *tracks;
    uint32_t *track_of;         /* by line; 0: no process touched it */
    uint32_t version_count, version_room;
    uint32_t snapshot_count, snapshot_room;
    uint32_t track_count, track_room;
} bl_sim_history;

#endif
