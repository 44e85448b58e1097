/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Copies of a batch by its engine, and of rows also by the CPU. A batch is copied in parts of about
 * 64 MiB, so that the engine copies one while the next one is planned.
 *
 * An engine may run Python, and so never within a guarded region.
 */
#ifndef BL_KV_ENGINE_H
#define BL_KV_ENGINE_H

#include "kvcache/batch.h"

/* Write the granted blocks and their checksums. Returns 0 or an error. After -EINPROGRESS the
 * session has left its nonce; after other errors nothing writes to the blocks, and their lines are
 * in memory. */
int bl_kv_engine_write(bl_session *session, const bl_kv_batch *batch, bl_kv_work *work);

/* Read those of the blocks [first, first + count) whose state is HIT; it becomes BL_KV_DAMAGED
 * where the bytes are not those of the checksums. Returns 0 or an error. */
int bl_kv_engine_read(const bl_session *session, const bl_kv_batch *batch, bl_kv_work *work,
                      uint32_t first, uint32_t count, uint8_t *states);

/* Returns 1 if the batch is read by the functions above. */
static inline int bl_kv_by_engine(const bl_kv_batch *batch)
{
    return batch->engine != NULL || batch->rows != NULL;
}

#endif
