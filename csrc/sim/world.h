/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A small simulated world for the protocol: one pool, some hosts whose private caches are not
 * coherent with each other, and processes on them that take turns at every verb. One seed is one
 * run: all randomness comes from one generator, so a seed replays a failure.
 *
 *   process --stream--> store buffer --piece by piece, any order between fences--> memory
 *   process <--load---- cache of its host <--on a miss, or by a prefetch at any time-- memory
 *
 * These things can happen at any verb: another process runs; a line leaves some host's cache (a
 * dirty one is written back whole); a line near those in use is prefetched; some pieces of a store
 * buffer arrive in memory; one invalidation completes.
 *
 * The world is weak on purpose: a store fence orders a process's streams but completes nothing; in
 * some runs what is not fenced stays in its buffer until that is full or its process ends; an
 * invalidation completes at the latest at the process's next full fence, and may have happened as
 * early as its last one.
 */
#ifndef BL_SIM_WORLD_H
#define BL_SIM_WORLD_H

#include <signal.h>
#include <ucontext.h>

#include "api/sim.h"
#include "pool/pool.h"
#include "sim/history.h"

enum bl_sim_limit {
    BL_SIM_HOST_COUNT = 8,
    BL_SIM_LIVENESS_COUNT = 4096,
    BL_SIM_LOCK_COUNT = 32,
    BL_SIM_CACHE_LINES = 2048,
    BL_SIM_STORE_COUNT = 24,
    BL_SIM_INVALIDATION_COUNT = 32,
    BL_SIM_RECENT_COUNT = 16,
    BL_SIM_HEARTBEAT_COUNT = 4,
    BL_SIM_STACK_SIZE = 256 << 10
};

/* A line in a host's cache. */
typedef struct bl_sim_line {
    uint8_t data[BL_LINE_SIZE];
    uint64_t dirty;             /* a bit per byte that was stored here and is not in memory */
    uint64_t fetched_at;        /* world step */
    uint32_t piece[BL_SIM_PIECE_COUNT]; /* versions */
    uint32_t line;
    uint32_t by_device;         /* made dirty by DMA */
} bl_sim_line;

typedef struct bl_sim_host {
    uint32_t *place;            /* place of a line in lines, + 1; 0: not cached */
    bl_sim_line *lines;
    uint32_t line_count;
    uint64_t clock_ahead_ns;    /* hosts never compare clocks, so theirs differ, */
    uint64_t clock_since_ns;    /* and since then run faster or slower */
    int32_t clock_fast_1024;    /* by so many parts of 1024 */
    uint32_t boot;              /* how often it has crashed */
    uint32_t over;              /* snapshot: what was written before its last crash */
} bl_sim_host;

/* A streamed line on its way to memory. A process's stores stand in program order. Those of one
 * fence number have no order among them, unless they are plain: memory of hardware coherence keeps
 * their order. */
typedef struct bl_sim_store {
    uint8_t data[BL_LINE_SIZE];
    uint64_t fence_number;
    uint32_t line;
    uint32_t version;
    uint8_t pieces;             /* a bit per 8 bytes not yet in memory */
    uint8_t plain;
} bl_sim_store;

/* A verb on its way to memory; source is what a stream writes, and target what a load fills. */
enum bl_sim_verb_kind {
    BL_SIM_NO_VERB,
    BL_SIM_LOAD,                /* loads bytes as they are seen now */
    BL_SIM_LOAD_LINE,
    BL_SIM_PREFETCH,
    BL_SIM_STREAM,
    BL_SIM_INVALIDATE,
    BL_SIM_FENCE_STORE,
    BL_SIM_FENCE_FULL
};

typedef struct bl_sim_verb {
    enum bl_sim_verb_kind kind;
    uint64_t offset;
    uint64_t size;
    const void *source;
    void *target;
    const bl_site *site;
} bl_sim_verb;

enum bl_sim_state { BL_SIM_READY, BL_SIM_EXITED, BL_SIM_KILLED };

typedef int bl_sim_body(bl_pool *pool, void *argument);

