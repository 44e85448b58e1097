/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The server's state. A server owns all metadata of a pool; there is one at a time, numbered by its
 * epoch (D5).
 *
 *   create --> take (rpc/takeover.c: a new epoch) --> rounds (rpc/server.c) --> release
 *
 * A round polls all live lanes with one fence, passes the requests to handlers, and sends the
 * replies with one fence. Periodically it does its housekeeping (rpc/housekeeping.c): lobby,
 * heartbeats, liveness locks, epoch.
 *
 * Higher layers are called through bl_server_hooks and handlers; this folder does not depend on
 * blocks.
 */
#ifndef BL_SERVER_H
#define BL_SERVER_H

#include "api/pool.h"
#include "api/rpc.h"
#include "liveness/heartbeat.h"
#include "pool/epoch.h"
#include "liveness/pidfds.h"
#include "liveness/wake.h"
#include "liveness/lock.h"
#include "rpc/quota.h"
#include "liveness/runtime.h"
#include "rpc/quantum.h"
#include "rpc/trace.h"
#include "coherence/wait.h"

enum { BL_METHOD_COUNT = 256 };

/* A lane's session, as the server records it. Its states are those of format/pool_format.h. */
typedef struct bl_lane {
    uint64_t nonce;
    uint64_t boot_id[2];
    uint64_t epoch;             /* the epoch whose server attached the session */
    uint64_t heartbeat_count;
    uint64_t heartbeat_seen_ns; /* when heartbeat_count last changed */
    uint32_t host;
    uint32_t state;
    uint32_t next;              /* sequence of the next request */
    uint32_t window;            /* request lines polled together */
    uint32_t moved;             /* 1: its heartbeat has changed */
    uint32_t broken;            /* 1: its memory failed: it is neither polled nor assigned */
    uint32_t pid;               /* in this host's pid namespace; 0: unknown */
    uint32_t kind;              /* the kind of its last report */
    uint32_t busy_next;         /* next when the lane last had new requests */
    uint64_t busy_ns;           /* when that was (rpc/doorbell.c) */
    uint32_t job;               /* 1 + the number of its job (rpc/jobs.h); 0: it has none */
    uint64_t since_ns;          /* when it got its state */
    uint64_t call_count;        /* calls that were answered */
    bl_work answered;           /* the server's work when its last turn ended */
    bl_allowance allowance;
    int liveness_lock;          /* descriptor, or a negative error: a temporary one is retried,
                                 * with another this host can prove no death */
} bl_lane;

/* How certain it is that an ended session no longer writes. */
enum bl_end { BL_END_GONE = 1, BL_END_SUSPECT = 2 };

typedef struct bl_server_hooks {
    void *context;
    /* Take over, after the new epoch is published: copy the predecessor's committed and open state
     * from its half into this server's half. old_epoch, which wrote that half, is 0 for a new pool.
     * suspect: sessions of earlier epochs may still write. Returns 0 or an error. */
    int (*recover)(void *context, uint64_t old_epoch, int suspect);
    /* A session of this epoch ended. After SUSPECT, GONE may or may not follow. */
    void (*ended)(void *context, uint32_t lane, enum bl_end end);
    /* All sessions of earlier epochs are proven gone. */
    void (*settled)(void *context);
    /* A handler that set bl_server.deferred has returned, and usually its reply is sent: do the
     * work for which its client does not wait. No other handler has run since. */
    void (*deferred)(void *context);
} bl_server_hooks;

/* An operator's requests, from any thread (rpc/operate.c). */
typedef struct bl_requested {
    uint64_t serial;            /* counts the changes */
    uint64_t bytes;             /* the words of a bl_quota */
    uint64_t grant_count;
    uint64_t pin_count;
    uint64_t calls_per_s;
    uint64_t draining;
} bl_requested;

