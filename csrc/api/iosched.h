/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Who may use a link next. cffi reads it too. Everything that takes now_ns is pure: it knows
 * no clock, so tests run it in virtual time. The structs that processes share lie in memory of
 * this host (base/host_atomic.h), never in the pool.
 *
 * The design is Seastar's I/O scheduler: a shared token bucket admits, a fair queue per engine
 * orders, and their state is shared by all engines of the host. Tokens of a link are picoseconds
 * of its time, so every link fills at the same rate and a cost says what a piece takes.
 */
#ifndef BL_API_LINK_H
#define BL_API_LINK_H

#include "api/pool.h"

typedef struct bl_io_queue bl_io_queue; /* an engine's place at a link */

/* ---- The throttler (iosched/bucket.c) */

/* A token bucket. head is what time has given. Capped, time gives no more than
 * completed work has returned (ceil), so a slow link holds back what is started. */
typedef struct bl_tokens {
    uint64_t tail;              /* tokens asked for, ever */
    uint64_t head;              /* tokens that may be had, ever */
    uint64_t ceil;              /* capped: how far head may go */
    uint64_t replenished_ns;
    uint64_t rate;              /* tokens per second; 0: no bucket */
    uint64_t limit;             /* unused tokens, and capped tokens in use, at most */
    uint64_t threshold;         /* fewer are not worth replenishing */
    uint64_t capped;
} bl_tokens;

/* -EINVAL for a rate that an hour of would overflow, and for a limit of 0. */
int bl_tokens_init(bl_tokens *bucket, uint64_t rate, uint64_t limit, uint64_t threshold,
                   int capped, uint64_t now_ns);

/* A ticket: the tokens may be used once bl_tokens_lacks says 0 of it. */
uint64_t bl_tokens_grab(bl_tokens *bucket, uint64_t tokens);
uint64_t bl_tokens_lacks(const bl_tokens *bucket, uint64_t ticket);
void bl_tokens_replenish(bl_tokens *bucket, uint64_t now_ns);

/* Give back tokens that were not used; and, capped, those of work that has completed. */
void bl_tokens_refund(bl_tokens *bucket, uint64_t tokens);
void bl_tokens_release(bl_tokens *bucket, uint64_t tokens);

/* How long the bucket takes to give so many. */
uint64_t bl_tokens_duration_ns(const bl_tokens *bucket, uint64_t tokens);

/* ---- A way: one direction of a link, as all engines of the host see it (iosched/link.c) */

enum bl_link_constant {
    BL_LINK_NODES = 32,         /* classes and groups; node 0 is the root */
    BL_LINK_MEMBERS = 128,      /* engines of all processes at a time */
    BL_LINK_DEVICES = 16        /* memory devices that a link leads to */
};

/* Part of a tree: a leaf is a class of requests, the rest are groups of classes. */
typedef struct bl_node {
    uint64_t accumulated;       /* cost so far, each divided by the shares of its time */
    uint64_t last;              /* a group: the most that a child had when it was served */
    uint64_t shares;            /* 0: no such node */
    uint64_t parent;
    uint64_t bytes;             /* admitted so far; a class */
    uint64_t pieces;
    bl_tokens bandwidth;        /* rate 0: not limited; a token is 512 bytes */
} bl_node;

/* What one engine holds. A process that dies leaves it to be given back by whoever finds it. */
typedef struct bl_member {
    uint64_t owner;             /* number << 32 | pid; 0: free */
    uint64_t started;           /* when the process was, in the kernel's ticks; 0: being taken */
    uint64_t pids;              /* inode of the pid namespace that the pid is of */
    uint64_t seen_ns;           /* when it last asked */
    uint64_t turn;              /* odd: held and the bucket do not agree just now */
    uint64_t held;              /* tokens asked for and neither refunded nor released */
    uint64_t pending;           /* of these, not used yet */
    uint64_t demand;            /* bit per class: an engine is free, and work for it waits */
    uint64_t until_ns;          /* when that is not believed any more */
} bl_member;

