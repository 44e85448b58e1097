/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The framework of a path scenario: a server, its clients, and a keeper, which starts another
 * server after a death and stops the last one when the clients have finished. The keeper acts as
 * the operator: it observes processes from outside and uses no verb but nap.
 */
#ifndef BL_SIM_PATHS_H
#define BL_SIM_PATHS_H

#include "api/index.h"
#include "rpc/server_state.h"
#include "sim/native/world.h"

enum {
    BL_PATH_METHOD = 7,
    BL_PATH_CLIENT_COUNT = 8,
    BL_PATH_NAP_NS = 50 * 1000
};

#define BL_PATH_TIMEOUT_NS 10000000000ull

typedef struct bl_path bl_path;

/* The first member of every scenario's struct, which is the argument of all its processes. */
struct bl_path {
    bl_sim_world *world;
    bl_sim_body *serve;         /* the body of every server */
    bl_server *server;          /* the running server, or NULL */
    uint32_t server_process;
    uint32_t server_deaths;     /* deaths of servers still to come */
    uint32_t sudden_deaths;     /* deaths still to come, triggered by clients */
    uint32_t doomed;            /* 1: the next of them comes once the server serves */
    uint32_t server_verbs;      /* a doomed server dies within this many verbs */
    uint64_t timeout_ns;        /* for attachments and calls; 0: BL_PATH_TIMEOUT_NS */
    uint64_t heartbeat_lost_ns; /* heartbeat timeout of sessions; 0: the default */
    int (*prepare)(bl_path *path, bl_index *index); /* called before a server serves, or NULL */
    uint32_t bears_timeouts;    /* 1: clocks jump, so calls may time out */
    uint32_t bears_clashes;     /* 1: two machines have the same host number, so one may be
                                 * refused */
    uint32_t server_host_count; /* 2: servers of hosts 0 and 1 take turns */
    uint32_t client[BL_PATH_CLIENT_COUNT];
    uint32_t client_count;
    uint32_t holder[BL_PATH_CLIENT_COUNT]; /* the holder of each lane: process + 1, or 0 */
};

/* End and free a session that no other thread uses. */
static inline void bl_session_close(bl_session *session)
{
    bl_session_end(session, UINT64_MAX / 4);
    bl_session_free(session);
}

static inline uint64_t bl_path_timeout_ns(const bl_path *path)
{
    return path->timeout_ns ? path->timeout_ns : BL_PATH_TIMEOUT_NS;
}

/* Start a client of path on host. Returns its process. */
uint32_t bl_path_client(bl_path *path, uint32_t host, bl_sim_body *body);

/* Run the scenario. Returns the result of bl_sim_world_run. */
int bl_path_run(bl_path *path);

/* Check a server's lanes after bl_server_run() returned status. Returns status; or -EDOM if its
 * counts do not match its lanes, or if a nonce has two lanes. */
int bl_path_served(const bl_server *server, int status);

/* The server has begun to serve: if it is doomed, start to count its verbs. */
void bl_path_doom(bl_path *path);

/* Accept the errors that a takeover may cause: the session is new, or cannot attach before others
 * are gone. */
int bl_path_bear(const bl_path *path, int status);

/* Open a session; retry while there is no server or no lane. Returns 0 or an error. */
int bl_path_attach(bl_path *path, bl_pool *pool, bl_session **out);

uint32_t bl_path_spawn(bl_path *path, uint32_t host, bl_sim_body *body);
void bl_path_start_server(bl_path *path, uint32_t host);
/* Handle a call: add one to every byte, so that a reply differs from its request. */
int bl_path_handle(void *context, bl_call *call);

/* Make one call with random bytes. Returns 0, -EBADMSG, or an error. */
int bl_path_call(bl_path *path, bl_session *session, uint32_t size);

/* Make a batch of calls with random bytes: 0, -EBADMSG, or an error. */
int bl_path_pump(bl_path *path, bl_session *session);

int bl_path_clients_alive(const bl_path *path);

/* Keep a server running. A successor needs the proof that the server of two epochs ago is gone,
 * which one of the hosts has. */
int bl_path_keep(bl_pool *pool, void *argument);

int bl_path_serve(bl_pool *pool, void *argument);

enum {
    BL_FAREWELL_LOOKS = 50,     /* checks, at the end, until the lanes are free */
    BL_FAREWELL_LOOK_NS = 10 * 1000 * 1000
};

/* Return 1 if every lane is free. */
int bl_farewell_free(const bl_path *path);

#endif
