/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What Python may call: prototypes only, read by cffi as they stand. Functions return 0 or a count,
 * or a negative errno or bl_error; they never print, exit or touch Python.
 */
#ifndef BL_API_H
#define BL_API_H

#include <stddef.h>

#include "format/pool_format.h"

/* What errno has no word for; returned negative. errors.py gives each its exception. */
enum bl_error {
    BL_ERROR_FORKED = 1001,     /* the session belongs to the parent process */
    BL_ERROR_NO_SERVER,         /* nobody serves this pool */
    BL_ERROR_TIMEOUT,           /* the server did not answer in time */
    BL_ERROR_DEPOSED,           /* another server has taken the pool over */
    BL_ERROR_SERVER_ALIVE,      /* the pool's server lives, or is not proven gone */
    BL_ERROR_HOST_CLASH,        /* another machine uses this host number */
    BL_ERROR_NO_LANE,           /* every lane is taken or in quarantine */
    BL_ERROR_SESSION_LOST,      /* the server gave this session up */
    BL_ERROR_NO_METHOD,         /* the server has no handler for the method */
    BL_ERROR_BAD_REQUEST,       /* a field of the request is out of range */
    BL_ERROR_BAD_REPLY,         /* a field of the reply is out of range */
    BL_ERROR_HANDLER,           /* a Python handler raised */
    BL_ERROR_NO_SPACE,          /* nothing could be evicted for the block */
    BL_ERROR_TABLE_FULL,        /* max_blocks blocks, none can be evicted */
    BL_ERROR_CLASS_LIMIT,       /* too many different block sizes */
    BL_ERROR_NO_GRANT,          /* the session does not hold that grant (any more) */
    BL_ERROR_PIN_LIMIT,         /* the session has too many blocks pinned */
    BL_ERROR_QUARANTINE,        /* this host's dead writers hold too much space */
    BL_ERROR_EPOCH_DAMAGED,     /* a line that says who is server can no longer be read */
    BL_ERROR_SECOND_HOST,       /* the pool is coherent, that is one host's, and not this one's */
    BL_ERROR_LOBBY_BUSY,        /* another process of this host attaches and does not get done */
    BL_ERROR_QUOTA,             /* the session has its share, or calls too often */
    BL_ERROR_DEVICE_FAULT,      /* a device failed: poisoned, gone, cut short */
    BL_ERROR_QUEUE_FULL,        /* as many tasks as may be, or as much space for them */
    BL_ERROR_SESSION_ALIVE,     /* a session that was declared gone lives */
    BL_ERROR_RUNTIME_DIR        /* the server is this host's, its runtime directory another one */
};

/* ---- L1 primitives (beluga.primitives) */

enum bl_cpu_feature {
    BL_CPU_CLFLUSHOPT = 1,
    BL_CPU_CLWB = 2,
    BL_CPU_SSE42 = 4,           /* the crc32 instruction */
    BL_CPU_AVX2 = 8,
    BL_CPU_AVX512 = 16,         /* F, with the operating system saving its state */
    BL_CPU_MOVDIR64B = 32,
    BL_CPU_PCLMUL = 64,
    BL_CPU_VPCLMUL = 128,       /* four carry-less products at once; implies AVX512 */
    BL_CPU_ENQCMD = 256,        /* to a device's shared queue */
    BL_CPU_WAITPKG = 512        /* to sleep until a line is written */
};

/* Features found and not taken away. */
uint32_t bl_cpu_features(void);

/* Take away every feature that is not in mask; ~0 gives all back. Before pools are opened. */
void bl_cpu_limit(uint32_t mask);

/* The streaming path in use: "sse2", "avx2", "avx512" or "movdir64b". */
const char *bl_copy_isa(void);

/* Copy round the cache: whole lines by non-temporal stores, a ragged head and tail by plain stores
 * that are flushed. Ends with a store fence. */
void bl_ntstore_copy(void *target, const void *source, size_t size);

