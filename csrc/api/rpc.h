/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Servers, sessions and calls (beluga/rpc). directory is the pool's runtime directory on this host.
 */
#ifndef BL_API_RPC_H
#define BL_API_RPC_H

#include "api/pool.h"

/* The most keys or items in one call of the block index: one quantum of the server's work. */
enum { BL_CALL_KEYS_MAX = 256 };

/* A request as a handler sees it: private copies, valid until it returns. */
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

/* Why a server took its pool over. */
enum bl_reason {
    BL_REASON_NONE,             /* it has not */
    BL_REASON_FIRST,            /* nobody ever served the pool */
    BL_REASON_STOPPED,          /* the server before stopped in order */
    BL_REASON_DECLARED,         /* an operator declared that one gone */
    BL_REASON_GONE,             /* its process, or the boot of its host, is proven over */
    BL_REASON_STUCK,            /* its process lives on this host, but its heartbeat stood still */
    BL_REASON_SILENT            /* another host's heartbeat stood still */
};

/* The server that was followed, and why. */
typedef struct bl_followed {
    uint64_t epoch;
    uint64_t silent_ns;         /* how long a standby saw its heartbeat stand still */
    uint32_t host;
    uint32_t reason;            /* enum bl_reason */
} bl_followed;

typedef struct bl_server_stat {
    uint64_t epoch;
    uint64_t call_count;
    uint64_t error_count;       /* calls answered with an error */
    uint64_t key_count;         /* keys of those calls, at most: bl_quantum_keys() */
    uint64_t torn_count;        /* request lines that were not whole */
    uint64_t quota_call_count;  /* calls refused: too many in a second */
    uint64_t quota_grant_count; /* grants refused: too many, or too many bytes */
    uint64_t quota_pin_count;   /* pins refused: too many, or too many bytes */
    uint64_t quantum_request_max;  /* the most that a lane had done in one of its turns */
    uint64_t quantum_key_max;
    uint64_t wait_request_max;  /* the most that others had done while a lane's oldest request
                                 * waited */
    uint64_t wait_key_max;
    uint64_t attach_count;
    uint64_t end_count;         /* sessions ended, for whatever reason */
    uint32_t live_count;        /* sessions now */
    uint32_t inherited_count;   /* sessions of earlier epochs not yet proven gone */
    uint32_t watched_count;     /* sessions whose process is watched by a pidfd */
    uint32_t housekeeping_count; /* it moves while the poll loop lives, and wraps */
    uint32_t draining;          /* 1: no grant is made; none that was asked for before is being
                                 * made */
    int32_t trace_status;       /* 0, or -errno: why there is no trace */
    bl_followed followed;
} bl_server_stat;

int bl_server_create(const bl_pool *pool, const char *directory, uint32_t host, bl_server **out);
void bl_server_destroy(bl_server *server);
/* Set how long another host's heartbeat may stand still before its session is suspect; 0: 5 s. */
void bl_server_heartbeat_lost(bl_server *server, uint64_t ns);

/* The most that each session may have at a time; 0: no limit but the pool's. */
typedef struct bl_quota {
    uint64_t bytes;             /* payload of its grants and of the blocks it has pinned */
    uint32_t grant_count;
    uint32_t pin_count;         /* different blocks */
    uint32_t calls_per_s;       /* so many at once, and as many every second */
    uint32_t reserved;
} bl_quota;

/* Set the quota. Any thread may call this while the server exists; the poll loop applies it within
 * a millisecond. Whatever a session has already, it keeps. */
void bl_server_limit(bl_server *server, const bl_quota *quota);

/* Refuse new grants from now on, or grant again. Any thread may call this; bl_server_stat says when
 * it is applied. */
void bl_server_drain(bl_server *server, int draining);

/* Forget the parent's server in a forked child, which must not use it. */
void bl_server_forked(bl_server *server);
int bl_server_handle_method(bl_server *server, uint32_t method, bl_handler handler, void *context);

/* An operator declares that every server and session that the pool knows of now can write no more.
 * Call it before the server stands by or serves. Processes of this host whose end can be proven are
 * left out. 0, or the heartbeat of one moves: -BL_ERROR_SERVER_ALIVE, _SESSION_ALIVE. */
int bl_server_declare_gone(bl_server *server);

/* Become the pool's server, of lanes only: 0, or -BL_ERROR_SERVER_ALIVE, _EPOCH_DAMAGED,
 * _HOST_CLASH; or _SESSION_ALIVE: a session that was declared gone is alive. */
int bl_server_serve_lanes(bl_server *server);

/* Stand by: look at the pool's server every few milliseconds, for timeout_ns. 1: it is time to try
 * to take over (nobody serves, the server stopped, it is proven gone, or its heartbeat stood still
 * for lost_ns, or longer as rpc/standby.c measures); 0: it lives; or
 * -BL_ERROR_EPOCH_DAMAGED, _HOST_CLASH. Call it before the server serves; if taking over is
 * refused, the server may stand by again. */
int bl_server_watch(bl_server *server, uint64_t lost_ns, uint64_t timeout_ns);

/* Serve until bl_server_stop (from any thread): 0, or -BL_ERROR_DEPOSED. */
int bl_server_run(bl_server *server);
void bl_server_stop(bl_server *server);
void bl_server_describe(const bl_server *server, bl_server_stat *out);

typedef struct bl_session bl_session;

