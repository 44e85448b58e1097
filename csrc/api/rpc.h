/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Servers, sessions and calls (beluga/rpc). directory is the pool's runtime directory on this host.
 */
#ifndef BL_API_RPC_H
#define BL_API_RPC_H

#include "api/figures.h"
#include "api/pool.h"

/* The most keys or items in one call of the block index: one quantum of the server's work. */
enum { BL_CALL_KEYS_MAX = 256 };

/* A request, as passed to a handler: private copies, valid until it returns. */
typedef struct bl_call {
    const uint8_t *request;
    uint8_t *reply;
    uint32_t request_size;
    uint32_t reply_capacity;
    uint32_t reply_size;        /* set by the handler */
    uint32_t lane;
    uint32_t method;
} bl_call;

/* Returns 0 or more, the call's status; or a negative error, which also reaches the caller. */
typedef int (*bl_handler)(void *context, bl_call *call);

typedef struct bl_server bl_server;

int bl_server_create(const bl_pool *pool, const char *directory, uint32_t host, bl_server **out);
void bl_server_destroy(bl_server *server);
/* Set how long another host's heartbeat may stop before its session is suspect; 0: 5 s. */
void bl_server_heartbeat_lost(bl_server *server, uint64_t ns);

/* The limits of each session; 0: only the pool's limit. */
typedef struct bl_quota {
    uint64_t bytes;             /* payload of its grants and of the blocks it has pinned */
    uint32_t grant_count;
    uint32_t pin_count;         /* different blocks */
    uint32_t calls_per_s;       /* burst, and rate per second */
    uint32_t reserved;
} bl_quota;

/* Set the quota. Any thread may call this while the server exists; it wakes the poll loop, which
 * applies it. A session keeps grants and pins above a new limit. */
void bl_server_limit(bl_server *server, const bl_quota *quota);

/* Refuse new grants from now on, or grant again. Any thread may call this; bl_server_stat reports
 * when it is applied. */
void bl_server_drain(bl_server *server, int draining);

/* Drop the parent's server in a forked child, which must not use it. */
void bl_server_forked(bl_server *server);
int bl_server_handle_method(bl_server *server, uint32_t method, bl_handler handler, void *context);

/* Record an operator's declaration that no current server or session of the pool can write any
 * more. Call it before the server stands by or serves. It excludes processes of this host whose end
 * can be proven. Returns 0, or if the heartbeat of one moves, -BL_ERROR_SERVER_ALIVE or
 * _SESSION_ALIVE. */
int bl_server_declare_gone(bl_server *server);

/* Become the pool's server, of lanes only. Returns 0, or -BL_ERROR_SERVER_ALIVE, _EPOCH_DAMAGED,
 * _HOST_CLASH; or _SESSION_ALIVE: a session that was declared gone is alive. */
int bl_server_serve_lanes(bl_server *server);

/* Stand by: check the pool's server every 10 ms, for timeout_ns. Returns 1 if this
 * server should try to take over (there is no server, it stopped, it is proven gone, or its
 * heartbeat stopped for lost_ns, or longer as measured by rpc/standby.c); 0 if it is alive; or
 * -BL_ERROR_EPOCH_DAMAGED, _HOST_CLASH. Call it before the server serves; if taking over is
 * refused, the server may stand by again. */
int bl_server_watch(bl_server *server, uint64_t lost_ns, uint64_t timeout_ns);

/* Serve until bl_server_stop (from any thread). Returns 0, or -BL_ERROR_DEPOSED. */
int bl_server_run(bl_server *server);
void bl_server_stop(bl_server *server);
void bl_server_describe(const bl_server *server, bl_server_stat *out);

/* A process's lane. Threads may share a session: their calls wait for each other, and their copies
 * do not. */
typedef struct bl_session bl_session;

typedef struct bl_session_stat {
    uint64_t epoch;
    uint64_t nonce;
    uint64_t call_count;
    uint64_t reattach_count;
    uint64_t mismatch_count;    /* blocks of gets whose entry or bytes were not as expected */
    uint64_t checksum_count;    /* those of them whose bytes differed from their checksums */
    uint32_t lane;
    uint32_t reserved;
} bl_session_stat;

/* Attach. Returns 0, -BL_ERROR_NO_SERVER, _NO_LANE, _HOST_CLASH, _SECOND_HOST, _TIMEOUT or
 * -errno. */
int bl_session_open(const bl_pool *pool, const char *directory, uint32_t host, uint64_t timeout_ns,
                    bl_session **out);

/* Refuse calls from now on (-BL_ERROR_CLOSED), and give back the lane when the running ones have
 * ended, with their puts and gets. Returns 0 if they have not within this time. No thread may use
 * the session when it is freed. */
int bl_session_end(bl_session *session, uint64_t timeout_ns);
void bl_session_free(bl_session *session);

/* Drop a session of the parent in a forked child; call it for each. */
void bl_session_forked(bl_session *session);

/* Copy the counts. Returns 0, or an error; then *out is zero. */
int bl_session_describe(bl_session *session, bl_session_stat *out);

typedef struct bl_message {
    const uint8_t *request;
    uint8_t *reply;
    uint32_t *reply_size;       /* set when the call returns 0 or more */
    uint32_t request_size;
    uint32_t reply_capacity;
    uint32_t method;
} bl_message;

