/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The layout of the bytes in a pool, in one place. C and CUDA include this file; Python reads it
 * through cffi; FORMAT.md (offsets and sizes) is generated from it. A superblock has the hash of
 * all declarations; tests/repo/test_format.py freezes it.
 *
 * Each device starts with one stripe for its superblock. The rest of the devices is the pool's
 * *linear range*: stripe s of the range lies on device s % device_count if the pool is interleaved;
 * otherwise the devices follow one another. A pool with a metadata device has all bytes before
 * data_offset on device 0, and the data on the others (format/placement.h, format/interleave.h).
 * The linear range, with the writers of the lines at the right:
 *
 *   +--------------------+  0
 *   | server lines       |  epoch and heartbeat of half 0, of half 1            server of that half
 *   +--------------------+  BL_CANDIDATE_OFFSET
 *   | candidate lines    |  one per host, for the election of a server     that host
 *   +--------------------+  BL_LOBBY_OFFSET
 *   | lobby              |  per host: request | reply half 0 | reply half 1 | doorbell
 *   +--------------------+  session_offset
 *   | session table x 2  |  one line per lane and half                     server of that half
 *   +--------------------+  lane_offset
 *   | lanes              |  heartbeat | requests | replies x 2 | bulk in | bulk out x 2, per lane
 *   +--------------------+  table_offset
 *   | block table x 2    |  one line (entry) per block and half            server of that half
 *   +--------------------+  name_offset
 *   | name table x 2     |  one line per block and half            server of that half
 *   +--------------------+  extent_offset
 *   | extent table x 2   |  one line per data stripe and half              server of that half
 *   +--------------------+  data_offset (a whole stripe)
 *   | data stripes       |  payloads                                       holder of the grant
 *   +--------------------+
 *
 * Invariants: integers are little-endian and of fixed width; locations are offsets, never pointers;
 * every struct is a whole number of lines; every line has one writer at a time; everything that the
 * server writes has two halves, and the server of epoch N writes half N mod 2 only; reserved bytes
 * are zero; the first of the lines 1, 2, 4, 8, ... that is zero ends the used part of a block table
 * or extent table (index/table.c). Polled lines are BL_POLL_STRIDE apart, because CPUs prefetch
 * adjacent lines.
 *
 * Only what cffi can read is allowed here: an include guard, enums, structs. No functions, asserts
 * or expressions in macros.
 */
#ifndef BL_POOL_FORMAT_H
#define BL_POOL_FORMAT_H

#include <stdint.h>

enum bl_format_constant {
    BL_FORMAT_VERSION = 6,
    BL_LINE_SIZE = 64,
    BL_POLL_STRIDE = 128,
    BL_PAGE_SIZE = 4096,
    BL_STRIPE_SIZE = 2 << 20,
    BL_STRIPE_SHIFT = 21,
    BL_DEVICE_COUNT_MAX = 64,
    BL_HOST_COUNT = 64,          /* host numbers are below this */
    BL_HALF_COUNT = 2,
    BL_MESSAGE_INLINE_SIZE = 40, /* payload bytes of a one-line message */
    BL_EXTENT_STRIPES_MAX = 64,
    BL_CHUNK_SIZE = 16 << 10,   /* bytes per checksum, unless a layout has another chunk size */
    BL_SERVER_STRIDE = 256,     /* epoch line and its second copy, then heartbeat line at
                                 * BL_POLL_STRIDE */
    BL_CANDIDATE_OFFSET = 4096,
    BL_LOBBY_OFFSET = 16384,
    BL_LOBBY_STRIDE = 512,
    BL_LOBBY_END = 16384 + 64 * 512
};

/* The coherence between the caches of a device's hosts; a property of the device (D2). */
enum bl_coherence {
    BL_COHERENCE_HARDWARE = 1,  /* one host's own memory: flush and invalidate do nothing */
    BL_COHERENCE_SOFTWARE = 2   /* several hosts: stream out, invalidate before a read */
};