typedef struct bl_session_stat {
    uint64_t epoch;
    uint64_t nonce;
    uint64_t call_count;
    uint64_t reattach_count;
    uint64_t mismatch_count;    /* blocks of gets whose entry or bytes were not those expected */
    uint64_t checksum_count;    /* those of them whose bytes did not have their checksums */
    uint32_t lane;
    uint32_t reserved;
} bl_session_stat;

/* Attach: 0, -BL_ERROR_NO_SERVER, _NO_LANE, _HOST_CLASH, _SECOND_HOST, _TIMEOUT or
 * -errno. */
int bl_session_open(const bl_pool *pool, const char *directory, uint32_t host, uint64_t timeout_ns,
                    bl_session **out);
void bl_session_close(bl_session *session);

/* Forget a session of the parent in a forked child; call it for each. */
void bl_session_forked(bl_session *session);
void bl_session_describe(const bl_session *session, bl_session_stat *out);

typedef struct bl_message {
    const uint8_t *request;
    uint8_t *reply;
    uint32_t *reply_size;       /* set when the call returns 0 or more */
    uint32_t request_size;
    uint32_t reply_capacity;
    uint32_t method;
} bl_message;

/* Make one call: the handler's status, or a negative error. */
int bl_session_call(bl_session *session, const bl_message *message, uint64_t timeout_ns);

/* Make one call whose parts are plain arguments, as Python has them: the size of the reply, or a
 * negative error. */
int64_t bl_session_call_bytes(bl_session *session, uint32_t method, const uint8_t *request,
                              uint32_t request_size, uint8_t *reply, uint32_t reply_capacity,
                              uint64_t timeout_ns);

/* Many short calls of one method, of which up to depth are out at a time. */
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

/* Make the calls: 0, the worst status of a handler, or -BL_ERROR_TIMEOUT: no reply for that
 * long. */
int bl_session_pump(bl_session *session, const bl_pump *pump, uint64_t timeout_ns);

/* A handler that sends the request back. */
int bl_echo_handler(void *context, bl_call *call);

/* ---- Functions of a program: threads of the server's process answer these calls, so that a slow
 * function delays its caller alone. */

enum bl_function_method { BL_METHOD_FUNCTION = 20 };

enum { BL_FUNCTION_THREADS_MAX = 64 };

/* A call that a thread has taken, until it answers. */
typedef struct bl_function_call {
    const uint8_t *request;
    uint64_t nonce;             /* of the session that called */
    uint32_t request_size;
    uint32_t lane;
    uint32_t number;            /* names the call in the answer */
    uint32_t reserved;
} bl_function_call;

/* Let threads answer calls; it comes before the handler below: 0 or -errno. */
int bl_function_open(bl_server *server);

/* A handler that leaves the request for a thread; its context is the server. */
int bl_function_handler(void *server, bl_call *call);

/* Wait for a call: 1; 0: the server was asked to stop; or -errno. At most BL_FUNCTION_THREADS_MAX
 * threads may do so, and each answers a call before it takes another. */
int bl_function_take(bl_server *server, bl_function_call *out);

/* Answer a call that was taken: 0, or -EINVAL: the reply is larger than bulk_size, or no such call
 * is. If the caller is gone, nothing is sent. */
int bl_function_answer(bl_server *server, uint32_t number, const uint8_t *reply, uint32_t size,
                       int32_t status);

/* ---- What the exporter shows of a server. Any thread may ask while the server exists; the figures
 * are not all of one instant. */

/* The calls of one method. */
typedef struct bl_calls {
    uint64_t call_count;
    uint64_t error_count;       /* answered with an error */
} bl_calls;

/* Copy the counters of methods 0 to count - 1. */
void bl_server_calls(const bl_server *server, bl_calls *out, uint32_t count);

/* What clients count in their own processes, such as the seconds of their gets: the server adds up
 * what they report. A client says of what kind it is, and how much each of its figures has grown
 * since its last report. What the figures mean is the clients' business (beluga/rpc/report.py). */
enum bl_report_limit { BL_REPORT_KINDS = 8, BL_REPORT_FIGURES = 128 };

typedef struct bl_report {
    uint64_t kind;
    uint64_t figures[BL_REPORT_FIGURES]; /* a request may end after any of them */
} bl_report;

/* The handler of reports; its context is the server. */
int bl_report_handler(void *server, bl_call *call);

/* Copy the sums of a kind: BL_REPORT_FIGURES of them. */
void bl_server_reported(const bl_server *server, uint32_t kind, uint64_t *figures);

/* ---- The trace: the bytes of the file "trace" in the runtime directory (rpc/trace.h). */

enum bl_trace_limit { BL_TRACE_ENTRIES = 32768, BL_TRACE_HEAD_SIZE = 4096 };

/* What clocks said when the processor's counter was at ticks. */
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
    bl_followed followed;       /* why it took over */
    bl_trace_clocks first, last; /* when it began, and a moment ago */
} bl_trace_head;

/* One call. The entries begin at BL_TRACE_HEAD_SIZE; sequence n has the n % entry_count-th. */
typedef struct bl_trace_entry {
    uint64_t ended;             /* the sequence, when the call had its status; before it 0 */
    uint64_t ticks;             /* when it was found in its lane, or the call before it ended */
    uint64_t ticks_taken;       /* until it had its status */
    uint64_t nonce;             /* of the session */
    uint32_t request_size;
    uint32_t reply_size;
    int32_t status;
    uint32_t pid;               /* of the session; 0: not known here */
    uint16_t keys;
    uint16_t method;
    uint16_t lane;
    uint16_t host;
    uint64_t sequence;          /* from 1 on */
} bl_trace_entry;

#endif