/* The server that a standby watches (rpc/standby.c). */
typedef struct bl_watch {
    uint64_t nonce;             /* its nonce; 0: none yet */
    uint64_t count;             /* its heartbeat count */
    uint64_t looked_ns;         /* time of the last check */
    uint64_t silent_ns;         /* time since its heartbeat last changed */
    uint64_t gap_ns;            /* the longest gap between heartbeats of this pool's servers,
                                 * decaying */
    int liveness_lock;          /* descriptor, or negative: this host can prove no death */
} bl_watch;

/* A stopped heartbeat after which a standby may take over (rpc/standby.c). */
typedef struct bl_silence {
    uint64_t nonce;             /* of the silent server; 0: none */
    uint64_t ns;
    int alive;                  /* 1: its process is proven alive */
} bl_silence;

struct bl_server {
    const bl_pool *pool;
    char directory[BL_PATH_SIZE];
    uint64_t boot_id[2];
    uint64_t nonce;
    uint64_t epoch;             /* 0 before take */
    uint32_t half;
    uint32_t state;             /* bl_server_state as in the epoch line; 0 before take */
    uint32_t host;
    int lock;                   /* the lock for the pool's only server on this host; or negative */
    int liveness_lock;          /* this server's liveness lock */
    struct bl_declared *declared; /* sessions and servers that an operator declared gone; NULL:
                                   * none */
    bl_silence silence;         /* seen by a standby */
    bl_watch watch;
    bl_pidfds *pidfds;          /* the pidfd watch of this host; NULL: not available */
    bl_sleeper *sleeper;        /* lets this host wake the server; NULL: not available */
    bl_heartbeat heartbeat;
    bl_server_hooks hooks;
    struct {
        bl_handler run;
        void *context;
        bl_calls calls;         /* next to the fields that each call reads anyway */
    } handlers[BL_METHOD_COUNT];
    bl_lane *lanes;
    uint32_t *live;             /* numbers of the live lanes: the busy one that waited longest is
                                 * first; the quiet ones are last (rpc/doorbell.h) */
    uint32_t *served;           /* lanes served in this round; scratch space of rpc/doorbell.c */
    uint32_t live_count;
    uint32_t busy_count;
    uint32_t doorbell_rounds;   /* rounds since the last poll of doorbells, */
    bl_work doorbell_done;      /* and the work done until then */
    bl_core core;               /* crowded: a client probably uses it, too */
    uint64_t quiet_hosts;       /* hosts that have quiet lanes, as bits */
    uint64_t doorbell[BL_HOST_COUNT]; /* the value read last */
    uint32_t inherited_count;   /* SUSPECT sessions of earlier epochs */
    uint32_t inherited_devices; /* 1: some of those that are gone had devices */
    uint32_t lobby_seen[BL_HOST_COUNT]; /* sequence of the last request answered or found */
    bl_lobby_reply lobby[BL_HOST_COUNT]; /* last replies */
    bl_work done;               /* work of this server so far */
    bl_work round[2];           /* work done when the last round began, and this one */
    bl_work most_taken;         /* the most in one turn */
    bl_work most_waited;        /* the most for others, while a lane's oldest request waited */
    bl_quota quota;
    bl_requested requested;
    uint64_t applied;           /* the serial that the poll loop has applied */
    bl_trace trace;
    bl_request *requests;       /* BL_QUANTUM_REQUESTS private copies */
    bl_reply *replies;
    uint8_t *bulk_in, *bulk_out; /* bulk_size each: private copies */
    uint32_t deferred;          /* 1: hooks.deferred is due, before the next handler runs */
    uint64_t housekeeping_ns;   /* time of the last housekeeping */
    uint64_t liveness_ns;       /* when liveness locks were last checked */
    uint64_t sweep_ns;          /* when unneeded liveness locks were last removed */
    uint64_t heartbeat_lost_ns; /* a heartbeat without a change for this long is lost; 0: default */
    struct bl_jobs *jobs;       /* calls that threads handle (rpc/jobs.h); NULL: not available */
    uint64_t stop;              /* shared with the thread that stops the server */
    bl_server_stat stat;
    uint64_t reported[BL_REPORT_KINDS][BL_REPORT_FIGURES];
};

