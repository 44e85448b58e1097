/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The state of a batch of puts (kvcache/put.c) or gets (kvcache/get.c), and the checksums of its
 * blocks.
 */
#ifndef BL_BATCH_H
#define BL_BATCH_H

#include "api/coherence.h"
#include "api/kvcache.h"
#include "api/rpc.h"
#include "index/client.h"
#include "iosched/throttle.h"

/* The state of a block whose bytes are not those of its checksums, until the second look at its
 * entry decides between damage and a change. */
enum { BL_KV_DAMAGED = BL_BLOCK_REFUSED };

/* The working memory of one batch, besides the caller's arrays. */
typedef struct bl_kv_work {
    bl_block_record *records;
    bl_entry *entries;
    bl_commit *commits;
    bl_named_commit *named;     /* the commits with their names, if the batch has names */
    int32_t *statuses;
    uint32_t *index;            /* index of the commit's block in the batch */
    uint32_t *checksums;
    bl_attachment under;        /* of the lookup; of a put only the nonce, which has the grants */
    uint32_t writing;           /* put: 1: the nonce cannot end (bl_session_write) */
    uint32_t chunk_count;
    uint32_t count;             /* number of granted blocks, or of leading hits */
    uint32_t after;             /* get: state of the first key after the hits */
    int stands;                 /* get: 1: the server that was called is still the pool's */
} bl_kv_work;

/* The copy of one block. Several blocks may share the throttle. */
typedef struct bl_kv_copy {
    const bl_session *session;
    const bl_kv_batch *batch;
    bl_kv_work *work;
    uint32_t *check;            /* put: receives the CRC of the block's checksums */
    bl_throttle *throttle;
    uint32_t i;
} bl_kv_copy;

/* Return the CRC of a block's checksums. A single checksum is its own CRC; several are stored after
 * the payload. */
static inline uint32_t bl_checksums_crc(const uint32_t *checksums, uint32_t count)
{
    return count == 1 ? checksums[0] : bl_crc32c(0, checksums, count * sizeof *checksums);
}

static inline uint64_t bl_checksums_lines(uint32_t count)
{
    return (count * sizeof(uint32_t) + BL_LINE_SIZE - 1) & ~(uint64_t)(BL_LINE_SIZE - 1);
}

/* Begin a batch: the session is not closed before bl_kv_work_free(). Returns 0 or an error. */
int bl_kv_work_make(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work);
void bl_kv_work_free(bl_session *session, bl_kv_work *work);

/* Stream the checksums of the block at this offset, after its payload. Returns their CRC. */
uint32_t bl_checksums_write(const bl_memory *memory, uint64_t offset, const bl_kv_batch *batch,
                            const bl_kv_work *work);

/* Fetch the stored checksums of a block. Returns 0 or -EBADMSG. */
int bl_checksums_read(const bl_session *session, const bl_entry *entry, bl_kv_work *work);

/* Report the fault of a copy, while the grant or pin keeps the extent open. This is best effort:
 * the next copy that faults there reports it again. */
void bl_kv_retire(bl_session *session, const bl_kv_batch *batch, int status);

#endif