/* The geometry of a pool; the same in the superblocks of all its devices. */
typedef struct bl_geometry {
    uint32_t device_count;
    uint32_t interleaved;       /* 1: stripe by stripe over the devices; 0: device after device;
                                 * 2 more with a metadata device (format/placement.h) */
    uint64_t device_size;       /* bytes used of each device with data, including its superblock
                                 * stripe */
    uint64_t size;              /* bytes of the linear range */
    uint32_t lane_count;
    uint32_t slot_count;        /* slots of a lane; a power of two */
    uint32_t bulk_size;         /* bytes of each bulk area of a lane; a multiple of a page */
    uint32_t block_count_max;   /* lines of the block table */
    uint64_t session_offset;
    uint64_t lane_offset;
    uint64_t lane_stride;
    uint64_t table_offset;
    uint64_t extent_offset;
    uint64_t data_offset;
    uint64_t stripe_count;      /* data stripes */
    uint64_t name_offset;
    uint64_t reserved[1];
} bl_geometry;

/* The first bytes of every device, written once, when the pool is created. */
typedef struct bl_superblock {
    uint8_t magic[8];           /* "BELUGA\r\n": reveals a text-mode copy */
    uint32_t version;           /* BL_FORMAT_VERSION */
    uint32_t header_size;       /* bytes of this struct */
    uint64_t format_hash;       /* hash of the declarations in this file: a program with a
                                 * different hash rejects the pool */
    uint8_t pool_id[16];
    uint32_t device_index;      /* this device's index in the pool, independent of its file name */
    uint32_t coherence;         /* bl_coherence of this device */
    uint32_t sparse;            /* 1: the file's space was not allocated at creation (tests) */
    uint32_t stripe_size;
    uint64_t created_s;         /* seconds since 1970, for display */
    bl_geometry geometry;
    uint64_t reserved[9];
    uint32_t reserved_tail;
    uint32_t check;             /* bl_crc32c of all fields before it */
} bl_superblock;

/* The epoch line identifies the pool's server. The greater valid epoch of the two halves is the
 * pool's epoch.
 *
 *   TAKING --own half is whole--> SERVING --clean stop--> STOPPED
 *          --cannot-------------> FAILED        (killed: state unchanged, heartbeat stops)
 *
 * TAKING deposes the predecessor, but the predecessor's half stays valid until SERVING. The line
 * has a second copy, BL_LINE_SIZE after it, which is written second, so one of the two is whole
 * whenever the writer dies. Candidate lines are written in the same way. */
enum bl_server_state {
    BL_SERVER_TAKING = 1,
    BL_SERVER_SERVING = 2,
    BL_SERVER_STOPPED = 3,
    BL_SERVER_FAILED = 4
};

typedef struct bl_epoch_line {
    uint64_t epoch;             /* 1, 2, ...; the server of epoch N writes half N mod 2 */
    uint64_t boot_id[2];        /* boot id of the server's host */
    uint64_t nonce;             /* identifies the server's liveness lock on its host */
    uint32_t host;
    uint32_t state;             /* bl_server_state */
    uint32_t pid;               /* for display only */
    uint32_t reserved[3];
    uint32_t reserved_tail;
    uint32_t check;
} bl_epoch_line;

/* A host's vote in the election of an epoch's server (Disk Paxos). Each host writes only its own
 * line; its processes share it under a lock of their kernel. */
typedef struct bl_candidate_line {
    uint64_t epoch;             /* the epoch that the host competes for */
    uint64_t ballot;            /* greatest ballot that this host started; ballots of two hosts
                                 * differ */
    uint64_t accepted;          /* ballot in which it accepted the owner below; 0: none */
    uint64_t nonce;             /* of the owner's liveness lock */
    uint64_t boot_id[2];        /* of the owner's host */
    uint32_t host;              /* the owner's host */
    uint32_t reserved;
    uint32_t reserved_tail;
    uint32_t check;
} bl_candidate_line;

/* A counter that its writer, the server or a session, increments while it is alive. The count
 * UINT64_MAX is a session's last heartbeat: the session has ended and will not write any more. */
typedef struct bl_heartbeat_line {
    uint64_t count;
    uint64_t nonce;
    uint64_t reserved[5];
    uint32_t reserved_tail;
    uint32_t check;
} bl_heartbeat_line;

