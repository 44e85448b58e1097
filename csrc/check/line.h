/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The pool check, which looks at a live or dead pool without writing a byte: what its parts share.
 *
 *   check/check.c   walks over everything
 *   check/line.c    looks at lines, believes findings
 *   check/server.c  what servers and the lobby say: epochs, heartbeats, candidates, sessions
 *   check/lane.c    sessions' lanes: requests and replies
 *   check/table.c   extents and entries: alone, and against each other
 *   check/payload.c checksums and payloads
 *
 * A live pool changes while it is judged. So a finding is a suspicion until the lines that it rests
 * on have been looked at again, later, and were the same each time: a bad line that servers and
 * clients leave for so long is damage. A line that changed is judged anew; if another server speaks
 * for the pool, all lines are. Only the half that serves is judged: the other one is history.
 */
#ifndef BL_CHECK_H
#define BL_CHECK_H

#include "api/check.h"
#include "check/places.h"
#include "index/blocks.h"
#include "iosched/throttle.h"

enum {
    BL_CHECK_LOOKS = 3,             /* a line that was the same so often is a finding */
    BL_CHECK_TRIES = 64,            /* a line that changed so often is in use and right */
    BL_CHECK_NAP_NS = 1000 * 1000,
    BL_CHECK_PATIENCE = 2000        /* suspicions that the check waits for */
};

typedef struct bl_check {
    const bl_pool *pool;
    bl_finding *findings;
    uint32_t count_max;
    int payload;
    bl_check_report *report;
    bl_epoch_line epoch;            /* the server that spoke when the check began */
    uint32_t half;                  /* the half that is judged */
    uint32_t suspicions;
    int moved;                      /* another server speaks: nothing found so far counts */
    bl_session_line *sessions;      /* as read, per lane; not whole: zeros */
    bl_extents *extents;            /* as read */
    bl_places *places;              /* space of the entries that are right by themselves */
    bl_index *keys, *generations;   /* of the same */
    bl_throttle throttle;       /* for payload */
    uint8_t *chunk;                 /* room for a chunk of payload */
    uint32_t chunk_size;
} bl_check;

/* A line of the pool that is judged by itself. */
typedef struct bl_check_line {
    uint64_t offset;
    uint64_t number;                /* its number among its kind: half, host, lane, stripe, block */
    uint64_t word[8];               /* the words at the last look */
} bl_check_line;

/* Judges a line: 0 or a bl_finding_kind. */
typedef uint32_t (*bl_check_judge)(bl_check *check, const bl_check_line *line);

/* check/line.c */

void bl_found(bl_check *check, uint32_t kind, uint64_t place, uint64_t detail);

/* Read the line as it is in memory now. */
void bl_check_look(const bl_check *check, bl_check_line *line);

/* Drop this host's copies of a range that is looked at soon, all at once. */
void bl_check_refetch(const bl_check *check, uint64_t offset, uint64_t size);

/* Let some time pass: 1 if count lines and the server are then still what they were. */
int bl_check_stands(bl_check *check, bl_check_line *lines, uint32_t count);

/* Does the server that spoke when the check began still speak? */
int bl_check_same_server(bl_check *check);

/* Judge a line (as last looked at) until it no longer changes: 0, or what was found and is
 * reported. */
uint32_t bl_check_judged(bl_check *check, bl_check_line *line, bl_check_judge judge);

/* Report anything but zeros in [from, to), where nothing lies. */
void bl_check_stray(bl_check *check, uint64_t from, uint64_t to);

/* Return the half that holds the truth: a server that never served has left it with its
 * predecessor. */
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

/* check/payload.c: 0 or what is wrong with the bytes of a block. The chunk has room. */
uint32_t bl_check_bytes(bl_check *check, const bl_entry *entry);

#endif
