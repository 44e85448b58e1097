/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A scenario of fairness: clients (victims) that make one call at a time, next to others whose
 * rings are always full of calls with many keys.
 *
 * The scenario checks that from the moment at which a victim's request line is whole in memory
 * until it is handled, the server handles at most one quantum of each other lane. The check reads
 * memory from outside and runs at every handled call.
 */
#include <errno.h>

#include "rpc/session_state.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_TURNS_METHOD = 9,
    BL_TURNS_VICTIMS = 2,
    BL_TURNS_CALLS = 40,        /* calls of a victim */
    BL_TURNS_ROUNDS = 64,       /* rounds of the server's loop between two housekeepings */
    BL_TURNS_NAP_NS = 2000,
    BL_TURNS_KEYS = 200         /* keys in a call of the others: two calls exceed a quantum */
};

typedef struct bl_turns_victim {
    const bl_session *session;  /* NULL: no session yet */
    uint32_t process;
    bl_work done[BL_PATH_CLIENT_COUNT]; /* by lane: work done since its request is in memory */
} bl_turns_victim;

typedef struct bl_turns {
    bl_path path;
    bl_turns_victim victim[BL_TURNS_VICTIMS];
    uint32_t handled[BL_PATH_CLIENT_COUNT]; /* calls of each lane */
    uint32_t victims_left;
    uint32_t started;           /* victims in victim[] */
} bl_turns;

/* Return 1 if a victim's next request is whole in memory. */
static int bl_turns_waits(const bl_turns *turns, const bl_turns_victim *victim)
{
    const bl_session *session = victim->session;
    uint32_t sequence = turns->handled[session->lane] + 1;
    uint64_t offset = bl_request_offset(&session->pool->geometry, session->lane,
                                        bl_slot_of(session, sequence));
    uint64_t key = bl_message_key(session->nonce, session->epoch);
    bl_request line;
    memcpy(&line, turns->path.world->memory + offset, sizeof line);
    return line.sequence == sequence && bl_request_whole(&line, key);
}

/* Count a handled call of lane. Returns -EBADMSG if a victim has waited for too much of that lane's
 * work. */
static int bl_turns_count(bl_turns *turns, uint32_t lane, uint64_t keys)
{
    turns->handled[lane]++;
    for (uint32_t i = 0; i < BL_TURNS_VICTIMS; i++) {
        bl_turns_victim *victim = &turns->victim[i];
        bl_sim_world *world = turns->path.world;
        if (!victim->session)
            continue;
        if (bl_sim_below(world, 2)) /* the request comes in another lane's turn */
            bl_sim_drain_all(world, world->process[victim->process]);
        if (victim->session->lane == lane) {
            memset(victim->done, 0, sizeof victim->done);
        } else if (bl_turns_waits(turns, victim)) {
            victim->done[lane].requests++;
            victim->done[lane].keys += keys;
            if (victim->done[lane].requests > BL_QUANTUM_REQUESTS ||
                victim->done[lane].keys > BL_QUANTUM_KEYS)
                return -EBADMSG;
        }
    }
    return 0;
}

static int bl_turns_handle(void *context, bl_call *call)
{
    bl_turns *turns = context;
    uint32_t head = sizeof(bl_block_request);
    uint64_t keys = call->request_size > head ? (call->request_size - head) / BL_QUANTUM_KEY_SIZE
        : 1;
    int status = bl_turns_count(turns, call->lane, keys);
    if (status < 0) {
        turns->path.world->result = status;
        turns->path.world->stopped = 1;
    }
    turns->path.world->stat.results++;
    return 0;
}

static int bl_turns_serve(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    bl_server *server;
    int status = bl_server_create(pool, "", pool->memory.host, &server);
    if (status < 0)
        return status;
    bl_server_handle_method(server, BL_TURNS_METHOD, bl_turns_handle, path);
    status = bl_server_serve_lanes(server);
    path->server = server;
    for (uint32_t round = 0; status == 0 && !server->stop; round++) {
        bl_server_round(server);
        bl_nap(&pool->memory, BL_TURNS_NAP_NS); /* meanwhile the rings fill */
        if (round % BL_TURNS_ROUNDS == 0)
            status = bl_housekeeping_keep(server, bl_now_ns(&pool->memory));
    }
    path->server = NULL;
    bl_server_destroy(server);
    return status;
}

static int bl_turns_suffer(bl_pool *pool, void *argument)
{
    bl_turns *turns = argument;
    bl_turns_victim *victim = &turns->victim[turns->started++];
    bl_session *session;
    bl_reply reply;
    int status = bl_path_attach(&turns->path, pool, &session);
    if (status < 0)
        return status;
    victim->process = bl_sim_self(turns->path.world);
    turns->handled[session->lane] = 0;
    victim->session = session;
    for (uint32_t i = 0; i < BL_TURNS_CALLS && status >= 0; i++) {
        bl_lane_send(session, BL_TURNS_METHOD, 0, NULL, 0, 1);
        bl_nap(&pool->memory, bl_sim_below(turns->path.world, BL_TURNS_NAP_NS));
        bl_wait wait = bl_wait_make(&pool->memory, BL_PATH_TIMEOUT_NS);
        status = bl_lane_wait(session, &reply, 1, &wait);
    }
    victim->session = NULL;
    turns->victims_left--;
    bl_session_close(session);
    return status < 0 ? status : 0;
}

/* Keep the ring full of long calls, all with the same bytes, while there are victims. The scenario
 * counts handled calls: waiting for replies would leave the server idle. */
static int bl_turns_crowd(bl_pool *pool, void *argument)
{
    bl_turns *turns = argument;
    uint32_t slots = pool->geometry.slot_count;
    uint8_t bytes[sizeof(bl_block_request) + BL_TURNS_KEYS * BL_QUANTUM_KEY_SIZE] = {0};
    bl_session *session;
    bl_bulk bulk;
    int status = bl_path_attach(&turns->path, pool, &session);
    if (status < 0)
        return status;
    turns->handled[session->lane] = 0;
    status = bl_bulk_send(session, bytes, sizeof bytes, &bulk);
    while (status == 0 && turns->victims_left > 0) {
        uint32_t sent = session->sent - turns->handled[session->lane];
        if (sent < slots) {
            bl_lane_send(session, BL_TURNS_METHOD, BL_MESSAGE_BULK, &bulk, sizeof bulk, 1);
            bl_fence_full(&pool->memory);
        } else {
            bl_nap(&pool->memory, BL_TURNS_NAP_NS);
        }
    }
    bl_session_close(session);
    return status;
}

int bl_path_turns(bl_sim_world *world)
{
    bl_turns turns = {.path = {.world = world, .serve = bl_turns_serve, .server_host_count = 1},
                      .victims_left = BL_TURNS_VICTIMS};
    for (uint32_t i = 0; i < BL_TURNS_VICTIMS; i++) {
        bl_path_client(&turns.path, 1 + i, bl_turns_suffer);
        bl_path_client(&turns.path, 3 + i, bl_turns_crowd);
    }
    return bl_path_run(&turns.path);
}
