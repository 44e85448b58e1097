/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The frame of a path scenario: a server, its clients, and a keeper, which starts another server
 * when one has died and stops the last one when the clients have finished. The keeper acts as the
 * operator: it sees processes from outside and uses no verb but nap.
 */
#ifndef BL_SIM_PATHS_H
#define BL_SIM_PATHS_H

#include "rpc/server_state.h"
#include "sim/world.h"

enum {
    BL_PATH_METHOD = 7,
    BL_PATH_CLIENT_COUNT = 8,
    BL_PATH_NAP_NS = 50 * 1000
};

#define BL_PATH_TIMEOUT_NS 10000000000ull

typedef struct bl_path bl_path;

/* The start of every scenario's own struct, which is the argument of all its processes. */
struct bl_path {
    bl_sim_world *world;
    bl_sim_body *serve;         /* the body of every server */
    bl_server *server;          /* the server that runs now, or NULL */
    uint32_t server_process;
    uint32_t server_deaths;     /* deaths of servers still to come */
    uint32_t sudden_deaths;     /* deaths still to come when a client says so */
    uint32_t doomed;            /* the next of them is due once the server serves */
    uint32_t server_verbs;      /* a doomed server dies within so many verbs */
    uint64_t timeout_ns;        /* for attachments and calls; 0: BL_PATH_TIMEOUT_NS */
    uint64_t heartbeat_lost_ns; /* a session silent for so long is suspect; 0: as always */
    int (*prepare)(bl_path *path, bl_meta *meta); /* a server before it serves; NULL: nothing */
    uint32_t bears_timeouts;    /* 1: clocks jump, so a call may time out */
    uint32_t bears_clashes;     /* 1: two machines have one host number, so one may be refused */
    uint32_t server_host_count; /* 2: servers of hosts 0 and 1 take turns */
    uint32_t client[BL_PATH_CLIENT_COUNT];
    uint32_t client_count;
    uint32_t holder[BL_PATH_CLIENT_COUNT]; /* the holder of each lane: process + 1, or 0 */
};

static inline uint64_t bl_path_timeout_ns(const bl_path *path)
{
    return path->timeout_ns ? path->timeout_ns : BL_PATH_TIMEOUT_NS;
}

/* Start a client of path on host: return its process. */
uint32_t bl_path_client(bl_path *path, uint32_t host, bl_sim_body *body);

/* Run it all: the result is that of bl_sim_world_run. */
int bl_path_run(bl_path *path);

/* Judge a server's lanes when bl_server_run() has returned status: that, or -EDOM if its sums do
 * not agree with its lanes, or if a nonce has two of them. */
int bl_path_served(const bl_server *server, int status);

/* Note that the running server serves: if it is doomed, its verbs are counted from now on. */
void bl_path_doom(bl_path *path);

/* Bear what a takeover may do to a call, which is no failure: its session is new, or cannot be
 * before others are gone. */
int bl_path_bear(const bl_path *path, int status);

/* Open a session, however long a server or a lane is missing: 0 or an error. */
int bl_path_attach(bl_path *path, bl_pool *pool, bl_session **out);

uint32_t bl_path_spawn(bl_path *path, uint32_t host, bl_sim_body *body);
void bl_path_start_server(bl_path *path, uint32_t host);
/* Handle a call: every byte plus one, so that a reply is not its request. */
int bl_path_handle(void *context, bl_call *call);

/* Make one call with random bytes: 0, -EBADMSG, or an error. */
int bl_path_call(bl_path *path, bl_session *session, uint32_t size);

int bl_path_clients_alive(const bl_path *path);

/* Keep a server running. A successor needs proof that the server of two epochs ago is gone: one of
 * the hosts has it. */
int bl_path_keep(bl_pool *pool, void *argument);

int bl_path_serve(bl_pool *pool, void *argument);

enum {
    BL_FAREWELL_LOOKS = 50,     /* looks until the lanes are free in the end */
    BL_FAREWELL_LOOK_NS = 10 * 1000 * 1000
};

/* Is every lane known to be free? */
int bl_farewell_free(const bl_path *path);

#endif
