/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Declares the link scheduler, which decides which copy may use a link next. cffi reads this file
 * too. Functions that take now_ns are pure and read no clock, so tests run them in virtual time.
 * Shared structs lie in memory of this host (base/host_atomic.h), never in the pool. The Python
 * half is beluga/transfer/link.py.
 *
 * The design is Seastar's I/O scheduler: a shared token bucket admits, a fair queue per engine
 * orders, and all engines of the host share their state. Tokens of a link are picoseconds of its
 * time, so every link fills at the same rate, and a cost is the time that a piece takes.
 */
#ifndef BL_API_IOSCHED_H
#define BL_API_IOSCHED_H

#include "api/pool.h"

typedef struct bl_io_queue bl_io_queue; /* an engine's queues for a link */

/* ---- The token bucket (iosched/bucket.c) */

/* A token bucket. head counts the tokens added over time. In a capped bucket head never passes
 * ceil, which completed work raises, so a slow link delays new pieces. */
typedef struct bl_tokens {
    uint64_t tail;              /* tokens requested so far */
    uint64_t head;              /* tokens available so far */
    uint64_t ceil;              /* if capped: the upper limit of head */
    uint64_t replenished_ns;
    uint64_t rate;              /* tokens per second; 0: no bucket */
    uint64_t limit;             /* the most unused tokens; if capped, plus tokens in use */
    uint64_t threshold;         /* the fewest tokens to add at a time */
    uint64_t capped;
} bl_tokens;

/* Returns -EINVAL if an hour at this rate would overflow, or if the limit is 0. */
int bl_tokens_init(bl_tokens *bucket, uint64_t rate, uint64_t limit, uint64_t threshold,
                   int capped, uint64_t now_ns);

/* Returns a ticket: the tokens may be used once bl_tokens_lacks returns 0 for it. */
uint64_t bl_tokens_grab(bl_tokens *bucket, uint64_t tokens);
uint64_t bl_tokens_lacks(const bl_tokens *bucket, uint64_t ticket);
void bl_tokens_replenish(bl_tokens *bucket, uint64_t now_ns);

/* Give back unused tokens, or, if the bucket is capped, the tokens of completed work. */
void bl_tokens_refund(bl_tokens *bucket, uint64_t tokens);
void bl_tokens_release(bl_tokens *bucket, uint64_t tokens);

/* Returns how long the bucket needs to add this many tokens. */
uint64_t bl_tokens_duration_ns(const bl_tokens *bucket, uint64_t tokens);

/* ---- A direction of a link, which all engines of the host share (iosched/link.c) */

enum bl_link_constant {
    BL_LINK_NODES = 32,         /* classes and groups; node 0 is the root */
    BL_LINK_MEMBERS = 128,      /* engines of all processes at a time */
    BL_LINK_DEVICES = 16        /* memory devices behind a link */
};

/* A node of the tree: a leaf is a class of requests, and the other nodes are groups of classes. */
typedef struct bl_node {
    uint64_t accumulated;       /* cost so far, divided by the shares at that time */
    uint64_t last;              /* group: the greatest accumulated cost of a served child */
    uint64_t shares;            /* 0: no such node */
    uint64_t parent;
    uint64_t bytes;             /* class: bytes admitted so far */
    uint64_t pieces;
    bl_tokens bandwidth;        /* rate 0: not limited; a token is 512 bytes */
} bl_node;

/* The tokens and the demand of one engine. If its process dies, another process releases them. */
typedef struct bl_member {
    uint64_t owner;             /* number << 32 | pid; 0: free */
    uint64_t started;           /* process start in the kernel's ticks; 0: being taken */
    uint64_t pids;              /* inode of the pid namespace of the pid */
    uint64_t seen_ns;           /* when the engine last polled */
    uint64_t turn;              /* odd: held and the bucket are being updated */
    uint64_t held;              /* tokens requested, not refunded or released */
    uint64_t pending;           /* the part of held that is not used yet */
    uint64_t demand;            /* a bit per class with work that an idle engine could start */
    uint64_t until_ns;          /* when demand expires */
} bl_member;

