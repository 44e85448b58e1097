/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Batches of puts and gets (beluga/kvcache).
 */
#ifndef BL_API_KV_H
#define BL_API_KV_H

#include "api/rpc.h"
#include "api/transfer.h"

/* A batch of blocks of one length; each has fragment_count fragments, end to end in the pool. */
typedef struct bl_kv_batch {
    const uint64_t *keys;       /* count * 2 words */
    const bl_fragment *fragments; /* count * fragment_count, block after block */
    uint64_t fingerprint;
    uint64_t timeout_ns;
    uint32_t count;
    uint32_t fragment_count;
    uint32_t length;            /* payload bytes of each block */
    uint32_t chunk_size;        /* payload bytes per checksum; 0: none */
    uint32_t check_checksums;           /* get: compare the checksums */
    const bl_copy_settings *settings; /* NULL: the default; a put is by one thread all the same */
    bl_io_queue *io_queue;      /* of the link whose leave each piece needs; or NULL */
    uint32_t transfer_class;    /* there */
    uint32_t kept;              /* put: tasks of the queue whose number is the fingerprint */
} bl_kv_batch;

/* Store a batch. states: per block bl_block_state, GRANTED if it was stored now; statuses: 0 or why
 * it was refused. 0, or an error of the call (the blocks are then not stored). */
int bl_kv_put(bl_session *session, const bl_kv_batch *batch, uint8_t *states, int32_t *statuses);

/* Fetch leading blocks: their number, or an error. states: HIT where the bytes are right; none if
 * another server has taken over. mismatch_count grows by the blocks that were read again. */
int64_t bl_kv_get(bl_session *session, const bl_kv_batch *batch, uint8_t *states,
                  uint64_t *mismatch_count);

/* The same for an engine that copies between begin and end; fragments are not looked at. Nobody
 * else uses the session in between. What begin gave out, end takes back, well or not. */
typedef struct bl_kv_pending bl_kv_pending;

/* Reserve: 0, and the pool offset of each block whose state is GRANTED; or an error. */
int bl_kv_put_begin(bl_session *session, const bl_kv_batch *batch, uint8_t *states,
                    int32_t *statuses, uint64_t *offsets, bl_kv_pending **out);

/* The granted blocks are written, in memory, and these are their checksums, a row for each of the
 * batch; or written is a negative error, and nothing will write there any more. As bl_kv_put.
 * -EINPROGRESS: something may still write there. The session leaves its nonce, whose grants end
 * with this process, and takes another one at its next call. */
int bl_kv_put_end(bl_session *session, bl_kv_pending *pending, const uint32_t *checksums,
                  int written,
                  uint8_t *states, int32_t *statuses);

/* Look up and pin: how many leading blocks there are, or an error. states: HIT if it may be read,
 * from its offset; checksums, if they are to be verified: a row for each of the batch. */
int64_t bl_kv_get_begin(bl_session *session, const bl_kv_batch *batch, uint8_t *states,
                        uint64_t *offsets, uint32_t *checksums, bl_kv_pending **out);

/* The blocks that are HIT were copied, and are what their vectors say; or copied is a negative
 * error. As bl_kv_get, but nothing is read again: what is not right is a miss. */
int64_t bl_kv_get_end(bl_session *session, bl_kv_pending *pending, int copied, uint8_t *states,
                      uint64_t *mismatch_count);

/* Digests of 16 to 64 uniformly random bytes, one behind the other, folded with the digest of their
 * namespace: two words per key. 0, or -EINVAL: another size. */
int bl_fold_keys(const uint8_t *digests, uint32_t digest_size, uint32_t count,
                 const uint8_t name_space[16], uint64_t *keys);

#endif
