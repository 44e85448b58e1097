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
 * These events may occur at any verb: another process runs; a line is evicted from some host's
 * cache (a dirty one is written back whole); a line near those in use is prefetched; some pieces of
 * a store buffer arrive in memory; one invalidation completes.
 *
 * The memory model is weak on purpose: a store fence orders a process's streams but completes
 * nothing; in some runs unfenced stores stay in the buffer until it is full or the process ends; an
 * invalidation completes at the latest at the process's next full fence, and may take effect as
 * early as its last one.
 */
#ifndef BL_SIM_WORLD_H
#define BL_SIM_WORLD_H

#include <signal.h>
#include <ucontext.h>

#include "sim/native/sim.h"
#include "pool/pool.h"
#include "sim/native/history.h"

enum bl_sim_limit {
    BL_SIM_HOST_COUNT = 8,
    BL_SIM_LIVENESS_COUNT = 4096,
    BL_SIM_LOCK_COUNT = 32,
    BL_SIM_SLEEPER_COUNT = 16,
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
    uint64_t dirty;             /* a bit per byte that was stored here and is not in memory yet */
    uint64_t fetched_at;        /* world step */
    uint32_t piece[BL_SIM_PIECE_COUNT]; /* versions */
    uint32_t line;
    uint32_t by_device;         /* 1: made dirty by DMA */
} bl_sim_line;

typedef struct bl_sim_host {
    uint32_t *place;            /* place of a line in lines, + 1; 0: not cached */
    bl_sim_line *lines;
    uint32_t line_count;
    uint64_t clock_ahead_ns;    /* hosts never compare clocks, so clocks differ, */
    uint64_t clock_since_ns;    /* and from this time on run faster or slower, */
    int32_t clock_fast_1024;    /* by this many parts of 1024 */
    uint32_t boot;              /* number of crashes so far */
    uint32_t over;              /* snapshot: the writes before its last crash */
} bl_sim_host;

/* A streamed line in a store buffer. A process's stores are in program order. Stores with the same
 * fence number may arrive in any order, except plain stores to memory of hardware coherence. */
typedef struct bl_sim_store {
    uint8_t data[BL_LINE_SIZE];
    uint64_t fence_number;
    uint32_t line;
    uint32_t version;
    uint8_t pieces;             /* a bit per 8 bytes not yet in memory */
    uint8_t plain;
} bl_sim_store;

/* A verb with its arguments; source is for streams, target for loads. */
enum bl_sim_verb_kind {
    BL_SIM_NO_VERB,
    BL_SIM_LOAD,                /* loads bytes through the cache */
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
    uint32_t leader;            /* of a thread: the process that it belongs to; else number */
    enum bl_sim_state state;
    uint32_t paused;            /* 1: does not run until another process resumes it */
    uint32_t faint;             /* 1: runs, but its heartbeat thread does not */
    uint64_t wake_ns;           /* asleep until this time */
    uint64_t late_ns;           /* the longest pause after a read of an epoch line */
    uint32_t line;              /* the line that it accesses */
    uint64_t verbs_left;        /* dies after this many more verbs; 0: lives */
    uint64_t fence_number;
    uint64_t fenced_at;         /* world step of its last full fence */
    uint32_t store_count;
    uint32_t invalidation_count;
    uint32_t job_count;         /* unfinished DMA jobs */
    bl_sim_store store[BL_SIM_STORE_COUNT];
    uint32_t invalidation[BL_SIM_INVALIDATION_COUNT];
    bl_sim_verb last_verb;      /* the last verb, executed or deferred; reset by a sleep */
    bl_sim_verb deferred;       /* deferred until the next verb, with a copy of its source */
    bl_sim_order order;
    /* heartbeats of its thread; NULL: none */
    struct bl_heartbeat *heartbeat[BL_SIM_HEARTBEAT_COUNT];
    bl_sim_body *body;
    void *argument;
    void *stack;
    ucontext_t context;
} bl_sim_process;

/* A file in a host's runtime directory, and the process that holds its lock; NULL after a
 * release. */
typedef struct bl_sim_liveness {
    uint64_t nonce;
    bl_sim_process *holder;
    uint32_t host;
    uint32_t removed;
    uint32_t has_devices;
    uint32_t snapshot;          /* what its process had fenced when it released the lock */
} bl_sim_liveness;

