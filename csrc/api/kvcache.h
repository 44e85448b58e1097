/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Declares batches of puts and gets (beluga/kvcache).
 */
#ifndef BL_API_KV_H
#define BL_API_KV_H

#include "api/rpc.h"
#include "api/transfer.h"

/* A batch of blocks of one length; each has fragment_count fragments, contiguous in the pool. */
typedef struct bl_kv_batch {
    const uint64_t *keys;       /* count * 2 words */
    const bl_fragment *fragments; /* count * fragment_count, block after block */
    const bl_name *names;       /* put: the engines' hashes of the blocks; NULL: none */
    const bl_block_record *records; /* get: where the blocks were last, or NULL; see below */
    uint64_t fingerprint;
    uint64_t timeout_ns;
    uint32_t count;
    uint32_t fragment_count;
    uint32_t length;            /* payload bytes of each block */
    uint32_t chunk_size;        /* payload bytes per checksum; 0: none */
    uint32_t check_checksums;           /* get: compare the checksums */
    const bl_copy_settings *settings; /* NULL: the default; a put always uses one thread */
    bl_io_queue *io_queue;      /* of the link that admits each piece; or NULL */
    uint32_t transfer_class;    /* class of the pieces on that link */
    uint32_t reserve_flags;     /* put: bl_reserve_flag */
} bl_kv_batch;

/* Threads may put and get over one session at the same time.
 *
 * Store a batch. states has a bl_block_state per block, GRANTED if it was stored by this call;
 * statuses has 0 or the reason of a refusal. Returns 0, or an error of the call (then the blocks
 * are not stored). */
int bl_kv_put(bl_session *session, const bl_kv_batch *batch, uint8_t *states, int32_t *statuses);

/* Fetch leading blocks. Returns their number, or an error. states is HIT where the bytes are
 * correct; there are no hits if another server has taken over. mismatch_count grows by the blocks
 * that were read again. With records, the server is not called, nothing is pinned, and any of the
 * blocks may be hits; a block that was evicted before or during the copy is a miss. */
int64_t bl_kv_get(bl_session *session, const bl_kv_batch *batch, uint8_t *states,
                  uint64_t *mismatch_count);

/* The functions below split a put or get in two, for an engine that copies between begin and end;
 * fragments is ignored. Between the halves of a put, its thread makes no call. end frees the result
 * of begin, whether it succeeds or fails. */
typedef struct bl_kv_pending bl_kv_pending;

/* Reserve space. Returns 0 or an error; offsets has the pool offset of each GRANTED block. */
int bl_kv_put_begin(bl_session *session, const bl_kv_batch *batch, uint8_t *states,
                    int32_t *statuses, uint64_t *offsets, bl_kv_pending **out);

/* Commit the granted blocks, whose bytes are in memory, with these checksums (a row for each block
 * of the batch). If written is a negative error, nothing may write to the blocks any more, and
 * their grants are aborted. With -EINPROGRESS a device may still write: the session abandons its
 * nonce, whose grants end with this process, and attaches with a new one at its next call. States,
 * statuses and result are those of bl_kv_put. */
int bl_kv_put_end(bl_kv_pending *pending, const uint32_t *checksums, int written,
                  uint8_t *states, int32_t *statuses);

/* Look up and pin blocks. Returns the number of leading hits, or an error. A HIT block may be read
 * from its offset. With check_checksums, checksums gets a row for each block of the batch. */
int64_t bl_kv_get_begin(bl_session *session, const bl_kv_batch *batch, uint8_t *states,
                        uint64_t *offsets, uint32_t *checksums, bl_kv_pending **out);

/* Confirm the HIT blocks, which were copied and agree with their checksums; or end the batch if
 * copied is a negative error. The result is that of bl_kv_get, but nothing is read again: a block
 * with wrong bytes is a miss. */
int64_t bl_kv_get_end(bl_kv_pending *pending, int copied, uint8_t *states,
                      uint64_t *mismatch_count);

/* Fold contiguous digests of 16 to 64 uniformly random bytes with the digest of their namespace
 * into keys of two words. Returns 0, or -EINVAL for another size. */
int bl_fold_keys(const uint8_t *digests, uint32_t digest_size, uint32_t count,
                 const uint8_t name_space[16], uint64_t *keys);

#endif
