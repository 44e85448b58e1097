/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The shared declarations of the pool check, which reads a pool, with or without a server, and
 * writes nothing.
 *
 *   check/check.c   the whole check
 *   check/line.c    reads lines, confirms findings
 *   check/server.c  lines of servers and the lobby: epochs, heartbeats, candidates, sessions
 *   check/lane.c    sessions' lanes: requests and replies
 *   check/table.c   extents and entries: alone, and against each other
 *   check/payload.c checksums and payloads
 *
 * A live pool changes while it is checked. So a bad line is only a suspicion until it was read
 * again, later, and was the same each time: if servers and clients do not rewrite it in that time,
 * it is damaged. A line that changed is checked again; if another server has taken over, all lines
 * are. Only the half of the current server is checked: the other one is obsolete.
 */
#ifndef BL_CHECK_H
#define BL_CHECK_H

#include "api/check.h"
#include "check/places.h"
#include "index/state.h"
#include "iosched/throttle.h"

enum {
    BL_CHECK_LOOKS = 3,             /* equal reads after which a bad line is a finding */
    BL_CHECK_TRIES = 64,            /* different reads after which a line counts as in use and
                                     * correct */
    BL_CHECK_NAP_NS = 1000 * 1000,
    BL_CHECK_PATIENCE = 2000        /* the most suspicions for which the check waits */
};

typedef struct bl_check {
    const bl_pool *pool;
    bl_finding *findings;
    uint32_t count_max;
    int payload;
    bl_check_report *report;
    bl_epoch_line epoch;            /* the server at the start of the check */
    uint32_t half;                  /* the half that is checked */
    uint32_t suspicions;
    int moved;                      /* 1: another server has taken over, which voids all findings */
    bl_session_line *sessions;      /* by lane, as read; zeros for a torn line */
    bl_extents *extents;            /* as read */
    bl_places *places;              /* space of the entries that are valid by themselves */
    bl_hash *keys, *generations;   /* of the same entries */
    bl_throttle throttle;       /* for payload */
    uint8_t *chunk;                 /* room for a chunk of payload */
    uint32_t chunk_size;
} bl_check;

/* A line of the pool that is checked by itself. */
typedef struct bl_check_line {
    uint64_t offset;
    uint64_t number;                /* half, host, lane, slot, stripe or block */
    uint64_t word[8];               /* the words at the last read */
} bl_check_line;

/* Checks a line. Returns 0 or a bl_finding_kind. */
typedef uint32_t (*bl_check_judge)(bl_check *check, const bl_check_line *line);

/* check/line.c */

void bl_found(bl_check *check, uint32_t kind, uint64_t place, uint64_t detail);

/* Read the line from memory. */
void bl_check_look(const bl_check *check, bl_check_line *line);

/* Invalidate this host's cached lines of a range before it is read line by line. */
void bl_check_refetch(const bl_check *check, uint64_t offset, uint64_t size);

/* Wait a while. Returns 1 if count lines and the server have not changed. */
int bl_check_stands(bl_check *check, bl_check_line *lines, uint32_t count);

/* Return 1 if the pool's server is the same as at the start of the check. */
int bl_check_same_server(bl_check *check);

/* Check a line (as last read), again if it changes. Returns 0, or the reported bl_finding_kind. */
uint32_t bl_check_judged(bl_check *check, bl_check_line *line, bl_check_judge judge);

/* Report nonzero bytes in [from, to), an unused range. */
void bl_check_stray(bl_check *check, uint64_t from, uint64_t to);

/* Return the valid half: the server's, or its predecessor's if the server never served. */
static inline uint32_t bl_check_half(const bl_epoch_line *epoch)
{
    return (epoch->epoch + !bl_epoch_served(epoch)) % BL_HALF_COUNT;
}

static inline int bl_check_zero(const void *field, size_t size)
{
    const uint8_t *byte = field;
    for (size_t i = 0; i < size; i++)
        if (byte[i] != 0)
            return 0;
    return 1;
}

static inline int bl_check_used(const bl_check_line *line) { return bl_line_used(line->word); }

/* check/server.c, check/lane.c, check/table.c */
void bl_check_server_lines(bl_check *check);
void bl_check_sessions(bl_check *check);
void bl_check_lobby(bl_check *check);
void bl_check_lanes(bl_check *check);
void bl_check_extents(bl_check *check);
int bl_check_entries(bl_check *check);
void bl_check_names(bl_check *check);

/* check/payload.c: check the bytes of a block. Returns 0 or a bl_finding_kind. check->chunk is
 * large enough. */
uint32_t bl_check_bytes(bl_check *check, const bl_entry *entry);

#endif