/* A host's request for a lane, or to return one. There is one line per host, which its processes
 * share under a lock of their kernel. A new request has a new sequence number; the line is never
 * cleared. */
enum bl_lobby_operation { BL_LOBBY_ATTACH = 1, BL_LOBBY_DETACH = 2 };

typedef struct bl_lobby_request {
    uint32_t sequence;
    uint32_t operation;         /* bl_lobby_operation */
    uint64_t nonce;             /* identifies the session: random, never zero */
    uint64_t old_nonce;         /* an earlier session that this request ends, or 0 */
    uint64_t boot_id[2];
    uint32_t host;
    uint32_t pid;               /* for display only */
    uint64_t epoch;             /* epoch of the addressed server: only that one attaches; any
                                 * detaches */
    uint32_t check;
    uint32_t sequence_end;      /* equals sequence in a whole line */
} bl_lobby_request;

typedef struct bl_lobby_reply {
    uint32_t sequence;
    int32_t status;             /* 0 or a negative error */
    uint64_t nonce;             /* nonce of the request */
    uint64_t epoch;
    uint64_t boot_id[2];        /* boot id of the machine that has this host number */
    uint32_t lane;
    uint32_t live_count;        /* live sessions of this host number */
    uint32_t reserved[2];
    uint32_t check;
    uint32_t sequence_end;
} bl_lobby_reply;

/* A host's doorbell (rpc/doorbell.h). A process of the host that sends a request after a pause
 * writes a number that was never written there into all words. The server polls this line instead
 * of the host's quiet lanes. */
typedef struct bl_doorbell {
    uint64_t ring[8];
} bl_doorbell;

/* A session line records the session of a lane, for the server's successor.
 *
 *   FREE --attach--> LIVE --detach, or proof of death--> FREE
 *                    LIVE --takeover, heartbeat lost--> SUSPECT --lock, last heartbeat--> FREE
 */
enum bl_session_state { BL_SESSION_FREE = 0, BL_SESSION_LIVE = 1, BL_SESSION_SUSPECT = 2 };

typedef struct bl_session_line {
    uint64_t nonce;
    uint64_t boot_id[2];
    uint32_t host;
    uint32_t state;             /* bl_session_state */
    uint64_t epoch;             /* epoch of the server that attached it */
    uint32_t reserved[5];
    uint32_t check;
} bl_session_line;

/* A slot is a request line and its reply line. Request n of a lane is in slot n % slot_count.
 *
 *   free --send, client--> requested --reply, server--> answered --read, client--> free
 *
 * The state is not stored: a slot is "requested" if its request line has the sequence that the
 * server expects next, and "answered" if its reply line has the sequence that the client waits for.
 * The check and both sequences reveal a torn line; the check is keyed with the session's nonce and
 * the epoch, so that a line of a former session of the lane, or of another server, is rejected. A
 * longer message has its bytes in the lane's bulk area, and a bl_bulk as its payload. */
enum bl_message_flag { BL_MESSAGE_BULK = 1 };

typedef struct bl_request {
    uint32_t sequence;
    uint16_t method;
    uint8_t flags;              /* bl_message_flag */
    uint8_t size;               /* payload bytes used */
    uint32_t epoch;             /* low bits of the epoch that assigned the lane */
    uint32_t reserved;
    uint8_t payload[BL_MESSAGE_INLINE_SIZE];
    uint32_t check;
    uint32_t sequence_end;
} bl_request;

typedef struct bl_reply {
    uint32_t sequence;
    uint16_t reserved;
    uint8_t flags;
    uint8_t size;
    uint32_t epoch;             /* low bits of the server's epoch: clients drop replies with
                                 * another one */
    int32_t status;             /* the handler's: 0 or more, or a negative error */
    uint8_t payload[BL_MESSAGE_INLINE_SIZE];
    uint32_t check;
    uint32_t sequence_end;
} bl_reply;

/* The payload of a message whose bytes lie in the bulk area. */
typedef struct bl_bulk {
    uint32_t size;
    uint32_t check;             /* bl_crc32c of the bytes */
} bl_bulk;

/* The calls of the block index, with their requests -> replies. Methods of other services begin at
 * BL_METHOD_USER. */