/* Write dirty lines back; whether they stay cached depends on the CPU. No fence. */
void bl_flush(const void *address, size_t size);

/* Write back and drop, between full fences: the loads that follow go to memory. */
void bl_drop(const void *address, size_t size);

void bl_fence(void);

/* CRC-32C of bytes, seed 0 or the result for those before. */
uint32_t bl_crc32c(uint32_t seed, const void *bytes, size_t size);

/* The crash points of this build, and their names ("what.step"). */
uint32_t bl_crash_point_count(void);
const char *bl_crash_point_name(uint32_t index);

/* End this process when it passes a point for the passage-th time from now on; stop: stop it,
 * once. At a point of a line: when the words of the line that have a bit in words are out, and no
 * others. name NULL: never. 0, or -ENOENT: no such point, or -EINVAL: it is no point of a line. */
int bl_crash_arm(const char *name, uint32_t passage, int stop, uint32_t words);

/* ---- L2 pool */

typedef struct bl_pool bl_pool;

typedef struct bl_pool_config {
    uint8_t pool_id[16];
    uint64_t device_size;       /* a multiple of a stripe, superblock's included */
    uint64_t created_s;
    uint32_t device_count;
    uint32_t interleaved;
    uint32_t lane_count;
    uint32_t slot_count;
    uint32_t bulk_size;
    uint32_t block_count_max;
    uint32_t sparse;
} bl_pool_config;

/* Lay a pool out: 0 or -EINVAL, or -ENOSPC if no data stripe would be left. */
int bl_geometry_make(const bl_pool_config *config, bl_geometry *out);

uint64_t bl_format_hash(void);

/* Fill in the superblock of device device_index. */
void bl_superblock_make(const bl_pool_config *config, const bl_geometry *geometry,
                        uint32_t device_index, uint32_t discipline, bl_superblock *out);

/* Why a superblock cannot be used by this program, in order of what is asked first. */
enum bl_superblock_fault {
    BL_SUPERBLOCK_GOOD = 0,
    BL_SUPERBLOCK_EMPTY,        /* all zero: never formatted */
    BL_SUPERBLOCK_FOREIGN,      /* something else's bytes */
    BL_SUPERBLOCK_VERSION,
    BL_SUPERBLOCK_DAMAGED,      /* the check is wrong */
    BL_SUPERBLOCK_FORMAT,       /* right version, but another format hash */
    BL_SUPERBLOCK_GEOMETRY      /* right check, but fields that contradict each other */
};
int bl_superblock_fault(const bl_superblock *superblock);

/* Map [offset, offset + size) of fd, shared, 2 MiB-aligned in memory, not inherited by fork and not
 * in core dumps. Huge pages are asked for. 0 or -errno. */
int bl_device_map(int fd, uint64_t offset, uint64_t size, void **out);
int bl_device_unmap(void *address, uint64_t size);

/* Fault a range of a mapped device in, for writing; its bytes stay. Any number of threads, of
 * different ranges. 0 or -errno (-EFAULT: the file has no room there). */
int bl_device_populate(void *address, uint64_t size);

/* The first bytes of a mapped device, as memory has them: whole lines. 0 or
 * -BL_ERROR_DEVICE_FAULT. */
int bl_device_read(void *address, void *target, uint64_t size);
int bl_device_write(void *address, const void *source, uint64_t size);

/* A pool over mapped devices, in superblock order. The devices stay the caller's. */
int bl_pool_open(const bl_superblock *superblocks, void *const *devices, bl_pool **out);
void bl_pool_close(bl_pool *pool);

/* Map a range's pages all at once: a fault for each costs more than what is done with it. */
void bl_pool_prefault(const bl_pool *pool, uint64_t offset, uint64_t size);

/* Write zeros over all that lies before the data, then the superblocks: the pool is empty. zeroed:
 * the devices are new files, zero as they are. */
int bl_pool_format(bl_pool *pool, const bl_superblock *superblocks, uint32_t zeroed);

void bl_pool_geometry(const bl_pool *pool, bl_geometry *out);