typedef struct bl_sim_lock {
    char name[32];
    bl_sim_process *holder;
    uint32_t host;
    uint32_t snapshot;          /* as above */
} bl_sim_lock;

/* The word and the bell of a server (wake.c). */
struct bl_sleeper {
    uint64_t word;              /* 1: callers ring */
    uint64_t nonce;
    bl_sim_process *process;
    uint32_t held;              /* 1: the word's store is still in the store buffer */
    uint32_t host;
    uint32_t rung;
    uint32_t sleeps;
};

typedef struct bl_sim_world {
    bl_sim_config config;
    bl_pool pool;               /* the pool of every process, except for the host number */
    uint64_t random;
    uint64_t now_ns;
    uint64_t switch_mask;       /* another process runs where random & mask is 0 */
    uint64_t chance_mask;       /* another event occurs where random & mask is 0 */
    uint32_t keeps_unfenced;    /* 1: unfenced stores stay in their buffers */
    uint8_t *memory;
    uint8_t *writer;            /* of each line: host + 1, or BL_SIM_MANY */
    uint64_t *stale;            /* by site: loads from a copy that differed from memory */
    uint64_t *hits;             /* by site: how often it had an effect */
    uint32_t recent[BL_SIM_RECENT_COUNT]; /* recently accessed lines, for prefetchers */
    uint32_t near_line;         /* the last one */
    bl_sim_host host[BL_SIM_HOST_COUNT];
    bl_sim_process *process[BL_SIM_PROCESS_COUNT];
    uint32_t process_count;
    bl_sim_process *current;    /* NULL: the caller of bl_sim_world_run */
    bl_sim_liveness *liveness_lock;
    uint32_t liveness_count;
    bl_sim_lock lock[BL_SIM_LOCK_COUNT];
    uint32_t lock_count;
    struct bl_sleeper sleeper[BL_SIM_SLEEPER_COUNT];
    uint32_t sleeper_count;
    uint64_t quiet_ns;          /* a lane is quiet after this time; 0: never (rpc/doorbell.h) */
    uint32_t wakes;             /* 1: servers sleep, and only a ring wakes them */
    struct bl_sim_job *jobs;    /* DMA (device.h); NULL before the first */
    uint32_t job_count;
    uint64_t job_ticket;
    bl_sim_history history;
    int32_t result;             /* result of the first process that failed */
    uint32_t stopped;
    uint32_t lawless;           /* 1: the scenario breaks the ownership rules on purpose */
    uint64_t heartbeat_ns;      /* when heartbeats are due */
    const bl_site *last_site;   /* the last site that ran */
    uint64_t condition_step;    /* step of the last condition, */
    uint64_t condition_count;   /* and the number of conditions in it */
    struct sigaction fault_before; /* the SIGSEGV handler before this run, */
    struct bl_sim_world *running_before; /* and the world that this thread ran */
    bl_sim_stat stat;
    ucontext_t outside;
} bl_sim_world;

enum { BL_SIM_MANY = 255 };

/* A scenario: starts processes in a new world, runs it, and checks the result, which bl_sim_play
 * returns. */
typedef struct bl_sim_scenario {
    const char *name;
    int (*play)(bl_sim_world *world);
    uint32_t lane_count;        /* lanes of its pool; 0: a few */
} bl_sim_scenario;

/* xorshift64*: small, fast, and portable. */
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

/* ---- cache.c: memory, caches and buffers. Nothing here takes a turn. */

const uint8_t *bl_sim_line_read(bl_sim_world *world, bl_sim_process *process, uint32_t line,
                                uint32_t site_number, const uint32_t **versions);
void bl_sim_line_stream(bl_sim_world *world, bl_sim_process *process, uint32_t line,
                        const void *source, int plain, const bl_site *site);
void bl_sim_line_dirty(bl_sim_world *world, bl_sim_process *process, uint64_t offset,
                       const void *source, uint32_t size, const bl_site *site);
void bl_sim_line_invalidate(bl_sim_world *world, bl_sim_process *process, uint32_t line);
void bl_sim_fence(bl_sim_world *world, bl_sim_process *process);

/* Return 1 if some of a process's streamed bytes can still arrive in memory by themselves. */
int bl_sim_drains(const bl_sim_world *world, const bl_sim_process *process);