/* Make one call. Returns the handler's status, or a negative error. */
int bl_session_call(bl_session *session, const bl_message *message, uint64_t timeout_ns);

/* Make one call with plain arguments, for Python. Returns the size of the reply, or a negative
 * error. */
int64_t bl_session_call_bytes(bl_session *session, uint32_t method, const uint8_t *request,
                              uint32_t request_size, uint8_t *reply, uint32_t reply_capacity,
                              uint64_t timeout_ns);

/* Many short calls of one method, of which up to depth are in flight. */
typedef struct bl_pump {
    const uint8_t *requests;    /* count * size bytes */
    uint8_t *replies;           /* count * size bytes, or NULL */
    uint64_t *latencies_ns;     /* count, or NULL: from sending a call to taking its reply */
    uint64_t count;
    uint32_t size;              /* bytes of each request, at most BL_MESSAGE_INLINE_SIZE */
    uint32_t depth;
    uint32_t method;
    uint32_t reserved;
} bl_pump;

/* Make the calls. Returns 0, the worst status of a handler, or -BL_ERROR_TIMEOUT: no reply for that
 * long. */
int bl_session_pump(bl_session *session, const bl_pump *pump, uint64_t timeout_ns);

/* A handler that sends the request back. */
int bl_echo_handler(void *context, bl_call *call);

/* ---- Functions of a program: threads of the server's process answer these calls, so that a slow
 * function delays only its caller. */

enum bl_function_method { BL_METHOD_FUNCTION = 20 };

enum { BL_FUNCTION_THREADS_MAX = 64 };

/* A call that a thread has taken and not answered. */
typedef struct bl_function_call {
    const uint8_t *request;
    uint64_t nonce;             /* of the session that called */
    uint32_t request_size;
    uint32_t lane;
    uint32_t number;            /* names the call in the answer */
    uint32_t reserved;
} bl_function_call;

/* Enable threads to answer calls; call this before the handler below is set. Returns 0 or
 * -errno. */
int bl_function_open(bl_server *server);

/* A handler that leaves the request for a thread; its context is the server. */
int bl_function_handler(void *server, bl_call *call);

/* Wait for a call. Returns 1; 2: the session `nonce` of `lane` has ended, which needs no answer;
 * 0: the server is stopping; or -errno. At most BL_FUNCTION_THREADS_MAX threads may wait, and each
 * answers a call before it takes another. */
int bl_function_take(bl_server *server, bl_function_call *out);

/* Answer a call that was taken. Returns 0, or -EINVAL: the reply is larger than bulk_size, or there
 * is no such call. If the caller is gone, nothing is sent. */
int bl_function_answer(bl_server *server, uint32_t number, const uint8_t *reply, uint32_t size,
                       int32_t status);

/* ---- A server's figures for the exporter. Any thread may read them while the server exists; they
 * are not from one instant. */

/* Copy the counters of methods 0 to count - 1. */
void bl_server_calls(const bl_server *server, bl_calls *out, uint32_t count);

/* Counters of client processes, such as the seconds of their gets: the server adds up their
 * reports. A report has the client's kind, and how much each figure has grown since the last
 * report. The figures are those of bl_client_figures, and
 * histograms (beluga/rpc/report.py). */
enum bl_report_limit { BL_REPORT_KINDS = 8, BL_REPORT_FIGURES = 128 };

typedef struct bl_report {
    uint64_t kind;
    uint64_t figures[BL_REPORT_FIGURES]; /* a request may end after any of them */
} bl_report;

/* The handler of reports; its context is the server. */
int bl_report_handler(void *server, bl_call *call);

/* Copy the sums of a kind: BL_REPORT_FIGURES numbers. */
void bl_server_reported(const bl_server *server, uint32_t kind, uint64_t *figures);

/* ---- The trace: the bytes of the file "trace" in the runtime directory (rpc/trace.h). */

enum bl_trace_limit { BL_TRACE_ENTRIES = 32768, BL_TRACE_HEAD_SIZE = 4096 };

/* The values of the clocks when the processor's counter was at ticks. */
typedef struct bl_trace_clocks {
    uint64_t ticks;
    uint64_t monotonic_ns;
    uint64_t realtime_ns;
} bl_trace_clocks;

typedef struct bl_trace_head {
    char magic[8];              /* "BLTRACE2" */
    uint32_t entry_size;
    uint32_t entry_count;
    uint64_t epoch;
    uint64_t pid;               /* of the server */
    uint64_t ended;             /* 1: the server ended in order */
    bl_takeover_cause takeover;       /* how it took over */
    bl_trace_clocks first, last; /* at the start, and recently */
} bl_trace_head;

/* One call. The entries begin at BL_TRACE_HEAD_SIZE; sequence n has the n % entry_count-th. */
typedef struct bl_trace_entry {
    uint64_t ended;             /* the sequence once the call has its status; before that 0 */
    uint64_t ticks;             /* when the server read it, or the call before it ended */
    uint64_t ticks_taken;       /* until it had its status */
    uint64_t nonce;             /* of the session */
    uint32_t request_size;
    uint32_t reply_size;
    int32_t status;
    uint32_t pid;               /* of the session; 0: unknown */
    uint16_t keys;
    uint16_t method;
    uint16_t lane;
    uint16_t host;
    uint64_t sequence;          /* from 1 on */
} bl_trace_entry;

#endif
