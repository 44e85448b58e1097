/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Why a server took its pool over, for people: logs, the trace and metrics. rpc/takeover.c has
 * decided that it may, and nothing depends on what is noted here.
 */
#include "rpc/server_state.h"

static enum bl_reason bl_reason_of(const bl_server *server, const bl_epoch_line *line)
{
    if (line->epoch == 0)
        return BL_REASON_FIRST;
    if (bl_epoch_last_word(line))
        return BL_REASON_STOPPED;
    if (bl_declared(server, line->nonce))
        return BL_REASON_DECLARED;
    if (line->nonce == server->silence.nonce)
        return server->silence.alive ? BL_REASON_STUCK : BL_REASON_SILENT;
    return line->host == server->host ? BL_REASON_GONE : BL_REASON_SILENT;
}

void bl_reason_note(bl_server *server, const bl_epoch_line *line)
{
    int silent = line->epoch != 0 && line->nonce == server->silence.nonce;
    server->stat.takeover = (bl_takeover_cause){
        .epoch = line->epoch,
        .silent_ns = silent ? server->silence.ns : 0,
        .host = line->host,
        .reason = bl_reason_of(server, line),
    };
}