/* The address of offset, valid to the end of its stripe; NULL outside the pool. */
void *bl_pool_address(const bl_pool *pool, uint64_t offset);

/* Bytes of the linear range, past all protocol: tools and benchmarks. Streamed out and fenced;
 * invalidated, then read. Offset and size are multiples of a line. 0 or -EINVAL. */
int bl_pool_write(const bl_pool *pool, uint64_t offset, const void *source, uint64_t size);
int bl_pool_read(const bl_pool *pool, uint64_t offset, void *target, uint64_t size);

/* ---- L3 rpc. directory: the pool's runtime directory on this host. */

/* The most keys or items in one call of the block index: a quantum of the server's attention. */
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

/* 0 or more: the call's status; a negative error reaches the caller, too. */
typedef int (*bl_handler)(void *context, bl_call *call);

typedef struct bl_server bl_server;

typedef struct bl_server_stat {
    uint64_t epoch;
    uint64_t call_count;
    uint64_t error_count;       /* calls answered with an error */
    uint64_t key_count;         /* of those calls, at most: bl_turn_keys() */
    uint64_t torn_count;        /* request lines that were not whole */
    uint64_t quota_call_count;  /* calls refused: too many in a second */
    uint64_t quota_grant_count; /* grants refused: too many, or too many bytes */
    uint64_t quota_pin_count;   /* pins refused: too many, or too many bytes */
    uint64_t turn_request_max;  /* greatest turn of a lane */
    uint64_t turn_key_max;
    uint64_t wait_request_max;  /* most that others had done when a lane's oldest request was */
    uint64_t wait_key_max;
    uint64_t attach_count;
    uint64_t end_count;         /* sessions ended, for whatever reason */
    uint32_t live_count;        /* sessions now */
    uint32_t inherited_count;   /* sessions of earlier epochs not yet proven gone */
    uint32_t watched_count;     /* sessions whose process is watched by a pidfd */
    uint32_t reserved;
} bl_server_stat;

int bl_server_create(const bl_pool *pool, const char *directory, uint32_t host, bl_server **out);
void bl_server_destroy(bl_server *server);
/* How long another host's beat may stand still before its session is in doubt; 0: 5 s. */
void bl_server_beat_lost(bl_server *server, uint64_t ns);

/* What each session may have at a time; 0: no limit but the pool's. */
typedef struct bl_quota {
    uint64_t bytes;             /* payload of its grants and of the blocks it has pinned */
    uint32_t grant_count;
    uint32_t pin_count;         /* different blocks */
    uint32_t calls_per_s;       /* that many at once, and as many every second */
    uint32_t reserved;
} bl_quota;

/* Before it serves. */
void bl_server_limit(bl_server *server, const bl_quota *quota);

/* To be called in a forked child: the parent's server is not the child's. */
void bl_server_forked(bl_server *server);
int bl_server_handle_method(bl_server *server, uint32_t method, bl_handler handler, void *context);

/* An operator says that every server and session that the pool knows of now can write no more.
 * Before the server stands by or serves; those of this host that can be proven are left out.
 * 0, or the beat of one moves: -BL_ERROR_SERVER_ALIVE, _SESSION_ALIVE. */
int bl_server_declare_gone(bl_server *server);

/* Become the pool's server, of lanes only: 0, or -BL_ERROR_SERVER_ALIVE, _EPOCH_DAMAGED,
 * _HOST_CLASH; _SESSION_ALIVE: of one that was declared gone. */
int bl_server_serve_lanes(bl_server *server);

/* Stand by: look at the pool's server every few milliseconds, for timeout_ns. 1: it is time to try
 * to take over (nobody serves, it stopped, it is proven gone, or its beat stood still for lost_ns);
 * 0: it lives; or -BL_ERROR_EPOCH_DAMAGED, _HOST_CLASH. Before the server serves; if taking over is
 * refused, it may stand by again. */
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
    uint32_t lane;
    uint32_t reserved;
} bl_session_stat;

