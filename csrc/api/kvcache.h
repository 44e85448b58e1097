/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Declares batches of puts and gets (beluga/kvcache).
 */
#ifndef BL_API_KV_H
#define BL_API_KV_H

#include "api/rpc.h"
#include "api/transfer.h"

enum bl_kv_limit {
    BL_KV_IN_FLIGHT = 4         /* pieces of an engine that are copied or wait for it */
};

/* A batch of blocks of one length; each has fragment_count fragments, contiguous in the pool. */
typedef struct bl_kv_batch {
    const uint64_t *keys;       /* count * 2 words */
    const bl_fragment *fragments; /* count * fragment_count, block after block */
    const bl_name *names;       /* put: the engines' hashes of the blocks; NULL: none */
    const bl_block_record *records; /* get: where the blocks were last, or NULL; see below */
    const bl_row *rows;         /* get: only these bytes, and no fragments; or NULL */
    const bl_engine *engine;    /* copies in place of the CPU; or NULL */
    const uint32_t *cancelled;  /* set by another thread: an engine starts no further pieces, and
                                 * nothing is stored; or NULL */
    uint64_t row_count;
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
 * statuses has 0 or the reason of a refusal. Returns 0, or an error of the call or the engine (then
 * the blocks are not stored). After the engine's -EINPROGRESS the session abandons its nonce, whose
 * grants end with this process, and attaches with a new one at its next call. */
int bl_kv_put(bl_session *session, const bl_kv_batch *batch, uint8_t *states, int32_t *statuses);

/* Fetch leading blocks. Returns their number, or an error. states is HIT where the bytes are
 * correct; there are no hits if another server has taken over. mismatch_count grows by the blocks
 * that were read again. With records, the server is not called, nothing is pinned, and any of the
 * blocks may be hits; a block that was evicted before or during the copy is a miss. */
int64_t bl_kv_get(bl_session *session, const bl_kv_batch *batch, uint8_t *states,
                  uint64_t *mismatch_count);

/* Fold contiguous digests of 16 to 64 uniformly random bytes with the digest of their namespace
 * into keys of two words. Returns 0, or -EINVAL for another size. */
int bl_fold_keys(const uint8_t *digests, uint32_t digest_size, uint32_t count,
                 const uint8_t name_space[16], uint64_t *keys);

#endif
