/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Clients that put and get batches, shared by several scenarios.
 */
#ifndef BL_SIM_KV_H
#define BL_SIM_KV_H

#include "api/kvcache.h"
#include "api/transfer.h"
#include "sim/native/scenarios/paths.h"

enum {
    BL_KV_ROUNDS = 24,
    BL_KV_THREADS = 2,          /* of a process, besides its first */
    BL_KV_THREAD_ROUNDS = 10,
    BL_KV_THREAD_NAP_NS = 100 * 1000,
    BL_KV_THREADS_DEATHS = 6,
    BL_KV_THREADS_VERBS = 4000,
    BL_KV_SHAPE_COUNT = 4,
    BL_KV_SHAPE_KEYS = 6,       /* keys of one shape */
    BL_KV_CALM_KEYS = 3,        /* few enough for the table */
    BL_KV_BATCH = 3,
    BL_KV_NAMELESS = 3,         /* every third key has no name */
    BL_KV_NAMES_MAX = 64,       /* more than the table has lines */
    BL_KV_FRAGMENTS = 2,
    BL_KV_LENGTH_MAX = BL_PAGE_SIZE,
    BL_KV_FULL_ROUNDS = 12,
    BL_KV_SERVER_VERBS = 12000,
    BL_KV_STOPS = 6,            /* in kv_stops */
    BL_KV_STOPS_KEYS = 24,      /* twice as many as the table has lines */
    BL_KV_STOPS_ROUNDS = 150,
    BL_KV_STOP_NS = 15 * 1000 * 1000,
    BL_KV_STOPS_NAP_NS = 20 * 1000 * 1000,
    BL_KV_SILENCES = 4,         /* pauses in kv_silent, longer than the heartbeat timeout */
    BL_KV_SILENCE_NS = 40 * 1000 * 1000,
    BL_KV_LOST_NS = 4 * 1000 * 1000
};

typedef struct bl_kv_shape bl_kv_shape;

typedef struct bl_kv {
    bl_path path;
    const bl_kv_shape *shapes;  /* NULL: bl_kv_shapes */
    uint32_t shape_keys;
    uint32_t rounds;            /* 0: BL_KV_ROUNDS */
    uint32_t bare;              /* 1: only blocks without checksums, and host 0 only reads */
    uint32_t calm;
    uint32_t leaves;            /* 1: each client abandons a session once, while its device
                                 * writes */
    uint32_t left;              /* a bit per process that has abandoned one */
    uint32_t named;             /* 1: blocks have names, and clients read the name table */
    uint32_t summed;            /* 1: every block has checksums, and every read checks them */
    uint8_t there[BL_KV_SHAPE_COUNT * BL_KV_SHAPE_KEYS + BL_KV_STOPS_KEYS]; /* 1: the put was
                                                                             * answered */
    uint8_t named_there[BL_KV_SHAPE_COUNT * BL_KV_SHAPE_KEYS]; /* 1: also the put with a name */
} bl_kv;

/* One batch of a client, with buffers like an engine's. */
typedef struct bl_kv_buffers {
    uint64_t keys[2 * BL_KV_BATCH];
    bl_fragment fragments[BL_KV_BATCH * BL_KV_FRAGMENTS];
    bl_name names[BL_KV_BATCH];
    uint64_t payloads[BL_KV_BATCH][BL_KV_LENGTH_MAX / sizeof(uint64_t)];
    uint8_t states[BL_KV_BATCH];
    int32_t statuses[BL_KV_BATCH];
    bl_kv_batch batch;
} bl_kv_buffers;

void bl_kv_fill(uint64_t *payload, uint64_t key, uint64_t version, uint32_t length);
/* Choose some keys of one shape. */
void bl_kv_prepare(const bl_kv *kv, bl_kv_buffers *buffers);

int bl_kv_try_put(bl_kv *kv, bl_session *session, bl_kv_buffers *buffers);
int bl_kv_try_get(bl_kv *kv, bl_session *session, bl_kv_buffers *buffers);

/* Read all names, and compare them with the entries and with the answered puts. */
int bl_kv_try_names(bl_kv *kv, const bl_pool *pool, const bl_session *session);

#endif