/* Count a call for the exporter. Unknown methods count as the last one. */
static inline void bl_server_count(bl_server *server, uint32_t method, int status)
{
    bl_calls *calls = &server->handlers[method < BL_METHOD_COUNT ? method : BL_METHOD_COUNT - 1]
                           .calls;
    calls->call_count++;
    if (status < 0)
        calls->error_count++;
}

/* Wake the poll loop after another thread of this process made a change that the loop must see.
 * Safe in a signal handler. */
static inline void bl_server_wake(const bl_server *server)
{
    if (server->sleeper)
        bl_sleeper_wake(server->sleeper);
}

/* Return 1 while the server sleeps between polls, else 0. */
static inline int bl_server_asleep(const bl_server *server)
{
    return server->sleeper != NULL && bl_sleeper_announced(server->sleeper);
}

/* Apply an operator's requests: the poll loop calls it between two rounds. */
void bl_operate_apply(bl_server *server);

/* Set the pid of a session whose process has connected to this server. */
void bl_operate_name(const bl_server *server, bl_lane *lane);

/* Do the housekeeping: check the lobby, heartbeats, liveness locks and the epoch. Returns 0, or
 * -BL_ERROR_DEPOSED. */
int bl_housekeeping_keep(bl_server *server, uint64_t now_ns);

/* Stop serving a lane's session. Returns 0, or -BL_ERROR_DEPOSED: a successor decides. */
int bl_housekeeping_end(bl_server *server, uint32_t lane, enum bl_end end);

/* Become the owner of an epoch, or find its owner (rpc/elect.c). Returns 0 and the owner (nonce,
 * boot_id, host); -ESTALE: a host requests a later one, owner->epoch; -EAGAIN: other ballots
 * interfered for too long; or -BL_ERROR_EPOCH_DAMAGED. The server has its nonce. One process of a
 * host calls it at a time. */
int bl_elect(const bl_server *server, uint64_t epoch, bl_candidate_line *owner);

/* Return 1 if a device may have written to grants of a session of this host; else 0. The device's
 * writes may be in this host's cache (transfer/device_range.h). A session of another host ends only
 * when it detaches, after it has flushed, or with that host's caches: then there is nothing to
 * flush here. */
int bl_lane_has_devices(const bl_server *server, uint32_t lane);

/* Write a lane's session line in this server's half. */
void bl_housekeeping_write(bl_server *server, uint32_t lane);

/* Become the server, with the next epoch. Returns 0, or as bl_server_serve_lanes(), or what a hook
 * returned. */
int bl_server_take(bl_server *server, const bl_server_hooks *hooks);

/* Return the error for another machine that uses this host number. */
int bl_server_clash(const bl_server *server);

/* Record in the server's statistics which server it took over from, and why: line is the newest
 * epoch line before its own (rpc/reason.c). */
void bl_reason_note(bl_server *server, const bl_epoch_line *line);

/* Return 1 if an operator declared the server or session of this nonce gone (rpc/declare.c); else
 * 0. */
int bl_declared(const bl_server *server, uint64_t nonce);

/* Check that no heartbeat of a process that was declared gone advances. Returns 0, or
 * -BL_ERROR_SERVER_ALIVE, _SESSION_ALIVE. */
int bl_declared_check(bl_server *server);

/* Serve all live lanes once. Returns the number of requests served. */
uint32_t bl_server_round(bl_server *server);

/* Check whether this server is still the pool's current server. A full fence comes first: what the
 * server wrote is in memory before it reads the epoch lines, so either it or a successor sees the
 * other. Returns 0, -BL_ERROR_DEPOSED, or -BL_ERROR_EPOCH_DAMAGED: it cannot be determined. */
int bl_server_still(const bl_server *server);

void bl_watch_end(bl_server *server);

int bl_nothing_recover(void *context, uint64_t old_epoch, int suspect);
void bl_nothing_more(void *context);

#endif
