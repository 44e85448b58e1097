/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The trace: a ring of the last calls that this server handled, for a post-mortem. It is a file of
 * the runtime directory, mapped shared, so it survives the end of the process at any instruction.
 * Only the poll loop writes it, with plain stores; it is this host's own memory, not the pool's.
 *
 *   begin: ended = 0, the fields that are known, sequence = n
 *   end:   status, sizes, ticks_taken; then ended = n
 *
 * An entry is whole if ended and sequence are the same number. If ended is 0, the call had not come
 * to its end: it is running, or the server died in it. "trace.1" is the ring of the server before.
 */
#ifndef BL_TRACE_H
#define BL_TRACE_H

#include "api/rpc.h"
#include "base/host_atomic.h"
#include "coherence/instructions.h"
#include "format/pool_format.h"

typedef struct bl_trace {
    bl_trace_head *head;
    bl_trace_entry *entries;
    uint64_t sequence;          /* of the last call that began */
    uint64_t ticks;             /* when a call ended, or was found in its lane, last */
} bl_trace;

/* Begin a new ring in this directory, and keep the last one as "trace.1". Returns 0, or -errno:
 * there is no ring, and nothing depends on it. */
int bl_trace_open(bl_trace *trace, const char *directory, uint64_t epoch,
                  const bl_takeover_cause *takeover);

/* Record the kernel's clocks at the current tick count; called every few milliseconds. */
void bl_trace_mark(const bl_trace *trace);

/* End the ring; the file remains and records that its server ended in order. */
void bl_trace_close(bl_trace *trace);

/* Record that requests were found and are handled next. */
static inline void bl_trace_found(bl_trace *trace)
{
    if (trace->head)
        trace->ticks = bl_ticks();
}

/* Record the start of a request's handling: fields that are not known yet are 0. */
static inline void bl_trace_begin(bl_trace *trace, const bl_trace_entry *known)
{
    if (!trace->head)
        return;
    uint64_t sequence = ++trace->sequence;
    bl_trace_entry *entry = &trace->entries[sequence % BL_TRACE_ENTRIES];
    bl_host_store(&entry->ended, 0);
    bl_host_ordered(); /* before the fields change */
    entry->ticks = trace->ticks;
    entry->ticks_taken = 0;
    entry->nonce = known->nonce;
    entry->request_size = known->request_size;
    entry->reply_size = 0;
    entry->status = 0;
    entry->pid = known->pid;
    entry->keys = 0;
    entry->method = known->method;
    entry->lane = known->lane;
    entry->host = known->host;
    bl_host_store(&entry->sequence, sequence);
}

/* Remove the entry of the last call that began: it is not answered now. */
static inline void bl_trace_undo(bl_trace *trace)
{
    if (!trace->head)
        return;
    bl_host_store(&trace->entries[trace->sequence % BL_TRACE_ENTRIES].sequence, 0);
    trace->sequence--;
}

/* Return the number of keys of a request; other methods have none. */
static inline uint16_t bl_trace_keys(const bl_call *call)
{
    bl_block_request head;
    int block = (call->method >= BL_METHOD_LOOKUP && call->method <= BL_METHOD_REMOVE) ||
                call->method == BL_METHOD_ONBOARD || call->method == BL_METHOD_TIERS;
    if (!block || call->request_size < sizeof head)
        return 0;
    memcpy(&head, call->request, sizeof head);
    return head.count <= BL_CALL_KEYS_MAX ? (uint16_t)head.count : 0;
}

/* Record the status of the last call that began. */
static inline void bl_trace_end(bl_trace *trace, const bl_call *call, int status)
{
    if (!trace->head)
        return;
    bl_trace_entry *entry = &trace->entries[trace->sequence % BL_TRACE_ENTRIES];
    uint64_t now = bl_ticks();
    entry->ticks_taken = now - trace->ticks;
    entry->request_size = call->request_size;
    entry->reply_size = call->reply_size;
    entry->status = status;
    entry->keys = bl_trace_keys(call);
    trace->ticks = now;
    bl_host_store(&entry->ended, trace->sequence);
}

#endif
