/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The client's calls about tasks, with the checks of their replies.
 */
#include "format/payload.h"
#include "index/state.h"
#include "rpc/session_state.h"

/* Make a call about tasks; the reply has size bytes. Returns the status, or an error. */
static int bl_task_call(bl_session *session, uint32_t method, const bl_task_request *request,
                        void *reply, uint32_t size, uint64_t timeout_ns)
{
    uint32_t got = 0;
    bl_message message = {
        .method = method,
        .request = (const uint8_t *)request,
        .request_size = sizeof *request,
        .reply = reply,
        .reply_capacity = size,
        .reply_size = &got,
    };
    int status = bl_session_call(session, &message, timeout_ns);
    if (status < 0)
        return status;
    return got == size ? 0 : -BL_ERROR_BAD_REPLY;
}

int bl_task_claim(bl_session *session, uint64_t queue, uint32_t visible_ms, bl_task *out,
                  uint64_t timeout_ns)
{
    bl_task_request request = {.queue = queue, .visible_ms = visible_ms};
    int status = bl_task_call(session, BL_METHOD_TASK_CLAIM, &request, out, sizeof *out,
                              timeout_ns);
    const bl_geometry *g = &session->pool->geometry;
    if (status == 0 && out->deliveries > 0 && /* the caller allocates this many bytes */
        (out->block >= g->block_count_max || !bl_block_within(g, g->data_offset, out->length, 0)))
        return -BL_ERROR_BAD_REPLY;
    return status;
}

int bl_task_extend(bl_session *session, const bl_task *task, uint32_t visible_ms,
                   uint64_t timeout_ns)
{
    bl_task_request request = {.generation = task->generation, .block = task->block,
                               .visible_ms = visible_ms};
    return bl_task_call(session, BL_METHOD_TASK_EXTEND, &request, NULL, 0, timeout_ns);
}

int bl_task_count(bl_session *session, uint64_t queue, bl_task_counts *out, uint64_t timeout_ns)
{
    bl_task_request request = {.queue = queue};
    return bl_task_call(session, BL_METHOD_TASK_COUNT, &request, out, sizeof *out, timeout_ns);
}
