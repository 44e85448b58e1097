/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What the exporter shows of a server: its calls by method, and what clients count and report.
 */
#include "rpc/server_state.h"

int bl_report_handler(void *context, bl_call *call)
{
    bl_server *server = context;
    bl_report report;
    uint32_t size = call->request_size, figure = sizeof report.figures[0];
    if (size < figure || size > sizeof report || size % figure != 0)
        return -BL_ERROR_BAD_REQUEST;
    memcpy(&report, call->request, size);
    if (report.kind >= BL_REPORT_KINDS)
        return -BL_ERROR_BAD_REQUEST;
    server->lanes[call->lane].kind = (uint32_t)report.kind;
    for (uint32_t i = 0; i < size / figure - 1; i++)
        server->reported[report.kind][i] += report.figures[i];
    return 0;
}

void bl_server_reported(const bl_server *server, uint32_t kind, uint64_t *figures)
{
    if (kind < BL_REPORT_KINDS)
        memcpy(figures, server->reported[kind], sizeof server->reported[kind]);
}

void bl_server_calls(const bl_server *server, bl_calls *out, uint32_t count)
{
    for (uint32_t method = 0; method < count && method < BL_METHOD_COUNT; method++)
        out[method] = server->handlers[method].calls;
}
