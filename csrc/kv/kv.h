/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A batch of puts or gets while it is under way: kv/kv.c puts, kv/get.c gets, kv/engine.c lets an
 * engine do the copy in between.
 */
#ifndef BL_KV_H
#define BL_KV_H

#include "rpc/session.h"
#include "iosched/toll.h"

/* What one batch needs besides the caller's arrays. */
typedef struct bl_kv_work {
    bl_block_record *records;
    bl_entry *entries;
    bl_commit *commits;
    int32_t *statuses;
    uint32_t *index;            /* of the commit's block in the batch */
    uint32_t *vector;
    uint64_t nonce;             /* of the session that was granted or told of the blocks */
    uint32_t chunk_count;
    uint32_t count;             /* of the blocks that were granted, or of the leading hits */
    uint32_t half;              /* get: of the server that was asked */
    uint32_t after;             /* get: state of the key after the hits */
    int fault;                  /* 0, or -error: a copy met what ends the whole call */
} bl_kv_work;

/* The copy of one block. The toll is of several, or its own. */
typedef struct bl_kv_copy {
    const bl_session *session;
    const bl_kv_batch *batch;
    bl_kv_work *work;
    uint32_t *check;            /* of its vector, when it is written */
    bl_toll *toll;
    uint32_t i;
} bl_kv_copy;

#endif