enum bl_method {
    BL_METHOD_PING = 0,
    BL_METHOD_LOOKUP = 1,       /* bl_block_request, keys -> bl_block_reply, records of the hits */
    BL_METHOD_RESERVE = 2,      /* bl_block_request, keys -> bl_block_reply, a record per key */
    BL_METHOD_COMMIT = 3,       /* bl_block_request, bl_commits (with BL_COMMIT_NAMED:
                                 * bl_named_commits) -> bl_block_reply, records */
    BL_METHOD_ABORT = 4,        /* bl_block_request, bl_commits -> bl_block_reply */
    BL_METHOD_RELEASE = 5,      /* bl_block_request, bl_commits -> bl_block_reply */
    BL_METHOD_REMOVE = 6,       /* bl_block_request, keys -> bl_block_reply */
    BL_METHOD_STAT = 7,         /* -> bl_index_stat */
    BL_METHOD_RETIRE = 8,       /* bl_retire_request -> bl_block_reply, count: stripes retired */
    BL_METHOD_TASK_CLAIM = 9,   /* bl_task_request -> bl_task */
    BL_METHOD_TASK_EXTEND = 10, /* bl_task_request -> */
    BL_METHOD_TASK_COUNT = 11,  /* bl_task_request -> bl_task_counts */
    BL_METHOD_ONBOARD = 12,     /* bl_block_request, keys -> bl_block_reply, count: leading keys
                                 * that the pool has or gets */
    BL_METHOD_TIERS = 13,       /* bl_block_request, keys -> bl_block_reply, a byte per key */
    BL_METHOD_LOWER_TAKE = 14,  /* bl_lower_request -> bl_block_reply, bl_lower_records */
    BL_METHOD_LOWER_TELL = 15,  /* bl_lower_request, bl_lower_notes -> bl_block_reply */
    BL_METHOD_REPORT = 16,      /* bl_report -> : what a client counts in its own process */
    BL_METHOD_USER = 64
};

enum bl_lookup_flag {
    BL_LOOKUP_PIN = 1,
    BL_LOOKUP_PEEK = 2          /* counts as no lookup and no use */
};

enum bl_reserve_flag {
    BL_RESERVE_KEPT = 1,        /* a task; its fingerprint identifies the queue */
    BL_RESERVE_BROUGHT = 2      /* blocks from a lower tier; reply PENDING: no client waits for
                                 * the block any more */
};

enum bl_commit_flag { BL_COMMIT_NAMED = 1 };

enum bl_onboard_flag { BL_ONBOARD_MORE = 256 }; /* these keys continue those of the previous
                                                 * message */

enum bl_remove_flag { BL_REMOVE_UNCLAIMED = 1 }; /* only tasks that no worker has claimed */

/* The state of a key in a reply. */
enum bl_block_state {
    BL_BLOCK_MISS = 0,
    BL_BLOCK_HIT = 1,           /* committed; lookup: pinned if requested */
    BL_BLOCK_PENDING = 2,       /* another session writes it */
    BL_BLOCK_GRANTED = 3,       /* the caller writes it, then commits or aborts */
    BL_BLOCK_REFUSED = 4,       /* no grant: see status */
    BL_BLOCK_BELOW = 5          /* lookup: a miss, but a lower tier has or may have the block */
};

typedef struct bl_block_request {
    uint64_t fingerprint;       /* reserve: of the namespace */
    uint32_t length;            /* reserve: payload bytes of every block */
    uint32_t chunk_size;        /* reserve: payload bytes per checksum, or 0 */
    uint32_t count;             /* number of keys or commits that follow */
    uint32_t flags;             /* a bl_lookup_, bl_reserve_, bl_commit_ or bl_remove_flag;
                                 * onboard: bl_lower_kind, and a bl_onboard_flag */
} bl_block_request;

/* A request about a queue of tasks; visible_ms is how long a claim hides its task from others. */
enum bl_task_limit { BL_TASK_VISIBLE_MAX_MS = 600000 };

typedef struct bl_task_request {
    uint64_t queue;             /* claim, count */
    uint64_t generation;        /* extend: generation of the claimed task */
    uint32_t block;             /* extend: block of the claimed task */
    uint32_t visible_ms;        /* claim, extend; extend 0: the task waits again at once */
} bl_task_request;

