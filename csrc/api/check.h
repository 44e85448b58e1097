/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The calls that check a pool (check/check.c), and the kinds of findings. cffi reads this header,
 * too. The Python half is in beluga/index/check.py and beluga/index/repair.py.
 */
#ifndef BL_API_CHECK_H
#define BL_API_CHECK_H

#include "api/iosched.h"
#include "api/pool.h"

/* The kinds of findings of bl_check_pool. place is the number of the line among its kind, and
 * detail its pool offset, unless a comment specifies something else. */
enum bl_finding_kind {
    BL_FINDING_EPOCH_DAMAGED = 1,        /* place: half */
    BL_FINDING_EPOCH_HALF,               /* an epoch in the line of the other half */
    BL_FINDING_EPOCH_STATE,
    BL_FINDING_EPOCH_NONSENSE,
    BL_FINDING_EPOCH_FUTURE,             /* does not fit into a generation */
    BL_FINDING_HEARTBEAT_DAMAGED,             /* the server's; place: half */
    BL_FINDING_HEARTBEAT_STRANGE,             /* of a server that is not the current one */
    BL_FINDING_CANDIDATE_DAMAGED,       /* place: host */
    BL_FINDING_CANDIDATE_NONSENSE,
    BL_FINDING_CANDIDATE_FUTURE,
    BL_FINDING_LOBBY_REQUEST_DAMAGED,    /* place: host */
    BL_FINDING_LOBBY_REQUEST_NONSENSE,
    BL_FINDING_LOBBY_REQUEST_HOST,       /* its host number differs from that of the line */
    BL_FINDING_LOBBY_REQUEST_FUTURE,
    BL_FINDING_LOBBY_REPLY_DAMAGED,
    BL_FINDING_LOBBY_REPLY_NONSENSE,
    BL_FINDING_LOBBY_REPLY_FUTURE,       /* of a future epoch */
    BL_FINDING_SESSION_DAMAGED,          /* place: lane */
    BL_FINDING_SESSION_STATE,
    BL_FINDING_SESSION_HOST,
    BL_FINDING_SESSION_NONSENSE,
    BL_FINDING_SESSION_FUTURE,
    BL_FINDING_SESSION_TWICE,            /* detail: the other lane */
    BL_FINDING_LANE_HEARTBEAT_DAMAGED,        /* the client's; place: lane */
    BL_FINDING_REQUEST_DAMAGED,          /* place: lane * slot_count + slot */
    BL_FINDING_REQUEST_NONSENSE,
    BL_FINDING_REPLY_DAMAGED,
    BL_FINDING_REPLY_NONSENSE,
    BL_FINDING_EXTENT_DAMAGED,           /* place: stripe */
    BL_FINDING_EXTENT_PLACE,             /* names another stripe */
    BL_FINDING_EXTENT_STATE,
    BL_FINDING_EXTENT_SIZE,
    BL_FINDING_EXTENT_BEYOND,
    BL_FINDING_EXTENT_FIT,               /* its block count does not fit its size */
    BL_FINDING_EXTENT_OVERLAP,           /* detail: the other extent's first stripe */
    BL_FINDING_EXTENT_FUTURE,
    BL_FINDING_ENTRY_DAMAGED,            /* place: block */
    BL_FINDING_ENTRY_STATE,
    BL_FINDING_ENTRY_LENGTH,
    BL_FINDING_ENTRY_CHUNK,
    BL_FINDING_ENTRY_UNALIGNED,
    BL_FINDING_ENTRY_BEYOND,
    BL_FINDING_ENTRY_FUTURE,
    BL_FINDING_ENTRY_HOMELESS,           /* not in open extents */
    BL_FINDING_ENTRY_OVERLAP,            /* two entries, one space; detail: the newer */
    BL_FINDING_ENTRY_TWICE,              /* two entries, one key */
    BL_FINDING_ENTRY_GENERATION,         /* two entries, one generation */
    BL_FINDING_CHECKSUMS_DAMAGED,           /* checksums that differ from the committed ones */
    BL_FINDING_PAYLOAD_DAMAGED,          /* bytes that differ from the committed ones */
    BL_FINDING_NAME_DAMAGED,             /* place: block */
    BL_FINDING_NAME_FUTURE,
    BL_FINDING_RESERVED,                 /* a reserved field is not zero; place: as for the
                                          * line's kind */
    BL_FINDING_STRAY                     /* nonzero bytes in an unused range; place: line of the
                                          * pool */
};

typedef struct bl_finding {
    uint32_t kind;
    uint32_t reserved;
    uint64_t place;
    uint64_t detail;
} bl_finding;

typedef struct bl_check_report {
    uint64_t epoch;
    uint64_t block_count;
    uint64_t block_bytes;
    uint64_t extent_count;
    uint64_t session_count;
    uint32_t finding_count;     /* the number of findings, even if more than fit */
    uint32_t serving;           /* 1: a server is running, or was killed */
    uint32_t half;              /* the half that was checked */
    uint32_t reserved;
} bl_check_report;

/* Check the current half of a pool, without writing. With payload, also check every checksum; an
 * I/O queue, if there is one, admits the bytes in this class. Returns 0; -ENOMEM; or -EAGAIN:
 * another server took over before each check ended. */
int bl_check_pool(const bl_pool *pool, int payload, bl_finding *findings, uint32_t count_max,
                  bl_check_report *report, bl_io_queue *io_queue, uint32_t transfer_class);

/* Read at most count lines of a half of the block table, from line first on, for display. Returns
 * their number, or an error. A torn line has the state BL_ENTRY_TORN. */
enum bl_entry_seen { BL_ENTRY_TORN = 255 };
int64_t bl_entries_read(const bl_pool *pool, uint32_t half, uint32_t first, uint32_t count,
                        bl_entry *entries);

/* Reset the line of a finding, in a pool that is not in use; an epoch line is restored instead.
 * Returns 0 or -EINVAL. The next check reports lines that depended on a reset line. */
int bl_repair_finding(const bl_pool *pool, const bl_finding *finding);

#endif