typedef struct bl_direction {
    uint64_t magic;
    uint64_t node_count;        /* the root with them */
    uint64_t forgiving;         /* head start of a class that wakes, times its shares */
    uint64_t owner_count;       /* numbers given to members so far */
    uint64_t member_count;      /* no member from here on was ever taken */
    uint64_t suspect;           /* members cleared since the capped bucket was audited */
    uint64_t reaped_ns;         /* when the members were last looked over */
    uint64_t used;              /* tokens of the pieces admitted so far */
    uint64_t reaped;            /* members whose process was gone */
    uint64_t audited;           /* tokens that audits put right */
    bl_tokens bucket;
    bl_node nodes[BL_LINK_NODES];
    bl_member members[BL_LINK_MEMBERS];
} bl_direction;

/* A way with a root and nothing else. limit is of the bucket; forgiving is tokens. */
int bl_direction_init(bl_direction *way, uint64_t limit, uint64_t forgiving, int capped,
                   uint64_t now_ns);

/* Is what lies there a way, of this version? */
int bl_direction_valid(const bl_direction *way);

/* A class, or a group once others have it as parent: its node, or -EINVAL, -ENOSPC. */
int bl_direction_add(bl_direction *way, uint32_t parent, uint32_t shares);

/* From the next piece on. */
int bl_direction_set_shares(bl_direction *way, uint32_t node, uint32_t shares);

/* Limit a class or group; 0 lifts it. The burst is in bytes. */
int bl_direction_limit(bl_direction *way, uint32_t node, uint64_t bytes_per_s, uint64_t burst,
                    uint64_t now_ns);

/* Free the members of processes that are gone and put right what they left. Members freed. */
int bl_direction_reap(bl_direction *way, uint64_t now_ns);

/* ---- A queue: the pieces that wait for one engine and one way (iosched/queue.c, iosched/admit.c)
 * */

typedef struct bl_queue bl_queue;

typedef struct bl_admission {
    uint64_t id;                /* the piece's */
    uint64_t waiter;            /* its handle, to be told to bl_queue_complete */
    uint64_t queued_ns;         /* when it was pushed */
    uint64_t bytes;
    uint64_t node;              /* its class */
} bl_admission;

typedef struct bl_queue_stat {
    uint64_t queued;            /* pieces that wait, cancelled ones too */
    uint64_t in_flight;         /* admitted and not completed */
    uint64_t pending;           /* tokens reserved and not used */
    uint64_t polls;
    uint64_t yields;            /* polls that left their turn to another engine's class */
    uint64_t lost;              /* times that somebody took this member for dead */
    uint64_t stalls;            /* pieces that were under way for longer than the threshold */
    uint64_t stalled_ns;        /* how long the last of them was */
    uint64_t stall_ns;          /* the threshold: doubles with each, and comes down with time */
    double flow_ratio;          /* how much faster pieces were started than completed */
} bl_queue_stat;

/* Takes a member: -ENOSPC when there is none. goal_ns is the latency goal of the flow ratio. */
int bl_queue_create(bl_queue **queue, bl_direction *way, uint64_t goal_ns, uint64_t now_ns);
void bl_queue_destroy(bl_queue *queue);

/* A memory device behind the link: pieces take tokens of its bucket as well. Its number. */
int bl_queue_add_device(bl_queue *queue, bl_tokens *bucket);

/* Put a piece of a class behind the others. device_tokens has one for each device, or is NULL.
 * Returns its handle, or a negative errno. */
int64_t bl_queue_push(bl_queue *queue, uint32_t node, uint64_t tokens, uint64_t bytes,
                      const uint64_t *device_tokens, uint64_t id, uint64_t now_ns);

/* It costs nothing any more, and is passed over when its turn is. -ENOENT if it has been
 * admitted. */
int bl_queue_cancel(bl_queue *queue, uint64_t waiter);

/* Whose turn is it, fairness alone: what the throttle says is not asked. -EAGAIN: nothing waits. */
int bl_queue_pop(bl_queue *queue, uint64_t now_ns, bl_admission *admission);

/* Stop and resume a class. */
int bl_queue_plug(bl_queue *queue, uint32_t node, int plugged);

/* The next piece that may start now: 0, or -EAGAIN and after how long to ask again (UINT64_MAX:
 * nothing waits). It also says what else waits here, so that others leave it its turn: for a
 * while if the engine is free, else for as long as the link takes for the piece, and half as long
 * again. An engine that is back by then has its turn; a slower one leaves the link to others. */
