/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What Python may call to look a pool over (check/check.c), and what may be found. cffi reads it
 * too.
 */
#ifndef BL_API_CHECK_H
#define BL_API_CHECK_H

#include "api/iosched.h"
#include "api/pool.h"

/* What bl_check_pool may find; detail: pool offset of the line, where nothing else is said. */
enum bl_finding_kind {
    BL_FINDING_EPOCH_DAMAGED = 1,        /* place: half */
    BL_FINDING_EPOCH_HALF,               /* a line of the other half */
    BL_FINDING_EPOCH_STATE,
    BL_FINDING_EPOCH_NONSENSE,
    BL_FINDING_EPOCH_FUTURE,             /* too great for any generation */
    BL_FINDING_HEARTBEAT_DAMAGED,             /* the server's; place: half */
    BL_FINDING_HEARTBEAT_STRANGE,             /* of another server than serves */
    BL_FINDING_CANDIDATE_DAMAGED,       /* place: host */
    BL_FINDING_CANDIDATE_NONSENSE,
    BL_FINDING_CANDIDATE_FUTURE,
    BL_FINDING_LOBBY_REQUEST_DAMAGED,    /* place: host */
    BL_FINDING_LOBBY_REQUEST_NONSENSE,
    BL_FINDING_LOBBY_REQUEST_HOST,       /* asks for another host */
    BL_FINDING_LOBBY_REQUEST_FUTURE,
    BL_FINDING_LOBBY_REPLY_DAMAGED,
    BL_FINDING_LOBBY_REPLY_NONSENSE,
    BL_FINDING_LOBBY_REPLY_FUTURE,       /* of an epoch that has not been */
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
    BL_FINDING_EXTENT_FIT,               /* not the blocks that fit into it */
    BL_FINDING_EXTENT_OVERLAP,           /* detail: the other's first stripe */
    BL_FINDING_EXTENT_CLASSES,           /* one class too many */
    BL_FINDING_EXTENT_FUTURE,
    BL_FINDING_ENTRY_DAMAGED,            /* place: block */
    BL_FINDING_ENTRY_STATE,
    BL_FINDING_ENTRY_LENGTH,
    BL_FINDING_ENTRY_CHUNK,
    BL_FINDING_ENTRY_UNALIGNED,
    BL_FINDING_ENTRY_BEYOND,
    BL_FINDING_ENTRY_FUTURE,
    BL_FINDING_ENTRY_HOMELESS,           /* not at a block of an open extent of its class */
    BL_FINDING_ENTRY_OVERLAP,            /* two entries, one space; detail: the newer */
    BL_FINDING_ENTRY_TWICE,              /* two entries, one key */
    BL_FINDING_ENTRY_GENERATION,         /* two entries, one generation */
    BL_FINDING_CHECKSUMS_DAMAGED,           /* checksums that are not those that were committed */
    BL_FINDING_PAYLOAD_DAMAGED,          /* bytes that are not */
    BL_FINDING_RESERVED,                 /* a reserved field is used; place: as of its kind */
    BL_FINDING_STRAY                     /* something where nothing lies; place: line of the pool */
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
    uint32_t finding_count;     /* found, even if more than fit */
    uint32_t serving;           /* 1: a server serves, or died without a word */
} bl_check_report;

/* Look over what the serving half of a pool says; read-only. payload: every checksum too, of bytes
 * that a port's link lets on in this class, if there is one. 0 or -ENOMEM, or -EAGAIN: servers
 * follow each other faster than the pool can be looked over. */
int bl_check_pool(const bl_pool *pool, int payload, bl_finding *findings, uint32_t count_max,
                  bl_check_report *report, bl_port *port, uint32_t transfer_class);

/* Drop what a finding is about, of a pool that nobody uses: 0, or -EINVAL. An epoch line is written
 * anew from what is left of it. What hangs on a dropped line is found by the next look. */
int bl_repair_finding(const bl_pool *pool, const bl_finding *finding);

#endif