typedef struct bl_task {
    uint64_t key[2];
    uint64_t generation;
    uint32_t block;
    uint32_t length;
    uint32_t deliveries;        /* claims so far, including this one; 0: no task */
    uint32_t reserved;
} bl_task;

typedef struct bl_task_counts {
    uint32_t waiting;
    uint32_t claimed;
} bl_task_counts;

/* Where a block is, as a set of bits: the pool, or lower tier n as 1 << n, n from 1 to 7. */
enum bl_tier_bit { BL_TIER_POOL = 1 };

/* Kinds of work for the service of the lower tiers (index/lower.c). */
enum bl_lower_kind {
    BL_LOWER_OFFLOAD = 0,       /* committed blocks that were not offered to a lower tier yet */
    BL_LOWER_ONBOARD = 1,       /* keys that a client waits for */
    BL_LOWER_PREFETCH = 2,      /* keys that a client will use later */
    BL_LOWER_REMOVE = 3,        /* removals that no tier has tried yet */
    BL_LOWER_RETRY = 4,         /* removals that failed in a tier */
    BL_LOWER_COLD = 5,          /* keys to onboard or prefetch that no disk has */
    BL_LOWER_KINDS = 6
};

typedef struct bl_lower_request {
    uint64_t token;             /* of the service */
    uint32_t count;             /* take: the most records; report: notes that follow */
    uint8_t kind;               /* take: bl_lower_kind */
    uint8_t tier;               /* take, retry: n of lower tier n */
    uint16_t reserved;
} bl_lower_request;

typedef struct bl_lower_record {
    uint64_t key[2];
    uint64_t fingerprint;       /* offload: this and all fields up to block */
    uint64_t generation;        /* of the block; of the removal */
    uint64_t offset;
    uint32_t length;
    uint32_t chunk_size;
    uint32_t block;             /* the line of the block; of the removal */
    uint8_t tiers;              /* lower tiers that have it, as bits; a removal's tier */
    uint8_t stale;              /* lower tiers that may have an earlier, removed version */
    uint16_t reserved;
} bl_lower_record;

typedef struct bl_lower_note {
    uint64_t key[2];
    uint64_t generation;        /* of a completed offload or removal; 0: none */
    uint32_t block;             /* of a completed offload or removal; else BL_LOWER_NO_BLOCK */
    uint8_t stored;             /* lower tiers that have the block now, as bits */
    uint8_t lost;               /* lower tiers that no longer have it, as bits */
    uint8_t ended;              /* 1: an onboarding succeeded or failed */
    uint8_t removal;            /* bl_removal */
} bl_lower_note;

/* The result of a removal. REPLACED: the tiers in stored have the block of this generation in place
 * of the removed one. */
enum bl_removal {
    BL_REMOVAL_NONE = 0,
    BL_REMOVAL_DONE = 1,
    BL_REMOVAL_FAILED = 2,
    BL_REMOVAL_REPLACED = 3
};
enum bl_lower_block { BL_LOWER_NO_BLOCK = 0x7fffffff };

/* A request to retire memory where a device failed. The server tests the memory itself. */
typedef struct bl_retire_request {
    uint64_t offset;            /* offset in the data stripes */
} bl_retire_request;

typedef struct bl_block_reply {
    uint32_t count;             /* records that follow; abort, release, remove: how many were
                                 * done */
    uint32_t state;             /* lookup: state of the first key that is not a hit
                                 * (bl_block_state); remove: twice the number of trailing keys
                                 * without room for a tombstone, plus 1 if a disk has not
                                 * executed the other removals yet */
} bl_block_reply;

typedef struct bl_block_record {
    uint64_t offset;            /* offset of the payload in the pool */
    uint64_t generation;
    uint32_t block;             /* line number in the block table */
    uint32_t length;
    uint32_t state;             /* bl_block_state */
    int32_t status;             /* why it was refused, or 0 */
} bl_block_record;

typedef struct bl_commit {
    uint64_t key[2];
    uint64_t generation;
    uint32_t block;
    uint32_t checksums_crc;     /* CRC-32C of the checksums */
} bl_commit;