int bl_queue_poll(bl_queue *queue, uint64_t now_ns, bl_admission *admission, uint64_t *wait_ns);

/* The engine is busy with something else: what waits here does not hold others back. */
void bl_queue_rest(bl_queue *queue);

/* A piece has been copied, or will not be. */
void bl_queue_complete(bl_queue *queue, uint64_t waiter, uint64_t now_ns);

void bl_queue_stat_read(const bl_queue *queue, bl_queue_stat *stat);

/* ---- An I/O queue: an engine's two queues, with a clock and a lock (iosched/io_queue.c) */

/* What pieces take: picoseconds for each byte and each piece, of the link by direction, and of a
 * memory device. */
typedef struct bl_price {
    double byte_ps[2];
    double piece_ps[2];
    double device_byte_ps;
    double device_piece_ps;
    uint64_t piece_size;        /* bytes that are let on in one go, at most */
    uint64_t piece_count;       /* such pieces that may be under way in each direction */
} bl_price;

/* What an engine was let on for, of one class. */
typedef struct bl_transfer_stats {
    uint64_t pieces;
    uint64_t bytes;
    uint64_t waited_ns;         /* before they were let on */
    uint64_t longest_ns;        /* of that: one piece, at most */
    uint64_t unthrottled;       /* pieces that went without leave: no member, or a second's wait */
} bl_transfer_stats;

/* Both ways may be one, where a link is not duplex: then there is one queue. The memory devices are
 * those of the pool, in its order; no pool: none. */
int bl_io_queue_create(bl_io_queue **io_queue, bl_direction *read, bl_direction *write,
                       uint64_t goal_ns,
                   const bl_price *price, const bl_pool *pool);
void bl_io_queue_destroy(bl_io_queue *io_queue);

/* A memory device of the pool's. For both directions. */
int bl_io_queue_add_device(bl_io_queue *io_queue, bl_tokens *bucket);

/* An engine asks for pieces of so many bytes: the link's buckets hold at least count of them. They
 * are never made smaller again. */
void bl_io_queue_widen(bl_io_queue *io_queue, uint64_t bytes, uint32_t count);

/* A piece that somebody wants to copy. It stays where it is from its first bl_io_queue_acquire to
 * bl_io_queue_release. */
typedef struct bl_io_request {
    uint64_t bytes;
    uint64_t waiter;            /* in its queue */
    uint64_t since_ns;          /* when it was first asked for */
    uint32_t node;              /* its class */
    uint8_t direction;          /* 0 read, 1 write */
    uint8_t again;              /* whoever asks comes for another piece after it */
    uint8_t state;              /* enum bl_io_state */
    uint8_t coming;             /* others were told of again */
} bl_io_request;

enum bl_io_state { BL_IO_IDLE, BL_IO_QUEUED, BL_IO_ADMITTED, BL_IO_UNTHROTTLED };

/* The only way to the link: wait until this piece may be copied. 0: copy it, then release it.
 * -EAGAIN: not within timeout_ns; it keeps its place, ask again. -ECANCELED: the I/O queue was
 * stopped. A piece that has waited for a second, or that the link has no member for, is copied
 * without tokens (BL_IO_UNTHROTTLED): a failed scheduler blocks no copy for ever. device_bytes has
 * the bytes on each memory device, or is NULL. */
int bl_io_queue_acquire(bl_io_queue *io_queue, bl_io_request *request, const uint64_t *device_bytes,
                    uint64_t timeout_ns);

/* The piece was copied; or nobody wants it any more. Twice is fine. */
void bl_io_queue_release(bl_io_queue *io_queue, bl_io_request *request);

void bl_io_queue_stat(bl_io_queue *io_queue, int direction, bl_queue_stat *stat);
/* In both directions. */
uint64_t bl_io_queue_stalls(bl_io_queue *io_queue);
void bl_io_queue_carried(bl_io_queue *io_queue, uint32_t node, bl_transfer_stats *carried);

/* Threads that copy by themselves (iosched/throttle.h) and wait here, or come for their next piece,
 * go no further: -ECANCELED, until this is taken back. */
void bl_io_queue_stop(bl_io_queue *io_queue, int stopped);

/* CLOCK_MONOTONIC, which the processes of a host share. */
uint64_t bl_io_queue_now_ns(void);

#endif