typedef struct bl_direction {
    uint64_t magic;
    uint64_t node_count;        /* nodes, the root included */
    uint64_t forgiving;         /* head start of a waking class, times its shares */
    uint64_t owner_count;       /* owner numbers assigned so far */
    uint64_t member_count;      /* members from this index on were never taken */
    uint64_t suspect;           /* members cleared since the last audit, if capped */
    uint64_t reaped_ns;         /* when the members were last inspected */
    uint64_t used;              /* tokens of the pieces admitted so far */
    uint64_t reaped;            /* members whose process was gone */
    uint64_t audited;           /* tokens that audits corrected */
    bl_tokens bucket;
    bl_node nodes[BL_LINK_NODES];
    bl_member members[BL_LINK_MEMBERS];
} bl_direction;

/* Initialize a direction that has only a root. limit is that of the bucket; forgiving is in
 * tokens. */
int bl_direction_init(bl_direction *direction, uint64_t limit, uint64_t forgiving, int capped,
                      uint64_t now_ns);

/* Returns 1 if the memory holds a direction of this version. */
int bl_direction_valid(const bl_direction *direction);

/* Add a class; it becomes a group once it is a parent. Returns its node, or -EINVAL, -ENOSPC. */
int bl_direction_add(bl_direction *direction, uint32_t parent, uint32_t shares);

/* Change the shares from the next piece on. */
int bl_direction_set_shares(bl_direction *direction, uint32_t node, uint32_t shares);

/* Limit the bandwidth of a class or group; 0 lifts the limit. The burst is in bytes. */
int bl_direction_limit(bl_direction *direction, uint32_t node, uint64_t bytes_per_s, uint64_t burst,
                       uint64_t now_ns);

/* Free the members of dead processes and correct the bucket. Returns how many were freed. */
int bl_direction_reap(bl_direction *direction, uint64_t now_ns);

/* ---- A queue: pieces that wait for one engine and one direction (iosched/queue.c, admit.c) */

typedef struct bl_queue bl_queue;

typedef struct bl_admission {
    uint64_t id;                /* the piece's id */
    uint64_t waiter;            /* the handle for bl_queue_complete */
    uint64_t queued_ns;         /* when it was pushed */
    uint64_t bytes;
    uint64_t node;              /* its class */
} bl_admission;

typedef struct bl_queue_stat {
    uint64_t queued;            /* waiting pieces, cancelled ones included */
    uint64_t in_flight;         /* pieces admitted and not completed */
    uint64_t pending;           /* tokens reserved and not used */
    uint64_t polls;
    uint64_t yields;            /* polls that yielded the link to another engine */
    uint64_t lost;              /* times that this member was considered dead */
    uint64_t stalls;            /* pieces in flight for longer than the threshold */
    uint64_t stalled_ns;        /* how long the last stall took */
    uint64_t stall_ns;          /* the threshold: doubles with each, falls with time */
    double flow_ratio;          /* started tokens divided by completed tokens */
} bl_queue_stat;

/* Create a queue, with a member. Returns -ENOSPC if none is free. goal_ns is the latency goal of
 * the flow ratio. */
int bl_queue_create(bl_queue **queue, bl_direction *direction, uint64_t goal_ns, uint64_t now_ns);
void bl_queue_destroy(bl_queue *queue);

/* Add a memory device behind the link: pieces take tokens of its bucket as well. Returns its
 * number. */
int bl_queue_add_device(bl_queue *queue, bl_tokens *bucket);

/* Append a piece to a class. device_tokens has one value per device, or is NULL. Returns the
 * piece's handle, or a negative errno. */
int64_t bl_queue_push(bl_queue *queue, uint32_t node, uint64_t tokens, uint64_t bytes,
                      const uint64_t *device_tokens, uint64_t id, uint64_t now_ns);

/* Cancel a piece: it costs nothing, and its place in the queue is skipped. Returns -ENOENT if it
 * has been admitted. */
int bl_queue_cancel(bl_queue *queue, uint64_t waiter);

/* Admit the next piece by fairness alone, without tokens. Returns -EAGAIN if none waits. */
int bl_queue_pop(bl_queue *queue, uint64_t now_ns, bl_admission *admission);

/* Stop a class (plugged 0), or resume it. */
int bl_queue_plug(bl_queue *queue, uint32_t node, int plugged);

/* Admit the next piece that may start now. Returns 0, or -EAGAIN and in *wait_ns the time until the
 * next poll (UINT64_MAX if nothing waits). The call also announces the other waiting classes, so
 * that other engines leave room for them. The announcement holds for 2 ms while the engine is free.
 * After an admission it holds for 1.5 times the duration of the piece: an engine that polls again
 * by then keeps its turn, and a slower one yields the link to others. */
