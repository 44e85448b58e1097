/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Queues of tasks in the pool, as a client asks for them (index/task_call.c). A task is put by
 * bl_kv_put with kept set, read as any block, and done when it is removed.
 */
#ifndef BL_API_TASK_H
#define BL_API_TASK_H

#include "api/api.h"

/* Claim a queue's oldest task that waits, for visible_ms: 0; its deliveries are 0 if there is none.
 * Or an error. */
int bl_task_claim(bl_session *session, uint64_t queue, uint32_t visible_ms, bl_task *out,
                  uint64_t timeout_ns);

/* Keep a claimed task so long from now; 0: let it wait again. 0, or -BL_ERROR_NO_GRANT: the claim
 * has run out, or another server serves. */
int bl_task_extend(bl_session *session, const bl_task *task, uint32_t visible_ms,
                   uint64_t timeout_ns);

int bl_task_count(bl_session *session, uint64_t queue, bl_task_counts *out, uint64_t timeout_ns);

#endif
