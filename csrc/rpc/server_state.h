/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The server's state. A server owns all metadata of a pool; there is one at a time, numbered by its
 * epoch (D5).
 *
 *   create --> take (rpc/takeover.c: a new epoch) --> rounds (rpc/server.c) --> release
 *
 * A round looks into all live lanes with one fence, hands the requests to handlers, and sends the
 * replies with one fence. Every so often it does its housekeeping (rpc/housekeeping.c): lobby,
 * heartbeats, liveness locks, epoch.
 *
 * Folders above take part through bl_server_hooks and handlers; this folder knows nothing of
 * blocks.
 */
#ifndef BL_SERVER_H
#define BL_SERVER_H

#include "api/pool.h"
#include "api/rpc.h"
#include "liveness/heartbeat.h"
#include "pool/epoch.h"
#include "liveness/pidfds.h"
#include "liveness/lock.h"
#include "rpc/quota.h"
#include "liveness/runtime.h"
#include "rpc/quantum.h"
#include "rpc/trace.h"
#include "coherence/wait.h"

enum { BL_METHOD_COUNT = 256 };

/* A lane's session, as the server knows it. Its states are those of format/pool_format.h. */
typedef struct bl_lane {
    uint64_t nonce;
    uint64_t boot_id[2];
    uint64_t epoch;             /* the epoch whose server attached the session */
    uint64_t heartbeat_count;
    uint64_t heartbeat_seen_ns; /* when heartbeat_count was last seen to move */
    uint32_t host;
    uint32_t state;
    uint32_t next;              /* sequence of the next request */
    uint32_t window;            /* request lines looked at together */
    uint32_t moved;             /* 1: its heartbeat was seen to move */
    uint32_t broken;            /* 1: its memory failed: nobody looks there, nobody gets it */
    uint32_t pid;               /* as this host sees it; 0: not known */
    uint32_t kind;              /* that of its last report */
    uint32_t job;               /* 1 + the number of its job (rpc/jobs.h); 0: it has none */
    uint64_t since_ns;          /* when it got its state */
    uint64_t call_count;        /* calls that were answered */
    bl_work answered;           /* what the server had done when its last turn ended */
    bl_allowance allowance;
    int liveness_lock;          /* descriptor; or a negative error: one that passes is tried again,
                                 * with another this host cannot prove anything */
} bl_lane;

/* How certain it is that a session that ended writes nothing any more. */
enum bl_end { BL_END_GONE = 1, BL_END_SUSPECT = 2 };

typedef struct bl_server_hooks {
    void *context;
    /* Take over, after the new epoch is published: copy what the predecessor committed and has open
     * from its half into the own half. old_epoch, which wrote that half, is 0 for a new pool.
     * suspect: sessions of earlier epochs may still write. 0 or an error. */
    int (*recover)(void *context, uint64_t old_epoch, int suspect);
    /* A session of this epoch ended. After SUSPECT, GONE may follow, or nothing ever. */
    void (*ended)(void *context, uint32_t lane, enum bl_end end);
    /* Every session of earlier epochs is proven gone. */
    void (*settled)(void *context);
} bl_server_hooks;

/* What an operator asked for, by any thread (rpc/operate.c). */
typedef struct bl_asked {
    uint64_t serial;            /* counts the changes */
    uint64_t bytes;             /* the words of a bl_quota */
    uint64_t grant_count;
    uint64_t pin_count;
    uint64_t calls_per_s;
    uint64_t draining;
} bl_asked;

/* The server that a standby watches (rpc/standby.c). */
typedef struct bl_watch {
    uint64_t nonce;             /* nonce of that server; 0: none yet */
    uint64_t count;             /* count of its heartbeat */
    uint64_t looked_ns;         /* of the last look */
    uint64_t silent_ns;         /* for which its heartbeat has stood still */
    uint64_t gap_ns;            /* the longest silence of this pool's servers that ended, fading */
    int liveness_lock;          /* descriptor, or negative: this host cannot prove anything */
} bl_watch;

