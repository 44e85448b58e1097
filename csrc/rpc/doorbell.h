/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Doorbells: idle sessions cost the server nothing.
 *
 * In every round, the server polls the lanes that are busy. A lane without a request for
 * bl_quiet_ns() becomes quiet. For all quiet lanes of a host, the server polls one line, the host's
 * doorbell, and it polls the lanes only after that line has changed.
 *
 *   caller                               server
 *   stream the request; store fence      invalidate the doorbell; full fence; load it
 *   stream the doorbell                  it has changed: record its value, then
 *   full fence, of the reply's poll      invalidate the host's lanes; full fence; load them
 *
 * A caller rings if it sent nothing for a part of bl_quiet_ns(), or if its call has waited for that
 * long. So server and caller need not agree on which lanes are quiet, nor on the speed of their
 * clocks: a request in a quiet lane is rung for, at the latest after that wait. A caller that calls
 * all the time never rings.
 *
 * The processes of a host write the same line, each with numbers that were never written before,
 * and the server reads one word of it. Nothing is cleared. A ring may overwrite another one: the
 * requests of both were written before, so a server that reads the last ring finds them all. A
 * server that reads the first ring sees another change later. A value written twice could
 * hide the ring between.
 *
 * The server polls the doorbells in each round after which it may sleep. Otherwise it polls them
 * every few rounds, or every few calls if a round has many, because a poll costs a cache miss for
 * each host.
 */
#ifndef BL_DOORBELL_H
#define BL_DOORBELL_H

#include "rpc/server_state.h"
#include "rpc/session_state.h"

enum {
    BL_QUIET_RING_PART = 8,     /* a caller rings after bl_quiet_ns() / 8 without a request */
    /* A server with work polls doorbells after this many rounds, requests or keys. */
    BL_DOORBELL_ROUNDS = 16,
    BL_DOORBELL_REQUESTS = 4,
    BL_DOORBELL_KEYS = 64
};

/* The time without a request after which a lane is quiet. Scenarios of the simulator set it. */
#ifndef BL_SIM
#define bl_quiet_ns(memory) ((void)(memory), UINT64_C(1000000))
#endif

/* ---- The server's side. */

/* Add the lane of a new session: it is busy. */
void bl_doorbell_add(bl_server *server, uint32_t lane);

/* Make lanes quiet that have had no request for bl_quiet_ns(). */
void bl_doorbell_quieten(bl_server *server, uint64_t now_ns);

/* Return the hosts whose doorbells this round polls, as bits. */
uint64_t bl_doorbell_due(bl_server *server);

/* Make the next round poll the doorbells: it is the last one before a rest. */
static inline void bl_doorbell_hasten(bl_server *server)
{
    server->doorbell_rounds = BL_DOORBELL_ROUNDS;
}

/* Poll the doorbells of these hosts, whose lines were invalidated. Returns 1 if some have rung:
 * their lanes are busy now and first in order, and the caller must invalidate them. Else 0. */
int bl_doorbell_look(bl_server *server, uint64_t hosts);

/* ---- The caller's side. */

/* Ring for requests that were sent and fenced. This does not fence. */
static inline void bl_doorbell_ring(bl_session *session)
{
    bl_doorbell line;
    uint64_t value = session->nonce + ++session->ring_count; /* new, since nonces are random */
    for (uint32_t i = 0; i < sizeof line.ring / sizeof line.ring[0]; i++)
        line.ring[i] = value;
    /* SYNC lane.doorbell: pairs with bl_doorbell_look() */
    bl_stream_line(&session->pool->memory, bl_doorbell_offset(session->host), &line);
}

#endif
