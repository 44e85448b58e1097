/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The history of a simulated run: which process may know of which write. The oracles judge by it,
 * besides values.
 *
 *   version    one write of one line. Every piece of memory and of a cached copy names its own.
 *   clock      of a process: counts its versions. *Released* is what its last fence covered: those
 *              are in memory before anything it streams later.
 *   known      of a process, for each process: versions up to this clock are published, and it has
 *              believed a line that says so, or knows it from its kernel (a lock, a liveness lock).
 *
 * Believing a version passes on what its writer had released and what its writer knew; and the
 * version itself, if nothing that its writer wrote before it is missing. The time of a belief is
 * that of the load: an invalidation counts for what was believed before it.
 */
#ifndef BL_SIM_ORDER_H
#define BL_SIM_ORDER_H

#include "coherence/coherence.h"

enum bl_sim_order_limit {
    BL_SIM_PROCESS_COUNT = 32,
    BL_SIM_PIECE_COUNT = 8,     /* pieces of a line: what an 8-byte store writes */
    BL_SIM_RAISE_COUNT = 16,
    BL_SIM_UNFLUSHED = -1       /* clock of a dirty line that nobody has flushed */
};

typedef struct bl_sim_version {
    const bl_site *site;
    uint32_t line;
    uint32_t process;
    uint32_t clock;
    uint32_t released;          /* snapshot of what believing it passes on */
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

/* The looks of a process at a line. Times are world steps; an invalidation's time is that of the
 * full fence before it: it does not come after a load that is later than that. */
typedef struct bl_sim_look {
    const bl_site *site;        /* site of the last load */
    uint32_t loaded_at;         /* 0: never, or judged already */
    uint32_t invalidated_at;    /* when the last invalidation that was complete at that load was */
    uint32_t pending_at;        /* when the last invalidation was issued */
    uint32_t pending_fence;     /* full fences its process had done then, + 1; 0: none is pending */
    uint32_t seen;              /* the newest version in what was loaded */
    uint32_t believed;          /* the last version that was believed */
    uint32_t arrived;           /* the newest version in memory then */
    uint32_t issued;            /* the last version anywhere then */
    uint32_t fenced_at;         /* its process's last full fence then */
    uint32_t streamed_at;       /* when it last wrote the line itself */
} bl_sim_look;

typedef struct bl_sim_raise {
    uint32_t clock;
    uint32_t at;
} bl_sim_raise;

/* The knowledge of a process, and what it has written. */
typedef struct bl_sim_order {
    bl_sim_snapshot known;      /* its own clock here is what it has released */
    uint32_t streamed[BL_SIM_PROCESS_COUNT]; /* clocks of others' versions that were believed */
    uint32_t clock;
    uint32_t snapshot;          /* snapshot of known; 0: not taken since known changed */
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