/* A silence that a standby may follow (rpc/standby.c). */
typedef struct bl_silence {
    uint64_t nonce;             /* of the silent server; 0: there is none */
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
    uint32_t state;             /* bl_server_state, as the epoch line says; 0 before take */
    uint32_t host;
    int lock;                   /* of one server of a pool on this host; or negative */
    int liveness_lock;          /* the server's own */
    struct bl_declared *declared; /* what an operator declared gone; NULL: nothing */
    bl_silence silence;         /* that a standby has seen */
    bl_watch watch;
    bl_pidfds *pidfds;          /* the pidfd watch of this host; NULL: not available */
    bl_heartbeat heartbeat;
    bl_server_hooks hooks;
    struct {
        bl_handler run;
        void *context;
        bl_calls calls;         /* beside what each call reads anyway */
    } handlers[BL_METHOD_COUNT];
    bl_lane *lanes;
    uint32_t *live;             /* numbers of the live lanes: the one that waited longest is
                                 * first */
    uint32_t *served;           /* lanes served in this round */
    uint32_t live_count;
    uint32_t inherited_count;   /* SUSPECT sessions of earlier epochs */
    uint32_t inherited_devices; /* 1: some of those that are gone had devices */
    uint32_t lobby_seen[BL_HOST_COUNT]; /* sequence of the last request answered or found */
    bl_lobby_reply lobby[BL_HOST_COUNT]; /* last answers */
    bl_work done;               /* work since it serves */
    bl_work round[2];           /* work done when the last round began, and this one */
    bl_work most_taken;         /* the most in one turn */
    bl_work most_waited;        /* the most by others, while a lane's oldest request was there */
    bl_quota quota;
    bl_asked asked;
    uint64_t applied;           /* the serial of what the poll loop has applied */
    bl_trace trace;
    bl_request *requests;       /* BL_QUANTUM_REQUESTS private copies */
    bl_reply *replies;
    uint8_t *bulk_in, *bulk_out; /* bulk_size each: private copies */
    uint64_t housekeeping_ns;   /* when the last housekeeping was */
    uint64_t liveness_ns;       /* when liveness locks were last looked at */
    uint64_t sweep_ns;          /* when liveness locks that nobody needs were last removed */
    uint64_t heartbeat_lost_ns; /* a heartbeat that stands still for so long is lost; 0: default */
    struct bl_jobs *jobs;       /* calls that threads answer (rpc/jobs.h); NULL: none can be */
    uint64_t stop;              /* shared with the thread that stops the server */
    bl_server_stat stat;
    uint64_t reported[BL_REPORT_KINDS][BL_REPORT_FIGURES];
};

/* Count a call for what the exporter shows. Unknown methods count as the last one. */
static inline void bl_server_count(bl_server *server, uint32_t method, int status)
{
    bl_calls *calls = &server->handlers[method < BL_METHOD_COUNT ? method : BL_METHOD_COUNT - 1]
                           .calls;
    calls->call_count++;
    if (status < 0)
        calls->error_count++;
}

/* Apply what an operator asked for: the poll loop calls it between two rounds. */
void bl_operate_apply(bl_server *server);

/* Learn the pid of a session whose process has connected to this server. */
void bl_operate_name(const bl_server *server, bl_lane *lane);

/* Do the housekeeping: look into the lobby, at heartbeats, liveness locks and the epoch. 0, or
 * -BL_ERROR_DEPOSED. */
int bl_housekeeping_keep(bl_server *server, uint64_t now_ns);

/* Stop serving a lane's session: 0, or -BL_ERROR_DEPOSED: a successor decides. */
int bl_housekeeping_end(bl_server *server, uint32_t lane, enum bl_end end);

/* Become the owner of one epoch, or learn its owner (rpc/elect.c): 0 and the owner (nonce, boot_id,
 * host); -ESTALE: a host asks for a later one, owner->epoch; -EAGAIN: disturbed for too long; or
 * -BL_ERROR_EPOCH_DAMAGED. The server has its nonce. One process of a host calls it at a time. */
int bl_elect(const bl_server *server, uint64_t epoch, bl_candidate_line *owner);

/* May a device have written what was granted to a session of this host? Its writes may lie in this
 * host's cache (transfer/device_range.h). A session of another host ends only by its own word,
 * which it gives when it has flushed, or with that host's caches: then there is nothing to flush
 * here. */
int bl_lane_has_devices(const bl_server *server, uint32_t lane);

/* Write a lane's session line in the server's own half. */
void bl_housekeeping_write(bl_server *server, uint32_t lane);

/* Become the server, with the next epoch. 0, or as bl_server_serve_lanes(), or what a hook
 * returned. */
int bl_server_take(bl_server *server, const bl_server_hooks *hooks);

/* Return the error for another machine that uses this host number. */
int bl_server_clash(const bl_server *server);

/* Note in the server's figures whom it follows, and why: line is the newest epoch line before its
 * own (rpc/reason.c). */
void bl_reason_note(bl_server *server, const bl_epoch_line *line);

/* Did an operator declare the server or session of this nonce gone? (rpc/declare.c) */
int bl_declared(const bl_server *server, uint64_t nonce);

/* Do all heartbeats that were declared gone stand still? 0, or -BL_ERROR_SERVER_ALIVE,
 * _SESSION_ALIVE. */
int bl_declared_check(bl_server *server);

/* Look once at all live lanes: return the number of requests served. */
uint32_t bl_server_round(bl_server *server);

/* Does this server still speak for the pool? A full fence comes first: what the server wrote is in
 * memory before it looks, so either it or a successor sees the other. 0, -BL_ERROR_DEPOSED, or
 * -BL_ERROR_EPOCH_DAMAGED: it cannot know. */
int bl_server_still(const bl_server *server);

void bl_watch_end(bl_server *server);

int bl_nothing_recover(void *context, uint64_t old_epoch, int suspect);
void bl_nothing_settled(void *context);

#endif
