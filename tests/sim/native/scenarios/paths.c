/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Scenarios of calls through lanes and the lobby, with processes of several hosts; and the
 * framework of all path scenarios.
 */
#include "sim/native/scenarios/paths.h"

#include <errno.h>

#include "rpc/session_state.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_PATH_CALLS = 12,
    BL_PATH_PUMP = 8,           /* calls in flight */
    BL_PATH_ATTACHMENTS = 3,
    BL_PATH_MESSAGE_SIZE_MAX = 1024
};

/* ---- The framework. */

uint32_t bl_path_spawn(bl_path *path, uint32_t host, bl_sim_body *body)
{
    int process = bl_sim_spawn(path->world, host, body, path);
    if (process < 0) {
        path->world->result = process;
        path->world->stopped = 1;
        return 0;
    }
    return (uint32_t)process;
}

uint32_t bl_path_client(bl_path *path, uint32_t host, bl_sim_body *body)
{
    uint32_t process = bl_path_spawn(path, host, body);
    path->client[path->client_count++] = process;
    return process;
}

void bl_path_start_server(bl_path *path, uint32_t host)
{
    path->server_process = bl_path_spawn(path, host, path->serve);
    path->doomed = path->server_deaths > 0;
    path->server_deaths -= path->doomed;
    if (path->doomed && bl_sim_below(path->world, 2))
        bl_path_doom(path); /* the death may come during the takeover */
}

void bl_path_doom(bl_path *path)
{
    if (path->doomed)
        bl_sim_kill_after(path->world, path->server_process,
                          1 + bl_sim_below(path->world, path->server_verbs));
    path->doomed = 0;
}

int bl_path_clients_alive(const bl_path *path)
{
    for (uint32_t i = 0; i < path->client_count; i++)
        if (bl_sim_alive(path->world, path->client[i]))
            return 1;
    return 0;
}

int bl_path_keep(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    const bl_sim_process *server = path->world->process[path->server_process];
    while (bl_path_clients_alive(path)) {
        if (bl_sim_gone(server)) {
            uint32_t host = server->pool.memory.host;
            bl_path_start_server(path, (host + 1) % path->server_host_count);
            server = path->world->process[path->server_process];
        }
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    }
    while (bl_sim_alive(path->world, path->server_process)) {
        if (path->server)
            bl_server_stop(path->server);
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    }
    return 0;
}

int bl_path_run(bl_path *path)
{
    bl_path_start_server(path, 0);
    bl_path_spawn(path, 0, bl_path_keep);
    return bl_sim_world_run(path->world);
}

int bl_path_attach(bl_path *path, bl_pool *pool, bl_session **out)
{
    for (;;) {
        int status = bl_session_open(pool, "", pool->memory.host, bl_path_timeout_ns(path),
                                     out);
        if (status != -BL_ERROR_NO_LANE && status != -BL_ERROR_NO_SERVER &&
            bl_path_bear(path, status) == status)
            return status;
        bl_nap(&pool->memory, bl_sim_below(path->world, BL_PATH_NAP_NS));
    }
}

int bl_path_bear(const bl_path *path, int status)
{
    if (path->bears_timeouts && (status == -BL_ERROR_TIMEOUT || status == -BL_ERROR_NO_SERVER ||
                                 status == -BL_ERROR_LOBBY_BUSY))
        return 0;
    if (path->bears_clashes && status == -BL_ERROR_HOST_CLASH)
        return 0;
    return status == -BL_ERROR_SESSION_LOST || status == -BL_ERROR_NO_LANE ? 0 : status;
}

/* ---- A server of calls. */

int bl_path_handle(void *context, bl_call *call)
{
    (void)context;
    for (uint32_t i = 0; i < call->request_size; i++)
        call->reply[i] = call->request[i] + 1;
    call->reply_size = call->request_size;
    return (int)call->request_size;
}

int bl_path_served(const bl_server *server, int status)
{
    uint32_t live_count = 0, inherited_count = 0, twice = 0;
    for (uint32_t i = 0; i < server->pool->geometry.lane_count; i++) {
        const bl_lane *lane = &server->lanes[i];
        if (lane->state == BL_SESSION_FREE)
            continue;
        live_count += lane->state == BL_SESSION_LIVE;
        inherited_count += lane->epoch != server->epoch;
        for (uint32_t k = 0; k < i; k++)
            twice |= server->lanes[k].state != BL_SESSION_FREE &&
                     server->lanes[k].nonce == lane->nonce;
    }
    return twice || live_count != server->live_count || inherited_count != server->inherited_count
               ? -EDOM
               : status;
}

int bl_path_serve(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    bl_server *server;
    int status = bl_server_create(pool, "", pool->memory.host, &server);
    if (status < 0)
        return status;
    bl_server_handle_method(server, BL_PATH_METHOD, bl_path_handle, path);
    status = bl_server_serve_lanes(server);
    path->server = server;
    if (status == 0)
        status = bl_path_served(server, bl_server_run(server));
    path->server = NULL;
    bl_server_destroy(server);
    return status;
}