/* Attach: 0, -BL_ERROR_NO_SERVER, _NO_LANE, _HOST_CLASH, _SECOND_HOST, _TIMEOUT or
 * -errno. */
int bl_session_open(const bl_pool *pool, const char *directory, uint32_t host, uint64_t timeout_ns,
                    bl_session **out);
void bl_session_close(bl_session *session);

/* To be called in a forked child, for each session of the parent. */
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

/* One call: the handler's status, or a negative error. */
int bl_session_call(bl_session *session, const bl_message *message, uint64_t timeout_ns);

/* Many short calls of one method, up to depth of them out at a time. */
typedef struct bl_pump {
    const uint8_t *requests;    /* count * size bytes */
    uint8_t *replies;           /* count * size bytes, or NULL */
    uint64_t *latencies_ns;     /* count, or NULL: from sending a call to taking its reply */
    uint64_t count;
    uint32_t size;              /* of each request, at most BL_MESSAGE_INLINE_SIZE */
    uint32_t depth;
    uint32_t method;
    uint32_t reserved;
} bl_pump;

/* 0, the worst status of a handler, or -BL_ERROR_TIMEOUT: no reply for that long. */
int bl_session_pump(bl_session *session, const bl_pump *pump, uint64_t timeout_ns);

/* A handler that sends the request back. */
int bl_echo_handler(void *context, bl_call *call);

/* ---- L4 meta */

typedef struct bl_meta bl_meta;

/* The block index over a server that does not serve yet. */
int bl_meta_create(bl_server *server, bl_meta **out);
void bl_meta_destroy(bl_meta *meta);

/* Become the pool's server with the block index, all committed blocks of the predecessor in it. */
int bl_meta_serve(bl_meta *meta);
void bl_meta_describe(const bl_meta *meta, bl_meta_stat *out);

/* The client's calls. keys: two words each. Errors are negative; a long batch that fails half
 * way may have been done in part. */

/* Leading keys that are committed: their number, with a record each; state: of the key after them
 * (bl_block_state). flags BL_LOOKUP_PIN: pinned until released. */
int64_t bl_lookup(bl_session *session, const uint64_t *keys, uint32_t count, uint32_t flags,
                  bl_block_record *records, uint32_t *state, uint64_t timeout_ns);

/* A record per key: HIT (already there), GRANTED, PENDING or REFUSED. */
int bl_reserve(bl_session *session, const uint64_t *keys, uint32_t count,
               const bl_block_request *what, bl_block_record *records, uint64_t timeout_ns);

/* A status per commit: 0 or -BL_ERROR_NO_GRANT. */
int bl_commit_blocks(bl_session *session, const bl_commit *commits, uint32_t count,
                     int32_t *statuses, uint64_t timeout_ns);

/* How many grants were aborted / pins released / blocks removed. */
int64_t bl_abort_blocks(bl_session *session, const bl_commit *commits, uint32_t count,
                        uint64_t timeout_ns);
int64_t bl_release_blocks(bl_session *session, const bl_commit *commits, uint32_t count,
                          uint64_t timeout_ns);
int64_t bl_remove_blocks(bl_session *session, const uint64_t *keys, uint32_t count,
                         uint64_t timeout_ns);
int bl_meta_ask_stat(bl_session *session, bl_meta_stat *out, uint64_t timeout_ns);

/* A device failed at offset, in the data stripes: how many stripes the server retired now. */
int64_t bl_retire(bl_session *session, uint64_t offset, uint64_t timeout_ns);

/* ---- L5 transfer */

/* A run of private memory of this process. */
typedef struct bl_fragment {
    uint64_t address;
    uint64_t size;
} bl_fragment;

/* One block by itself, for tools and measurements; puts and gets do the same for a batch. The
 * fragments, end to end, are length bytes; vector gets, or has, a CRC-32C per chunk_size bytes
 * (NULL: none). A write ends with a store fence. 0, -EINVAL, or -EBADMSG: the checksums differ. */