/* Deliver one, or all, of a process's pending pieces to memory. */
void bl_sim_drain(bl_sim_world *world, bl_sim_process *process);
void bl_sim_drain_all(bl_sim_world *world, bl_sim_process *process);

/* Return 1 if anything streamed to this range is still in a buffer. */
int bl_sim_underway(const bl_sim_world *world, uint64_t offset, uint64_t size);

/* Let one random event occur. */
void bl_sim_happen(bl_sim_world *world);

uint8_t *bl_sim_memory_line(const bl_sim_world *world, uint32_t line);
bl_sim_line *bl_sim_cached(bl_sim_host *host, uint32_t line);
bl_sim_line *bl_sim_cache_fill(bl_sim_world *world, bl_sim_host *host, uint32_t line);
void bl_sim_cache_drop(bl_sim_world *world, bl_sim_host *host, bl_sim_line *cached);
void bl_sim_settle(bl_sim_world *world, bl_sim_process *process, uint32_t line);
void bl_sim_line_arrive(bl_sim_world *world, const bl_sim_process *process, uint32_t line,
                        const void *source, uint32_t version);

/* ---- order.c: which process has knowledge of which write. */

int bl_sim_history_create(bl_sim_history *history, uint64_t line_count);
void bl_sim_history_destroy(bl_sim_history *history);

/* Return the track of a line, created on first use; the pointer is valid until the next call. */
bl_sim_track *bl_sim_track_of(bl_sim_world *world, uint32_t line);
bl_sim_look *bl_sim_look_of(bl_sim_world *world, bl_sim_process *process, uint32_t line);

uint32_t bl_sim_snapshot_new(bl_sim_world *world, const bl_sim_snapshot *known);

/* Return a snapshot of what the process knows and has released. */
uint32_t bl_sim_snapshot_take(bl_sim_world *world, bl_sim_process *process);
void bl_sim_learn(bl_sim_world *world, bl_sim_process *process, uint32_t snapshot, uint32_t at);
/* Record that the process has read this version as a whole: it knows the version if it knows all
 * earlier writes of the writer. */
void bl_sim_learn_seen(bl_sim_process *process, const bl_sim_version *version, uint32_t at);
int bl_sim_knows(const bl_sim_process *process, const bl_sim_version *version);

/* Return the world step since which the process knows the version; 0: since before the history
 * begins. */
uint32_t bl_sim_known_since(const bl_sim_process *process, const bl_sim_version *version);

/* Add a new version of a line. dirty: written into a cache, from which it must be flushed. */
uint32_t bl_sim_version_add(bl_sim_world *world, bl_sim_process *process, uint32_t line, int dirty,
                            const bl_site *site);
void bl_sim_note_load(bl_sim_world *world, bl_sim_process *process, uint32_t line,
                      const uint32_t versions[BL_SIM_PIECE_COUNT], const bl_site *site);
void bl_sim_note_invalidate(bl_sim_world *world, bl_sim_process *process, uint32_t line);

/* Record that the process's earlier writes are ordered before its later ones; or that they are also
 * complete. */
void bl_sim_note_release(bl_sim_process *process);
void bl_sim_note_full_fence(bl_sim_process *process);

/* ---- owner.c: check and record that a process writes a line; check that a dirty line may be
 * written back. */

uint32_t bl_sim_note_write(bl_sim_world *world, bl_sim_process *process, uint32_t line, int dirty,
                           const bl_site *site);
void bl_sim_owner_returns(bl_sim_world *world, const bl_sim_line *cached);

/* ---- raw.c: faulting addresses of the pool, and the world that handles the faults. */

extern _Thread_local bl_sim_world *bl_sim_running; /* by this thread; NULL: none */

int bl_sim_raw_reserve(bl_sim_world *world);
void bl_sim_raw_release(bl_sim_world *world);
void bl_sim_raw_watch(bl_sim_world *world);
void bl_sim_raw_ignore(bl_sim_world *world);

/* ---- change.c: sites that are changed. */

/* Return 1 if site is changed in this way. */
int bl_sim_changed(const bl_sim_world *world, const bl_site *site, enum bl_sim_change change);

/* Count that this change of the site would make a difference now. */
void bl_sim_matters(bl_sim_world *world, const bl_site *site, enum bl_sim_change change);

/* Return the corresponding offset in the other half of a structure with two halves; otherwise
 * offset. */
uint64_t bl_sim_other_half(const bl_geometry *g, uint64_t offset, uint64_t size);