/* The engines' hashes of a block, 64 bits each, for subscribers of the pool's events. The server
 * stores and publishes a name without interpreting it. */
enum bl_name_flag { BL_NAME_PARENT = 1 };   /* there is a parent */

typedef struct bl_name {
    uint64_t block_hash;        /* the engine's own hash of the block and all before it */
    uint64_t parent_hash;       /* the engine's hash of the block before it */
    uint64_t tokens_hash;       /* the router's hash of the block's contents */
    uint64_t space;             /* namespace of the hashes: a model, as configured in the engines */
    uint32_t block_tokens;      /* tokens in the block; 0: there is no name */
    uint16_t rank;              /* rank that stores this part of the block */
    uint16_t rank_count;        /* ranks that store parts of it, each with its own key */
    uint32_t flags;             /* bl_name_flag */
    uint32_t reserved;
} bl_name;

typedef struct bl_named_commit {
    bl_commit commit;
    bl_name name;
} bl_named_commit;

/* A block's entry. It is valid only if its check is right; a torn or stale line is read again.
 *
 *   FREE --commit--> COMMITTED --evict or remove--> FREE      (a granted block has no entry yet)
 *   FREE --remove--> REMOVED --a tier has removed it--> FREE
 *   FREE --a server has a lower tier--> TIER --an operator abandons the tier--> FREE
 *
 * An entry with the flag KEPT is a task, which is never evicted. A REMOVED entry is a tombstone: it
 * has a key and a generation, its fingerprint identifies a lower tier, and the block that this tier
 * stored under the key before the removal is invalid. The fingerprint of a TIER entry identifies a
 * lower tier that may have blocks of this pool. */
enum bl_entry_state {
    BL_ENTRY_FREE = 0,
    BL_ENTRY_COMMITTED = 1,
    BL_ENTRY_REMOVED = 2,
    BL_ENTRY_TIER = 3
};
enum bl_entry_flag {
    BL_ENTRY_KEPT = 1,
    BL_ENTRY_NAMED = 2          /* its line of the name table may have a name for it */
};

typedef struct bl_entry {
    uint64_t key[2];
    uint64_t generation;        /* epoch in the high bits; unique */
    uint64_t offset;            /* offset of the payload in the pool */
    uint64_t fingerprint;       /* fingerprint of the namespace */
    uint32_t length;            /* payload bytes; the checksums follow them */
    uint32_t chunk_size;        /* payload bytes per checksum; 0: no checksums */
    uint32_t checksums_crc;     /* CRC-32C of the checksums */
    uint32_t state;             /* bl_entry_state */
    uint32_t flags;             /* bl_entry_flag */
    uint32_t check;
} bl_entry;

/* The name of a block that was committed with one. It belongs to the block only if the generations
 * are equal, so the line of an earlier block is ignored and never needs to be cleared. */
typedef struct bl_name_line {
    uint64_t generation;
    bl_name name;
    uint32_t reserved;
    uint32_t check;
} bl_name_line;

/* An extent is a run of open stripes: blocks may lie there, at any page. Its line is that of its
 * first stripe. Servers of earlier releases cut an extent into at most 512 blocks of one size; for
 * them, a line describes blocks of one page.
 *
 *   FREE --open, before the first grant--> OPEN --emptied--> FREE
 *                                          OPEN --its memory fails--> RETIRED, forever
 *
 * After a crash, some process may still write to open space that is not committed, so that space is
 * quarantined. */
enum bl_extent_state { BL_EXTENT_FREE = 0, BL_EXTENT_OPEN = 1, BL_EXTENT_RETIRED = 2 };

typedef struct bl_extent_line {
    uint64_t epoch;             /* the epoch whose server opened it */
    uint64_t generation;
    uint32_t first_stripe;
    uint32_t stripe_count;
    uint32_t block_size;        /* a page; in lines of earlier releases, a multiple of a page */
    uint32_t block_count;       /* as many as fit, 512 at most */
    uint32_t state;             /* bl_extent_state */
    uint32_t reserved[6];
    uint32_t check;
} bl_extent_line;

#endif
