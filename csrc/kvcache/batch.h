/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Declares a batch of puts (kvcache/put.c) or gets (kvcache/get.c) while it is under way. A batch
 * is done in one call, or in two halves: an engine copies in between (beluga/transfer). Between the
 * halves nothing else may use the session, because a session that ends loses its grants and pins.
 */
#ifndef BL_BATCH_H
#define BL_BATCH_H

#include "api/coherence.h"
#include "api/kvcache.h"
#include "api/rpc.h"
#include "rpc/session_state.h"
#include "iosched/throttle.h"

/* The working memory of one batch, besides the caller's arrays. */
typedef struct bl_kv_work {
    bl_block_record *records;
    bl_entry *entries;
    bl_commit *commits;
    bl_named_commit *named;     /* the commits with their names, if the batch has names */
    int32_t *statuses;
    uint32_t *index;            /* of the commit's block in the batch */
    uint32_t *checksums;
    uint64_t nonce;             /* of the session with the grants or pins */
    uint32_t chunk_count;
    uint32_t count;             /* of the granted blocks, or of the leading hits */
    uint32_t half;              /* get: of the server that was asked */
    uint32_t after;             /* get: state of the key after the hits */
    int status;                 /* get: of the read of the last block */
    int fault;                  /* 0, or a negative error that ends the whole call */
} bl_kv_work;

/* Returns the copy of one block. The throttle is one that several blocks share, or the block's
 * own. */
typedef struct bl_kv_copy {
    const bl_session *session;
    const bl_kv_batch *batch;
    bl_kv_work *work;
    uint32_t *check;            /* of its checksums, when it is written */
    bl_throttle *throttle;
    uint32_t i;
} bl_kv_copy;

/* The state of a batch between its halves, while an engine copies. */
struct bl_kv_pending {
    bl_kv_batch batch;
    bl_kv_work work;
};

/* A single checksum is its own check. Several checksums are stored behind the payload. */
static inline uint32_t bl_checksums_crc(const uint32_t *checksums, uint32_t count)
{
    return count == 1 ? checksums[0] : bl_crc32c(0, checksums, count * sizeof *checksums);
}

static inline uint64_t bl_checksums_lines(uint32_t count)
{
    return (count * sizeof(uint32_t) + BL_LINE_SIZE - 1) & ~(uint64_t)(BL_LINE_SIZE - 1);
}

/* Returns 0 or -ENOMEM. */
int bl_kv_work_make(const bl_kv_batch *batch, bl_kv_work *work);
void bl_kv_work_free(bl_kv_work *work);

/* Begin a batch in two halves. */
int bl_kv_pending_make(const bl_kv_batch *batch, bl_kv_pending **out);
void bl_kv_pending_free(bl_kv_pending *pending);

/* Returns 1 if the session still holds what it was given at the beginning. */
int bl_kv_held(const bl_session *session, const bl_kv_work *work);

/* Report a fault that a copy met, while the grant or the pin keeps the extent where it is. This is
 * best effort: the next copy that meets the fault reports it again. */
void bl_kv_retire(bl_session *session, const bl_kv_batch *batch, int status);

#endif