int bl_path_call(bl_path *path, bl_session *session, uint32_t size)
{
    uint8_t request[BL_PATH_MESSAGE_SIZE_MAX], reply[BL_PATH_MESSAGE_SIZE_MAX];
    uint32_t reply_size = 0;
    for (uint32_t i = 0; i < size; i++)
        request[i] = (uint8_t)bl_sim_random(path->world);
    bl_message message = {.method = BL_PATH_METHOD, .request = request, .request_size = size,
                          .reply = reply, .reply_capacity = sizeof reply,
                          .reply_size = &reply_size};
    int status = bl_session_call(session, &message, bl_path_timeout_ns(path));
    if (status < 0)
        return status;
    if (status != (int)size || reply_size != size)
        return -EBADMSG;
    for (uint32_t i = 0; i < size; i++)
        if (reply[i] != (uint8_t)(request[i] + 1))
            return -EBADMSG;
    path->world->stat.results++;
    return 0;
}

int bl_path_pump(bl_path *path, bl_session *session)
{
    uint8_t requests[BL_PATH_PUMP * BL_MESSAGE_INLINE_SIZE], replies[sizeof requests];
    for (uint32_t i = 0; i < sizeof requests; i++)
        requests[i] = (uint8_t)bl_sim_random(path->world);
    bl_pump pump = {.requests = requests, .replies = replies, .count = BL_PATH_PUMP,
                    .size = BL_MESSAGE_INLINE_SIZE, .depth = BL_PATH_PUMP,
                    .method = BL_PATH_METHOD};
    int status = bl_session_pump(session, &pump, bl_path_timeout_ns(path));
    if (status > 0) /* an error was expected */
        return -EBADMSG;
    for (uint32_t i = 0; status == 0 && i < sizeof requests; i++)
        if (replies[i] != (uint8_t)(requests[i] + 1))
            status = -EBADMSG;
    path->world->stat.results += BL_PATH_PUMP;
    return status;
}

/* ---- lane: every reply is right, short and long ones, one by one and pipelined. */

static int bl_path_talk(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    bl_session *session;
    int status = bl_path_attach(path, pool, &session);
    if (status < 0)
        return status;
    for (uint32_t i = 0; i < BL_PATH_CALLS && status == 0; i++) {
        uint64_t random = bl_sim_random(path->world);
        uint32_t size_max = random & 1 ? BL_PATH_MESSAGE_SIZE_MAX : BL_MESSAGE_INLINE_SIZE;
        uint32_t size = (uint32_t)((random >> 32) % (size_max + 1));
        if ((random >> 4) % 4 == 0)
            size &= ~(uint32_t)(BL_LINE_SIZE - 1); /* whole lines */
        if ((random >> 8) % 4 == 0)
            status = bl_path_pump(path, session);
        else
            status = bl_path_call(path, session, size);
    }
    bl_session_close(session);
    return status;
}

int bl_path_lane(bl_sim_world *world)
{
    bl_path path = {.world = world, .serve = bl_path_serve, .server_host_count = 1};
    bl_path_client(&path, 1, bl_path_talk);
    bl_path_client(&path, 2, bl_path_talk);
    return bl_path_run(&path);
}

/* ---- lobby: more processes than lanes attach and detach, and one dies; no lane has two
 * holders. */

/* Check that the lane of a new session has no other holder that could still write to it. Returns 0
 * or -EBADMSG. */
static int bl_path_hold(bl_path *path, bl_session *session)
{
    bl_session_stat stat;
    bl_session_describe(session, &stat);
    uint32_t *holder = &path->holder[stat.lane];
    if (*holder && !bl_sim_gone(path->world->process[*holder - 1]))
        return -EBADMSG;
    *holder = bl_sim_self(path->world) + 1;
    return 0;
}

static void bl_path_give_back(bl_path *path, bl_session *session)
{
    bl_session_stat stat;
    bl_session_describe(session, &stat);
    path->holder[stat.lane] = 0;
    bl_session_close(session);
}

static int bl_path_come_and_go(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    int status = 0;
    for (uint32_t i = 0; i < BL_PATH_ATTACHMENTS && status == 0; i++) {
        bl_session *session;
        status = bl_path_attach(path, pool, &session);
        if (status < 0)
            return status;
        status = bl_path_hold(path, session);
        if (status == 0)
            status = bl_path_call(path, session, 1 + (uint32_t)bl_sim_below(path->world, 200));
        bl_path_give_back(path, session);
    }
    return status;
}

int bl_path_lobby(bl_sim_world *world)
{
    bl_path path = {.world = world, .serve = bl_path_serve, .server_host_count = 1};
    for (uint32_t i = 0; i < 6; i++)
        bl_path_client(&path, i % 3, bl_path_come_and_go);
    bl_sim_kill_after(world, path.client[0], 1 + bl_sim_below(world, 4000));
    return bl_path_run(&path);
}