typedef struct bl_sim_process {
    bl_pool pool;
    uint32_t number;
    enum bl_sim_state state;
    uint32_t paused;            /* does not run until another process lets it */
    uint32_t faint;             /* runs, but its heartbeat thread gets no time */
    uint64_t wake_ns;           /* asleep until this time */
    uint64_t late_ns;           /* may stand still for so long after a look at an epoch line */
    uint32_t line;              /* the line that it touches */
    uint64_t verbs_left;        /* dies when this many verbs are done; 0: lives */
    uint64_t fence_number;
    uint64_t fenced_at;         /* world step of its last full fence */
    uint32_t store_count;
    uint32_t invalidation_count;
    uint32_t job_count;         /* DMA jobs not yet done */
    bl_sim_store store[BL_SIM_STORE_COUNT];
    uint32_t invalidation[BL_SIM_INVALIDATION_COUNT];
    bl_sim_verb last_verb;      /* done, or put off; none since it slept */
    bl_sim_verb deferred;       /* put off until the next verb; its source is its own */
    bl_sim_order order;
    /* heartbeats that its thread keeps up; NULL: none */
    struct bl_heartbeat *heartbeat[BL_SIM_HEARTBEAT_COUNT];
    bl_sim_body *body;
    void *argument;
    void *stack;
    ucontext_t context;
} bl_sim_process;

/* A file of a host's runtime directory, and the process that has it locked: NULL when it gave the
 * lock back. */
typedef struct bl_sim_liveness {
    uint64_t nonce;
    bl_sim_process *holder;
    uint32_t host;
    uint32_t removed;
    uint32_t has_devices;
    uint32_t snapshot;          /* what its process had released when it gave the lock back */
} bl_sim_liveness;

typedef struct bl_sim_lock {
    char name[32];
    bl_sim_process *holder;
    uint32_t host;
    uint32_t snapshot;          /* likewise */
} bl_sim_lock;

typedef struct bl_sim_world {
    bl_sim_config config;
    bl_pool pool;               /* as every process sees it, but for the host */
    uint64_t random;
    uint64_t now_ns;
    uint64_t switch_mask;       /* another process runs where random & mask is 0 */
    uint64_t chance_mask;       /* something else happens where random & mask is 0 */
    uint32_t keeps_unfenced;    /* 1: what no fence follows stays in its buffer */
    uint8_t *memory;
    uint8_t *writer;            /* of each line: host + 1, or BL_SIM_MANY */
    uint64_t *stale;            /* loads answered from a copy unlike memory, by site number */
    uint64_t *hits;             /* how often a site did something, by its number */
    uint32_t recent[BL_SIM_RECENT_COUNT]; /* lines touched last: prefetchers look near them */
    uint32_t near_line;         /* the last of them */
    bl_sim_host host[BL_SIM_HOST_COUNT];
    bl_sim_process *process[BL_SIM_PROCESS_COUNT];
    uint32_t process_count;
    bl_sim_process *current;    /* NULL: the caller of bl_sim_world_run */
    bl_sim_liveness *liveness_lock;
    uint32_t liveness_count;
    bl_sim_lock lock[BL_SIM_LOCK_COUNT];
    uint32_t lock_count;
    struct bl_sim_job *jobs;    /* DMA (sim/device.h); NULL before the first */
    uint32_t job_count;
    uint64_t job_ticket;
    bl_sim_history history;
    int32_t result;             /* result of the first process that failed */
    uint32_t stopped;
    uint32_t lawless;           /* 1: breaks the rules of writing on purpose */
    uint64_t heartbeat_ns;      /* when heartbeats are due */
    const bl_site *last_site;   /* that ran */
    uint64_t condition_step;    /* when the last condition was asked, */
    uint64_t condition_count;   /* and how many were in that step */
    struct sigaction fault_before; /* the handler that raw accesses had before this run, */
    struct bl_sim_world *running_before; /* and the world that this thread ran */
    bl_sim_stat stat;
    ucontext_t outside;
} bl_sim_world;

enum { BL_SIM_MANY = 255 };

/* Starts processes in a new world, runs it, and judges the result: its value is that of
 * bl_sim_play. */
typedef struct bl_sim_scenario {
    const char *name;
    int (*play)(bl_sim_world *world);
    uint32_t lane_count;        /* lanes of its pool; 0: a few */
} bl_sim_scenario;

/* xorshift64* is small, fast, and the same everywhere. */
static inline uint64_t bl_sim_random(bl_sim_world *world)
{
    world->random ^= world->random >> 12;
    world->random ^= world->random << 25;
    world->random ^= world->random >> 27;
    return world->random * 0x2545f4914f6cdd1du;
}

/* Return a random number below bound. */
static inline uint64_t bl_sim_below(bl_sim_world *world, uint64_t bound)
{
    return (uint64_t)(((unsigned __int128)bl_sim_random(world) * bound) >> 64);
}

static inline int bl_sim_coherent(const bl_memory *memory, uint64_t offset)
{
    return memory->coherent[bl_interleave_place(&memory->map, offset).device];
}