int bl_transfer_write(const bl_pool *pool, uint64_t offset, const bl_fragment *fragments,
                      uint32_t count, uint64_t length, uint32_t chunk_size, uint32_t *vector);
int bl_transfer_read(const bl_pool *pool, uint64_t offset, const bl_fragment *fragments,
                     uint32_t count, uint64_t length, uint32_t chunk_size, const uint32_t *vector);

/* ---- L6 kvcache */

typedef struct bl_port bl_port; /* an engine's place at a link (api/iosched.h) */
typedef struct bl_copy_settings bl_copy_settings; /* (api/transfer.h) */
/* A batch of blocks of one length; each has fragment_count fragments, end to end in the pool. */
typedef struct bl_kv_batch {
    const uint64_t *keys;       /* count * 2 words */
    const bl_fragment *fragments; /* count * fragment_count, block after block */
    uint64_t layout;
    uint64_t timeout_ns;
    uint32_t count;
    uint32_t fragment_count;
    uint32_t length;            /* payload bytes of each block */
    uint32_t chunk_size;        /* payload bytes per checksum; 0: none */
    uint32_t verify;            /* get: compare the checksums */
    const bl_copy_settings *settings; /* NULL: the default; a put is by one thread all the same */
    bl_port *port;              /* of the link whose leave each piece needs; or NULL */
    uint32_t transfer_class;    /* there */
    uint32_t kept;              /* put: tasks of the queue whose number is the layout */
} bl_kv_batch;

/* Store a batch. states: per block bl_block_state, GRANTED if it was stored now; statuses: 0 or why
 * it was refused. 0, or an error of the call (the blocks are then not stored). */
int bl_kv_put(bl_session *session, const bl_kv_batch *batch, uint8_t *states, int32_t *statuses);

/* Fetch leading blocks: their number, or an error. states: HIT where the bytes are right; none if
 * another server has taken over. mismatch_count grows by the blocks that were read again. */
int64_t bl_kv_get(bl_session *session, const bl_kv_batch *batch, uint8_t *states,
                  uint64_t *mismatch_count);

/* The same for an engine that copies between begin and end; fragments are not looked at. Nobody
 * else uses the session in between. What begin gave out, end takes back, well or not. */
typedef struct bl_kv_pending bl_kv_pending;

/* Reserve: 0, and the pool offset of each block whose state is GRANTED; or an error. */
int bl_kv_put_begin(bl_session *session, const bl_kv_batch *batch, uint8_t *states,
                    int32_t *statuses, uint64_t *offsets, bl_kv_pending **out);

/* The granted blocks are written, in memory, and these are their vectors, a row for each of the
 * batch; or written is a negative error, and nothing will write there any more. As bl_kv_put.
 * -EINPROGRESS: something may still write there. The session leaves its nonce, whose grants end
 * with this process, and takes another one at its next call. */
int bl_kv_put_end(bl_session *session, bl_kv_pending *pending, const uint32_t *vectors, int written,
                  uint8_t *states, int32_t *statuses);

/* Look up and pin: how many leading blocks there are, or an error. states: HIT if it may be read,
 * from its offset; vectors, if they are to be verified: a row for each of the batch. */
int64_t bl_kv_get_begin(bl_session *session, const bl_kv_batch *batch, uint8_t *states,
                        uint64_t *offsets, uint32_t *vectors, bl_kv_pending **out);

/* The blocks that are HIT were copied, and are what their vectors say; or copied is a negative
 * error. As bl_kv_get, but nothing is read again: what is not right is a miss. */
int64_t bl_kv_get_end(bl_session *session, bl_kv_pending *pending, int copied, uint8_t *states,
                      uint64_t *mismatch_count);

/* Digests of 16 to 64 uniformly random bytes, one behind the other, folded with the digest of their
 * namespace: two words per key. 0, or -EINVAL: another size. */
int bl_fold_keys(const uint8_t *digests, uint32_t digest_size, uint32_t count,
                 const uint8_t name_space[16], uint64_t *keys);

#endif