/* Return 1 if exchanging the two verbs can make a difference. */
int bl_sim_ordered_pair(const bl_memory *memory, const bl_sim_verb *first,
                        const bl_sim_verb *second);

/* Store a copy of the verb to execute later. Returns 0 or -ENOMEM. */
int bl_sim_defer(bl_sim_process *process, const bl_sim_verb *verb);

uint32_t bl_sim_site_number(const bl_site *site);
int bl_sim_is_load(const bl_sim_verb *verb);
int bl_sim_plain(const bl_memory *memory, const bl_sim_verb *verb);

/* ---- verbs.c: execute the deferred verb, before the process sleeps or ends. */

void bl_sim_catch_up(bl_sim_world *world);

/* Take a turn at a site that touches no line of the pool: 1 if it is left out. */
int bl_sim_left(const bl_memory *memory, const bl_site *site);
void bl_sim_sleep(bl_sim_world *world, uint64_t ns);

/* ---- acts.c: actions of a scenario on processes and hosts. */

/* Pause the processes of a host until they are resumed, perhaps forever. */
void bl_sim_pause_host(bl_sim_world *world, uint32_t host);
void bl_sim_resume_host(bl_sim_world *world, uint32_t host);

/* Crash a host: its processes and its cache are lost; its next boot begins with the next process
 * spawned there. */
void bl_sim_crash_host(bl_sim_world *world, uint32_t host);

/* Change a host's clock: it jumps forward, or runs faster (slower, if negative). */
void bl_sim_clock_jump(bl_sim_world *world, uint32_t host, uint64_t ns);
void bl_sim_clock_rate(bl_sim_world *world, uint32_t host, int32_t fast_1024);

/* ---- heartbeat.c: advance all heartbeats that are due. */

void bl_sim_heartbeats(bl_sim_world *world);

/* ---- run.c: worlds. */

/* Create a world with a zeroed pool of this geometry. Returns 0 or -ENOMEM. */
int bl_sim_world_create(bl_sim_world **out, const bl_sim_config *config,
                        const bl_geometry *geometry);
void bl_sim_world_destroy(bl_sim_world *world);

/* Start a process that runs body(its pool, argument). Returns its number, -ENOSPC or -ENOMEM. A
 * running process may call it. A negative result of body ends the run. */
int bl_sim_spawn(bl_sim_world *world, uint32_t host, bl_sim_body *body, void *argument);

/* Start a thread of the running process, which has its own store buffer and turns, and dies with
 * the process. The process exits after its threads. Returns as bl_sim_spawn(). */
int bl_sim_thread(bl_sim_world *world, bl_sim_body *body, void *argument);

/* Return the process that a thread belongs to. */
static inline bl_sim_process *bl_sim_leader(const bl_sim_world *world,
                                            const bl_sim_process *thread)
{
    return world->process[thread->leader];
}

/* Run until every process has exited or was killed. Returns 0, the negative result of a body, or
 * -ETIME. */
int bl_sim_world_run(bl_sim_world *world);

/* ---- turns.c: turns, time and death. */

/* End the turn: a process that is awake runs next. */
void bl_sim_end_turn(bl_sim_world *world);

uint64_t bl_sim_clock(const bl_sim_world *world, uint32_t host);

/* The running process is at a verb that accesses line: its turn may end here, or the process may
 * die. */
void bl_sim_step(bl_sim_world *world, uint32_t line);

/* The running process sleeps for ns, or yields if ns is 0. */
void bl_sim_rest(bl_sim_world *world, uint64_t ns);

/* Kill a process. What it streamed may still arrive, up to some point in program order, which may
 * be in the middle of a line. */
void bl_sim_lose(bl_sim_world *world, bl_sim_process *process);
void bl_sim_kill(bl_sim_world *world, uint32_t process);

/* Kill a process after it has executed this many more verbs. */
void bl_sim_kill_after(bl_sim_world *world, uint32_t process, uint64_t verbs);

int bl_sim_alive(const bl_sim_world *world, uint32_t process);

/* Return the running process. */
uint32_t bl_sim_self(const bl_sim_world *world);

/* Return 1 if a process is dead or has ended, and none of its stores is pending. */
static inline int bl_sim_gone(const bl_sim_process *process)
{
    return process->state != BL_SIM_READY && process->store_count == 0 && process->job_count == 0;
}

#endif