/* ---- sim/cache.c: what memory, caches and buffers do. Nothing here takes a turn. */

const uint8_t *bl_sim_line_read(bl_sim_world *world, bl_sim_process *process, uint32_t line,
                                uint32_t site_number, const uint32_t **versions);
void bl_sim_line_stream(bl_sim_world *world, bl_sim_process *process, uint32_t line,
                        const void *source, int plain, const bl_site *site);
void bl_sim_line_dirty(bl_sim_world *world, bl_sim_process *process, uint64_t offset,
                       const void *source, uint32_t size, const bl_site *site);
void bl_sim_line_invalidate(bl_sim_world *world, bl_sim_process *process, uint32_t line);
void bl_sim_fence(bl_sim_world *world, bl_sim_process *process);

/* Does some of what a process streamed go on to memory by itself, now or later? */
int bl_sim_drains(const bl_sim_world *world, const bl_sim_process *process);

/* Let one piece of a process that has some, or all of them, arrive in memory. */
void bl_sim_drain(bl_sim_world *world, bl_sim_process *process);
void bl_sim_drain_all(bl_sim_world *world, bl_sim_process *process);

/* Is anything that was streamed to this range still in a buffer? */
int bl_sim_underway(const bl_sim_world *world, uint64_t offset, uint64_t size);

/* Let one of the things happen that happen by themselves. */
void bl_sim_happen(bl_sim_world *world);

uint8_t *bl_sim_memory_line(const bl_sim_world *world, uint32_t line);
bl_sim_line *bl_sim_cached(bl_sim_host *host, uint32_t line);
bl_sim_line *bl_sim_cache_fill(bl_sim_world *world, bl_sim_host *host, uint32_t line);
void bl_sim_cache_drop(bl_sim_world *world, bl_sim_host *host, bl_sim_line *cached);
void bl_sim_settle(bl_sim_world *world, bl_sim_process *process, uint32_t line);
void bl_sim_line_arrive(bl_sim_world *world, const bl_sim_process *process, uint32_t line,
                        const void *source, uint32_t version);

/* ---- sim/order.c: which process may know of which write. */

int bl_sim_history_create(bl_sim_history *history, uint64_t line_count);
void bl_sim_history_destroy(bl_sim_history *history);

/* Return the track of a line, made on first use; the pointer is good until the next call. */
bl_sim_track *bl_sim_track_of(bl_sim_world *world, uint32_t line);
bl_sim_look *bl_sim_look_of(bl_sim_world *world, bl_sim_process *process, uint32_t line);

uint32_t bl_sim_snapshot_new(bl_sim_world *world, const bl_sim_snapshot *known);

/* Return a snapshot of what process knows and has released. */
uint32_t bl_sim_snapshot_take(bl_sim_world *world, bl_sim_process *process);
void bl_sim_learn(bl_sim_world *world, bl_sim_process *process, uint32_t snapshot, uint32_t at);
/* Note that process has seen this version, whole: it knows the version if it knows all that was
 * written before it. */
void bl_sim_learn_seen(bl_sim_process *process, const bl_sim_version *version, uint32_t at);
int bl_sim_knows(const bl_sim_process *process, const bl_sim_version *version);

/* Return the world step since which process knows the version; 0: since longer than can be said. */
uint32_t bl_sim_known_since(const bl_sim_process *process, const bl_sim_version *version);

/* Add a new version of a line that is written. dirty: into a cache, from which it must be
 * flushed. */
uint32_t bl_sim_version_add(bl_sim_world *world, bl_sim_process *process, uint32_t line, int dirty,
                            const bl_site *site);
void bl_sim_note_load(bl_sim_world *world, bl_sim_process *process, uint32_t line,
                      const uint32_t versions[BL_SIM_PIECE_COUNT], const bl_site *site);
void bl_sim_note_invalidate(bl_sim_world *world, bl_sim_process *process, uint32_t line);

/* Note that what process has written is ordered before what it will write; or that it is also
 * complete. */
void bl_sim_note_release(bl_sim_process *process);
void bl_sim_note_full_fence(bl_sim_process *process);

/* ---- sim/owner.c: a process writes a line, which is judged, then noted; a dirty line is about to
 * leave a cache. */

uint32_t bl_sim_note_write(bl_sim_world *world, bl_sim_process *process, uint32_t line, int dirty,
                           const bl_site *site);
void bl_sim_owner_returns(bl_sim_world *world, const bl_sim_line *cached);

/* ---- sim/raw.c: addresses of the pool that fault, and the world that is told of it during a
 * run. */