int bl_queue_poll(bl_queue *queue, uint64_t now_ns, bl_admission *admission, uint64_t *wait_ns);

/* The engine is busy: its waiting pieces do not delay other engines until it polls again. */
void bl_queue_rest(bl_queue *queue);

/* End a piece: it was copied or abandoned. */
void bl_queue_complete(bl_queue *queue, uint64_t waiter, uint64_t now_ns);

void bl_queue_stat_read(const bl_queue *queue, bl_queue_stat *stat);

/* ---- An I/O queue: an engine's two queues, with a clock and a lock (iosched/io_queue.c) */

/* The price of pieces, in picoseconds for each byte and for each piece: of the link by direction,
 * and of a memory device. */
typedef struct bl_price {
    double byte_ps[2];
    double piece_ps[2];
    double device_byte_ps;
    double device_piece_ps;
    uint64_t piece_size;        /* the largest piece, in bytes */
    uint64_t piece_count;       /* such pieces in flight in each direction */
} bl_price;

/* The admissions of one class at one engine. */
typedef struct bl_transfer_stats {
    uint64_t pieces;
    uint64_t bytes;
    uint64_t waited_ns;         /* wait before admission, of all pieces */
    uint64_t longest_ns;        /* the longest wait of one piece */
    uint64_t unthrottled;       /* pieces without tokens: no member, or a second's wait */
} bl_transfer_stats;

/* Create an I/O queue. If the link is not duplex, both directions are the same one, and there is
 * one queue. The memory devices are those of the pool, in its order; without a pool there are
 * none. */
int bl_io_queue_create(bl_io_queue **io_queue, bl_direction *read, bl_direction *write,
                       uint64_t goal_ns, const bl_price *price, const bl_pool *pool);
void bl_io_queue_destroy(bl_io_queue *io_queue);

/* Add a memory device of the pool, for both directions. */
int bl_io_queue_add_device(bl_io_queue *io_queue, bl_tokens *bucket);

/* Enlarge the buckets of the link to at least count pieces of this many bytes. The buckets never
 * shrink. */
void bl_io_queue_widen(bl_io_queue *io_queue, uint64_t bytes, uint32_t count);

/* One piece to copy. Its address must not change from the first bl_io_queue_acquire to
 * bl_io_queue_release. */
typedef struct bl_io_request {
    uint64_t bytes;
    uint64_t waiter;            /* its handle in the queue */
    uint64_t since_ns;          /* when it was first requested */
    uint32_t node;              /* its class */
    uint8_t direction;          /* 0 read, 1 write */
    uint8_t again;              /* the caller will request another piece after it */
    uint8_t state;              /* enum bl_io_state */
    uint8_t coming;             /* again was announced to other engines */
} bl_io_request;

enum bl_io_state { BL_IO_IDLE, BL_IO_QUEUED, BL_IO_ADMITTED, BL_IO_UNTHROTTLED };

/* Wait until a piece may be copied; this is the only way to use a link. Returns 0: copy the piece,
 * then release it. Returns -EAGAIN after timeout_ns: the piece keeps its position, so call again.
 * Returns -ECANCELED if the I/O queue was stopped. A piece that has waited for a second, or for
 * which the link has no member, is copied without tokens (BL_IO_UNTHROTTLED), so a failed scheduler
 * never blocks a copy forever. device_bytes has the bytes on each memory device, or is NULL. */
int bl_io_queue_acquire(bl_io_queue *io_queue, bl_io_request *request, const uint64_t *device_bytes,
                        uint64_t timeout_ns);

/* Release a piece: it was copied, or is abandoned. A second call has no effect. */
void bl_io_queue_release(bl_io_queue *io_queue, bl_io_request *request);

void bl_io_queue_stat(bl_io_queue *io_queue, int direction, bl_queue_stat *stat);
/* Returns the stalls in both directions. */
uint64_t bl_io_queue_stalls(bl_io_queue *io_queue);
void bl_io_queue_transfer_stats(bl_io_queue *io_queue, uint32_t node, bl_transfer_stats *stats);

/* Stop the threads that copy by themselves (iosched/throttle.h): those that wait or request a piece
 * get -ECANCELED until stopped is 0 again. */
void bl_io_queue_stop(bl_io_queue *io_queue, int stopped);

/* Returns CLOCK_MONOTONIC, which the processes of a host share. */
uint64_t bl_io_queue_now_ns(void);

#endif
