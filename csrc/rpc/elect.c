/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The election of the one owner of an epoch. Only the owner may write the epoch's half, whoever
 * else found that the epoch was free. Disk Paxos decides it (Gafni and Lamport 2003), with the
 * pool as the one disk and a line for each host, which only that host writes (its processes take
 * turns under a lock of their own kernel).
 *
 *   1  begin a ballot greater than any seen: write it, full fence, read all lines
 *   2  accept an owner in it (the one accepted in the greatest ballot so far, else oneself): write
 *      it, full fence, read all lines
 *
 * If either read shows a greater ballot, start again. Each candidate writes before it reads, so of
 * two ballots one sees the other: no two owners are ever decided, whatever is slow, paused or dead.
 * Timing matters only for progress: candidates that disturb each other wait for a random time.
 * No candidate waits for a silent one. A line of a later epoch shows that this election is over.
 */
#include "rpc/server_state.h"

#include <errno.h>

#include "coherence/crash_point.h"

enum {
    BL_ELECT_BALLOTS = 256,             /* attempts before giving up */
    BL_ELECT_NAP_NS = 20 * 1000         /* times a random number that grows with the failures */
};

/* The state of an epoch's election, from all lines. */
typedef struct bl_ballots {
    uint64_t epoch_max;         /* the latest epoch that any host requested */
    uint64_t ballot_max;        /* greatest ballot number of this epoch */
    bl_candidate_line accepted; /* the line with the greatest accepted ballot of this epoch */
} bl_ballots;

static uint64_t bl_candidate_offset(uint32_t host)
{
    return BL_CANDIDATE_OFFSET + (uint64_t)host * BL_POLL_STRIDE;
}

static void bl_candidate_write(const bl_server *server, bl_candidate_line *line)
{
    const bl_memory *memory = &server->pool->memory;
    bl_table_seal(line, server->host);
    bl_crash_line("elect.line", memory, bl_candidate_offset(server->host), line);
    bl_register_write(memory, bl_candidate_offset(server->host), line);
    bl_crash_point("elect.written");
    bl_fence_full(memory); /* SYNC candidate: written before the others' lines are read */
}

/* Read every host's line. Returns 0, -BL_ERROR_EPOCH_DAMAGED, or -BL_ERROR_HOST_CLASH: this host's
 * line is not what this host, its only writer, has written. own is that line; NULL before it was
 * written. */
static int bl_candidates_read(const bl_server *server, uint64_t epoch,
                              const bl_candidate_line *own, bl_ballots *out)
{
    const bl_memory *memory = &server->pool->memory;
    *out = (bl_ballots){0};
    bl_invalidate(memory, BL_CANDIDATE_OFFSET, BL_HOST_COUNT * BL_POLL_STRIDE);
    bl_fence_full(memory);
    for (uint32_t host = 0; host < BL_HOST_COUNT; host++) {
        bl_candidate_line line;
        /* SYNC candidate: pairs with bl_candidate_write() */
        int status = bl_register_load(memory, bl_candidate_offset(host), host, &line);
        if (status < 0)
            status = bl_register_read(memory, bl_candidate_offset(host), host, &line);
        if (status < 0)
            return status;
        if (own && host == server->host && memcmp(own, &line, sizeof line) != 0)
            return bl_server_clash(server);
        bl_ordered(memory, bl_candidate_offset(host),
                   bl_candidate_offset(server->host) + BL_LINE_SIZE);
        if (line.epoch > out->epoch_max)
            out->epoch_max = line.epoch;
        if (line.epoch != epoch)
            continue;
        if (line.ballot > out->ballot_max)
            out->ballot_max = line.ballot;
        if (line.accepted > out->accepted.accepted)
            out->accepted = line;
    }
    return 0;
}

static int bl_elect_late(bl_candidate_line *own, const bl_ballots *seen)
{
    own->epoch = seen->epoch_max;
    return -ESTALE;
}

/* Run one ballot. Returns 0 and the owner; -EAGAIN: another ballot interfered; -ESTALE: there is a
 * later epoch; or -BL_ERROR_EPOCH_DAMAGED. */
static int bl_ballot(const bl_server *server, uint64_t epoch, bl_candidate_line *own)
{
    const bl_memory *memory = &server->pool->memory;
    bl_ballots seen;
    int status = bl_candidates_read(server, epoch, NULL, &seen);
    if (status < 0)
        return status;
    own->epoch = epoch;
    own->ballot = (seen.ballot_max / BL_HOST_COUNT + 1) * BL_HOST_COUNT + server->host;
    for (int phase = 1; phase <= 2; phase++) {
        if (seen.epoch_max > epoch)
            return bl_elect_late(own, &seen);
        bl_candidate_write(server, own);
        status = bl_candidates_read(server, epoch, own, &seen);
        if (status < 0)
            return status;
        if (!bl_verify(memory, seen.ballot_max == own->ballot))
            return -EAGAIN;
        if (phase == 2)
            break;
        if (bl_verify(memory, seen.accepted.accepted == 0)) {
            own->nonce = server->nonce;
            own->boot_id[0] = server->boot_id[0], own->boot_id[1] = server->boot_id[1];
            own->host = server->host;
        } else {
            own->nonce = seen.accepted.nonce;
            own->boot_id[0] = seen.accepted.boot_id[0], own->boot_id[1] = seen.accepted.boot_id[1];
            own->host = seen.accepted.host;
        }
        own->accepted = own->ballot;
    }
    return seen.epoch_max > epoch ? bl_elect_late(own, &seen) : 0;
}

int bl_elect(const bl_server *server, uint64_t epoch, bl_candidate_line *owner)
{
    const bl_memory *memory = &server->pool->memory;
    int status = bl_register_read(memory, bl_candidate_offset(server->host), server->host, owner);
    if (status < 0)
        return status;
    if (owner->epoch != epoch) /* no line has this epoch yet */
        *owner = (bl_candidate_line){0};
    for (uint64_t tries = 1; tries <= BL_ELECT_BALLOTS; tries++) {
        status = bl_ballot(server, epoch, owner);
        if (status != -EAGAIN)
            return status;
        bl_nap(memory, bl_new_nonce(memory) % (tries * BL_ELECT_NAP_NS));
    }
    return -EAGAIN;
}

int bl_server_clash(const bl_server *server)
{
    return server->pool->one_host ? -BL_ERROR_SECOND_HOST : -BL_ERROR_HOST_CLASH;
}