extern _Thread_local bl_sim_world *bl_sim_running; /* by this thread; NULL: none */

int bl_sim_raw_reserve(bl_sim_world *world);
void bl_sim_raw_release(bl_sim_world *world);
void bl_sim_raw_watch(bl_sim_world *world);
void bl_sim_raw_ignore(bl_sim_world *world);

/* ---- sim/change.c: sites that are changed. */

/* Is site the one that is changed, and in this way? */
int bl_sim_changed(const bl_sim_world *world, const bl_site *site, enum bl_sim_change change);

/* Count a change that would make a difference where site is now. */
void bl_sim_matters(bl_sim_world *world, const bl_site *site, enum bl_sim_change change);

/* Return the same place in the other half of what exists twice; or offset. */
uint64_t bl_sim_other_half(const bl_geometry *g, uint64_t offset, uint64_t size);

/* Is anything different if the process does the second verb first? */
int bl_sim_ordered_pair(const bl_memory *memory, const bl_sim_verb *first,
                        const bl_sim_verb *second);

/* Keep a copy of the verb for later: 0, or -ENOMEM. */
int bl_sim_defer(bl_sim_process *process, const bl_sim_verb *verb);

uint32_t bl_sim_site_number(const bl_site *site);
int bl_sim_is_load(const bl_sim_verb *verb);
int bl_sim_plain(const bl_memory *memory, const bl_sim_verb *verb);

/* ---- sim/verbs.c: the process does what it has put off, before it sleeps or ends. */

void bl_sim_catch_up(bl_sim_world *world);
void bl_sim_sleep(bl_sim_world *world, uint64_t ns);

/* ---- sim/acts.c: what a scenario may do to processes and hosts. */

/* Stop the processes of a host until they are let go on, perhaps forever. */
void bl_sim_pause_host(bl_sim_world *world, uint32_t host);
void bl_sim_resume_host(bl_sim_world *world, uint32_t host);

/* Crash a host: all that runs there is lost; its next boot begins with the next process spawned
 * there. */
void bl_sim_crash_host(bl_sim_world *world, uint32_t host);

/* Change a host's clock: it jumps forward, or runs faster (slower, if negative). */
void bl_sim_clock_jump(bl_sim_world *world, uint32_t host, uint64_t ns);
void bl_sim_clock_rate(bl_sim_world *world, uint32_t host, int32_t fast_1024);

/* ---- sim/heartbeat.c: all heartbeats that are kept up move on. */

void bl_sim_heartbeats(bl_sim_world *world);

/* ---- sim/run.c: worlds. */

/* Create a world with a pool of zeros of this geometry: 0 or -ENOMEM. */
int bl_sim_world_create(bl_sim_world **out, const bl_sim_config *config,
                        const bl_geometry *geometry);
void bl_sim_world_destroy(bl_sim_world *world);

/* Start a process that runs body(its pool, argument): its number, or -ENOSPC, -ENOMEM. A running
 * process may call it. A negative result of body ends the run. */
int bl_sim_spawn(bl_sim_world *world, uint32_t host, bl_sim_body *body, void *argument);

/* Run until every process has exited or was killed: 0, what a body returned, or -ETIME. */
int bl_sim_world_run(bl_sim_world *world);

/* ---- sim/turns.c: turns, time and death. */

/* End the turn: one of the processes that are awake runs next. */
void bl_sim_end_turn(bl_sim_world *world);

uint64_t bl_sim_clock(const bl_sim_world *world, uint32_t host);

/* The running process comes to a verb that touches line: its turn may end here, or the process may
 * die. */
void bl_sim_step(bl_sim_world *world, uint32_t line);

/* The running process waits for ns, or lets others run if that is 0. */
void bl_sim_rest(bl_sim_world *world, uint64_t ns);

/* Kill a process. What it streamed may still arrive, up to some point of its program, which may be
 * in the middle of a line. */
void bl_sim_lose(bl_sim_world *world, bl_sim_process *process);
void bl_sim_kill(bl_sim_world *world, uint32_t process);

/* Kill a process after so many more verbs of its own. */
void bl_sim_kill_after(bl_sim_world *world, uint32_t process, uint64_t verbs);

int bl_sim_alive(const bl_sim_world *world, uint32_t process);

/* Return the running process. */
uint32_t bl_sim_self(const bl_sim_world *world);

/* Is a process dead or at its end, with nothing of it on its way any more? */
static inline int bl_sim_gone(const bl_sim_process *process)
{
    return process->state != BL_SIM_READY && process->store_count == 0 && process->job_count == 0;
}

#endif
