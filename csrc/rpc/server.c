/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The server's poll loop. It runs without Python's lock and never enters Python, except for
 * handlers that were registered from there.
 *
 * A round, over all busy lanes (see rpc/doorbell.h):
 *   1  invalidate the next window of request lines of every lane; one full fence
 *   2  in the order of rpc/quantum.h: prefetch a lane's whole window, then copy the lines that have
 *      arrived, in order, at most a quantum; a line is accepted if its sequence is the expected
 *      one and its check holds, and is never read again (D13)
 *   3  run the handlers; what they stream into the pool is fenced before
 *   4  the replies are streamed; one fence completes them
 * A lane's window doubles if all its lines had arrived; else it follows the number that had.
 */
#include "rpc/jobs.h"

#include <errno.h>
#include <stdlib.h>

#include "base/minmax.h"
#include "coherence/crash_point.h"
#include "coherence/guard.h"
#include "rpc/doorbell.h"

enum {
    BL_IDLE_SPIN_NS = 50 * 1000,        /* idle for this time: yield the core between rounds */
    BL_IDLE_YIELD_NS = 5 * 1000 * 1000, /* idle for this time: sleep between rounds */
    BL_IDLE_NAP_PART = 100,             /* a sleep is this part of the idle time, at most: */
    BL_IDLE_NAP_NS = 20 * 1000 * 1000,  /* the delay of a call from another host */
    BL_IDLE_ALONE_NS = 100 * 1000 * 1000, /* if only this host may use the pool */
    BL_IDLE_POLL_NS = 400 * 1000,       /* if no process can wake the server */
    BL_ROUNDS_PER_CLOCK = 32
};

static uint32_t bl_server_slot(const bl_server *server, uint32_t sequence)
{
    return sequence & (server->pool->geometry.slot_count - 1);
}

static uint64_t bl_server_request_offset(const bl_server *server, uint32_t lane, uint32_t sequence)
{
    return bl_request_offset(&server->pool->geometry, lane, bl_server_slot(server, sequence));
}

/* Copy a lane's requests that have arrived, at most a quantum: this is its turn. Its window has
 * been invalidated. */
static bl_work bl_lane_gather(bl_server *server, uint32_t number)
{
    const bl_memory *memory = &server->pool->memory;
    bl_lane *lane = &server->lanes[number];
    uint64_t key = bl_message_key(lane->nonce, server->epoch);
    bl_work turn = {0};
    for (uint32_t i = 0; i < lane->window; i++)
        bl_prefetch_line(memory, bl_server_request_offset(server, number, lane->next + i));
    for (; turn.requests < lane->window; turn.requests++) {
        bl_request *request = &server->requests[turn.requests];
        uint32_t sequence = lane->next + (uint32_t)turn.requests;
        /* SYNC lane.request: pairs with bl_lane_send() */
        bl_load_line(memory, bl_server_request_offset(server, number, sequence), request);
        if (request->sequence != sequence)
            break;
        if (!bl_verify(memory, bl_request_whole(request, key))) {
            server->stat.torn_count++; /* partly arrived, or of a former session: read again
                                        * later */
            break;
        }
        uint64_t keys = bl_quantum_keys(request);
        if (!bl_verify(memory, bl_quantum_fits(&turn, keys)))
            break;
        bl_believe(memory, bl_server_request_offset(server, number, sequence));
        turn.keys += keys;
    }
    uint32_t ready = (uint32_t)turn.requests;
    uint32_t window = ready == lane->window ? ready * 2 : ready + 1;
    lane->window = window < BL_QUANTUM_REQUESTS ? window : BL_QUANTUM_REQUESTS;
    return turn;
}

/* Copy the bytes of a long request once. Returns 0 or an error. */
static int bl_bulk_take(bl_server *server, uint32_t lane, const bl_request *request, bl_call *call)
{
    const bl_memory *memory = &server->pool->memory;
    bl_bulk bulk;
    if (request->size != sizeof bulk)
        return -BL_ERROR_BAD_REQUEST;
    memcpy(&bulk, request->payload, sizeof bulk);
    if (bulk.size > server->pool->geometry.bulk_size)
        return -BL_ERROR_BAD_REQUEST;
    uint64_t offset = bl_bulk_in_offset(&server->pool->geometry, lane);
    bl_refetch(memory, offset, bulk.size); /* after reading the line, before the copy */
    bl_fetch(memory, offset, server->bulk_in, bulk.size); /* SYNC lane.bulk_in */
    bl_crash_point("serve.bulk_fetched");
    if (!bl_verify(memory, bl_crc32c(0, server->bulk_in, bulk.size) == bulk.check))
        return -BL_ERROR_BAD_REQUEST;
    /* Their checksum verifies them. There is no bl_rely(): a deposed server that has not
     * detected it yet may read the same bytes while they are sent again, to its successor. */
    call->request = server->bulk_in;
    call->request_size = bulk.size;
    return 0;
}

/* Copy a handler's long reply into the lane's bulk area. */
static void bl_bulk_answer(bl_server *server, uint32_t lane, const bl_call *call, bl_reply *reply)
{
    uint32_t lines = (call->reply_size + BL_LINE_SIZE - 1) / BL_LINE_SIZE;
    memset(call->reply + call->reply_size, 0, lines * BL_LINE_SIZE - call->reply_size);
    bl_stream(&server->pool->memory,
              bl_bulk_out_offset(&server->pool->geometry, lane, server->half), call->reply,
              (uint64_t)lines * BL_LINE_SIZE); /* SYNC lane.bulk_out; fenced with the round */
    bl_crash_point("serve.bulk_streamed");
    bl_bulk bulk = {call->reply_size, bl_crc32c(0, call->reply, call->reply_size)};
    reply->flags = BL_MESSAGE_BULK;
    reply->size = sizeof bulk;
    memcpy(reply->payload, &bulk, sizeof bulk);
}

/* Fill in the reply to a call that has its status. */
static void bl_call_answer(bl_server *server, bl_call *call, int status, bl_reply *reply)
{
    bl_trace_end(&server->trace, call, status);
    if (status < 0)
        server->stat.error_count++;
    bl_server_count(server, call->method, status);
    *reply = (bl_reply){.epoch = (uint32_t)server->epoch, .status = status};
    if (call->reply_size > BL_MESSAGE_INLINE_SIZE) {
        bl_bulk_answer(server, call->lane, call, reply);
    } else {
        reply->size = (uint8_t)call->reply_size;
        memcpy(reply->payload, call->reply, call->reply_size);
    }
}

/* Begin the trace of a call. */
static void bl_call_begin(bl_server *server, uint32_t lane, uint32_t method, uint32_t request_size)
{
    const bl_lane *caller = &server->lanes[lane];
    const bl_trace_entry known = {
        .nonce = caller->nonce,
        .request_size = request_size,
        .pid = caller->pid,
        .method = (uint16_t)method,
        .lane = (uint16_t)lane,
        .host = (uint16_t)caller->host,
    };
    bl_trace_begin(&server->trace, &known);
}

/* Run one request's handler and fill in its reply, unless the request became a job. */
static void bl_server_handle(bl_server *server, uint32_t lane, const bl_request *request,
                             bl_reply *reply)
{
    bl_call call = {
        .request = request->payload,
        .request_size = request->size,
        .reply = server->bulk_out,
        .reply_capacity = server->pool->geometry.bulk_size,
        .lane = lane,
        .method = request->method,
    };
    bl_call_begin(server, lane, request->method, request->size);
    int status = 0;
    uint32_t calls_per_s = server->quota.calls_per_s;
    if (calls_per_s &&
        !bl_allowance_take(&server->lanes[lane].allowance, calls_per_s, request->method)) {
        server->stat.quota_call_count++;
        status = -BL_ERROR_QUOTA;
    } else if (request->flags & BL_MESSAGE_BULK) {
        status = bl_bulk_take(server, lane, request, &call);
    } else if (request->size > BL_MESSAGE_INLINE_SIZE) {
        status = -BL_ERROR_BAD_REQUEST;
    }
    if (status == 0 &&
        (request->method >= BL_METHOD_COUNT || !server->handlers[request->method].run))
        status = -BL_ERROR_NO_METHOD;
    if (status == 0) {
        status = server->handlers[request->method].run(server->handlers[request->method].context,
                                                       &call);
        if (call.reply_size > call.reply_capacity)
            status = -BL_ERROR_HANDLER, call.reply_size = 0;
    }
    if (server->lanes[lane].job)
        bl_trace_undo(&server->trace);
    else
        bl_call_answer(server, &call, status, reply);
}

/* Send the first ready replies to a lane's next requests. */
static void bl_lane_reply(bl_server *server, uint32_t number, uint32_t ready)
{
    const bl_memory *memory = &server->pool->memory;
    bl_lane *lane = &server->lanes[number];
    uint64_t key = bl_message_key(lane->nonce, server->epoch);
    bl_crash_point("serve.handled");
    for (uint32_t i = 0; i < ready; i++) /* in a separate pass from filling the lines: see
                                          * bl_lane_send() */
        bl_message_seal(&server->replies[i], lane->next + i, key);
    bl_fence_store(memory); /* entries, extents and bulk bytes are in memory before a reply
                             * refers to them */
    bl_crash_point("serve.fenced");
    bl_crash_line("serve.line", memory,
                  bl_reply_offset(&server->pool->geometry, number, server->half,
                                  bl_server_slot(server, lane->next)),
                  &server->replies[0]);
    for (uint32_t i = 0; i < ready; i++)
        bl_stream_line(memory,
                       bl_reply_offset(&server->pool->geometry, number, server->half,
                                       bl_server_slot(server, lane->next + i)),
                       &server->replies[i]); /* SYNC lane.reply: pairs with bl_lane_take() */
    bl_crash_point("serve.replies_streamed");
    bl_fence_store(memory); /* in memory now, because a client waits */
    bl_crash_point("serve.replied");
    lane->next += ready;
    lane->call_count += ready;
}

/* Do the work that the last handler deferred. */
static void bl_server_catch_up(bl_server *server)
{
    if (!server->deferred)
        return;
    server->deferred = 0;
    server->hooks.deferred(server->hooks.context);
}

/* Serve the requests that bl_lane_gather() found. A request that becomes a job ends the turn: the
 * requests after it in the lane are read again when it is answered. */
static void bl_lane_answer(bl_server *server, uint32_t number, bl_work turn)
{
    bl_lane *lane = &server->lanes[number];
    uint32_t ready = 0;
    if (server->quota.calls_per_s)
        bl_allowance_fill(&lane->allowance, server->quota.calls_per_s,
                          bl_now_ns(&server->pool->memory));
    bl_trace_found(&server->trace);
    while (ready < turn.requests && !lane->job) {
        bl_server_catch_up(server); /* with the request before, here or in a turn that a fault
                                     * ended */
        bl_server_handle(server, number, &server->requests[ready], &server->replies[ready]);
        ready += !lane->job;
    }
    bl_lane_reply(server, number, ready);
    bl_server_catch_up(server);
    server->done.requests += ready + !!lane->job; /* a request that became a job also counts as
                                                   * work */
    server->done.keys += turn.keys;
    lane->answered = server->done;
}

/* Send the reply of a call that a thread has handled. Returns 1, or 0 if it is not done yet. */
static uint64_t bl_lane_finish(bl_server *server, uint32_t number)
{
    bl_lane *lane = &server->lanes[number];
    bl_job *job = bl_job_done(server, lane);
    if (job == NULL)
        return 0;
    bl_call call = {
        .reply = job->bytes,
        .request_size = job->request_size,
        .reply_size = job->reply_size,
        .lane = number,
        .method = BL_METHOD_FUNCTION,
    };
    server->trace.ticks = job->ticks; /* the trace shows the time from the request to the reply */
    bl_call_begin(server, number, BL_METHOD_FUNCTION, job->request_size);
    bl_call_answer(server, &call, job->status, &server->replies[0]);
    bl_lane_reply(server, number, 1);
    bl_job_end(server, lane);
    return 1;
}

/* Record the work done for other lanes since this lane may have started to wait: its request had
 * not arrived when its last turn ended, or when the previous round started. */
static void bl_lane_waited(bl_server *server, const bl_lane *lane, bl_work turn)
{
    bl_work since = lane->answered;
    bl_work_raise(&since, server->round[0].requests, server->round[0].keys);
    bl_work_raise(&server->most_waited, server->done.requests - since.requests,
                  server->done.keys - since.keys);
    bl_work_raise(&server->most_taken, turn.requests, turn.keys);
}

/* Serve one lane. Returns the number of requests that were taken or answered. */
static uint64_t bl_lane_turn(bl_server *server, uint32_t number)
{
    bl_lane *lane = &server->lanes[number];
    if (lane->job)
        return bl_lane_finish(server, number);
    bl_work turn = bl_lane_gather(server, number);
    if (turn.requests == 0)
        return 0;
    bl_crash_point("serve.gathered");
    bl_lane_waited(server, lane, turn);
    bl_lane_answer(server, number, turn);
    return turn.requests;
}

/* Invalidate the lines that this round polls. */
static void bl_round_refetch(const bl_server *server, uint64_t hosts)
{
    const bl_memory *memory = &server->pool->memory;
    for (; hosts != 0; hosts &= hosts - 1)
        bl_invalidate(memory, bl_doorbell_offset((uint32_t)__builtin_ctzll(hosts)), BL_LINE_SIZE);
    for (uint32_t i = 0; i < server->busy_count; i++) {
        uint32_t number = server->live[i];
        const bl_lane *lane = &server->lanes[number];
        for (uint32_t k = 0; k < lane->window; k++)
            bl_invalidate(memory, bl_server_request_offset(server, number, lane->next + k),
                          BL_LINE_SIZE);
    }
    bl_fence_full(memory); /* the loads that follow must not be older than the invalidations */
}

uint32_t bl_server_round(bl_server *server)
{
    const bl_memory *memory = &server->pool->memory;
    uint64_t hosts = bl_doorbell_due(server);
    uint32_t kept_count = 0, served_count = 0;
    uint64_t before = server->done.requests;
    server->round[0] = server->round[1];
    server->round[1] = server->done;
    if (server->round[0].requests != before && server->live_count > 1)
        bl_fence_full(memory); /* the reads are not older than the turns before: rpc/quantum.h */
    bl_round_refetch(server, hosts);
    if (bl_doorbell_look(server, hosts))
        bl_round_refetch(server, 0); /* a lane is loaded after its doorbell */
    for (uint32_t i = 0; i < server->busy_count; i++) {
        uint32_t number = server->live[i];
        if (bl_lane_turn(server, number))
            server->served[served_count++] = number;
        else
            server->live[kept_count++] = number;
    }
    bl_quantum_order(server->live, kept_count, server->served, served_count);
    return (uint32_t)(server->done.requests - before);
}

/* Return how long to sleep: a client that called a short time ago is likely to call again soon. */
static uint64_t bl_idle_nap_ns(const bl_server *server, uint64_t idle_ns)
{
    uint64_t most_ns = server->pool->one_host ? BL_IDLE_ALONE_NS : BL_IDLE_NAP_NS;
    if (idle_ns < BL_IDLE_YIELD_NS)
        return 0;
    return bl_min(idle_ns / BL_IDLE_NAP_PART, server->sleeper ? most_ns : BL_IDLE_POLL_NS);
}

/* Rest after idle_ns without work. Returns 1 if the server was woken and must poll its lanes at
 * once, else 0. */
static int bl_server_rest(bl_server *server, uint64_t idle_ns)
{
    const bl_memory *memory = &server->pool->memory;
    uint64_t nap_ns = bl_idle_nap_ns(server, idle_ns);
    bl_doorbell_hasten(server);
    if (nap_ns == 0 && !bl_core_taken(&server->core, bl_now_ns(memory))) {
        bl_core_yield(memory, &server->core);
        return 0;
    }
    nap_ns = bl_max(nap_ns, BL_WAIT_NAP_NS);
    if (!server->sleeper) {
        bl_nap(memory, nap_ns);
        return 0;
    }
    if (!bl_sleeper_announced(server->sleeper)) {
        bl_announce(memory, server->sleeper);
        bl_crash_point("serve.announced");
        server->housekeeping_ns = 0; /* poll the lobby, too, before the sleep */
        return 0;
    }
    return bl_sleeper_wait(memory, server->sleeper,
                           server->pidfds ? bl_pidfds_descriptor(server->pidfds) : -1, nap_ns);
}

/* If a device fault at this offset is in a lane that was not broken before, mark the lane as broken
 * and return 1; else return 0. */
static int bl_lane_breaks(bl_server *server, uint64_t offset)
{
    const bl_geometry *g = &server->pool->geometry;
    if (offset < g->lane_offset || offset - g->lane_offset >= g->lane_count * g->lane_stride)
        return 0;
    bl_lane *lane = &server->lanes[(offset - g->lane_offset) / g->lane_stride];
    int news = !lane->broken;
    lane->broken = 1;
    return news;
}

/* Recover from a fault in the middle of a round: list the live lanes again, and end the sessions of
 * those that broke. Returns 0, or -BL_ERROR_DEPOSED. */
static int bl_server_mend(bl_server *server)
{
    int status = 0;
    server->live_count = server->busy_count = 0;
    server->quiet_hosts = 0;
    for (uint32_t i = 0; i < server->pool->geometry.lane_count; i++)
        if (server->lanes[i].state == BL_SESSION_LIVE)
            bl_doorbell_add(server, i);
    for (uint32_t i = 0; i < server->pool->geometry.lane_count && status == 0; i++)
        if (server->lanes[i].state == BL_SESSION_LIVE && server->lanes[i].broken)
            status = bl_housekeeping_end(server, i, BL_END_SUSPECT);
    return status;
}

static int bl_server_loop(void *context)
{
    bl_server *server = context;
    const bl_memory *memory = &server->pool->memory;
    int mended = bl_server_mend(server);
    if (mended < 0)
        return mended;
    uint64_t busy_ns = bl_now_ns(memory), now = busy_ns;
    uint32_t rounds = 0, busy = 0;
    while (!bl_shared_load(&server->stop)) {
        uint32_t served = bl_server_round(server);
        uint64_t idle_ns = now - busy_ns;
        busy |= served;
        if (server->core.crowded && served == 0)
            bl_core_yield(memory, &server->core);
        if (busy == 0 && idle_ns >= BL_IDLE_SPIN_NS) {
            if (bl_server_rest(server, idle_ns)) {
                bl_sleeper_rise(server->sleeper);
                busy_ns = now = bl_now_ns(memory);
                continue;
            }
        } else if (++rounds % BL_ROUNDS_PER_CLOCK) {
            continue; /* the clock and the housekeeping wait while there is work */
        }
        now = bl_now_ns(memory);
        bl_guard_look(); /* this region lasts as long as the server */
        if (busy > 0) {
            busy_ns = now;
            if (server->sleeper)
                bl_sleeper_rise(server->sleeper); /* the work arrived without a ring */
        }
        busy = 0;
        int status = bl_housekeeping_keep(server, now);
        if (status < 0)
            return status;
    }
    return 0;
}

/* A server that no longer serves stops its heartbeat; otherwise clients would wait, and no standby
 * would take over. */
int bl_server_run(bl_server *server)
{
    const bl_memory *memory = &server->pool->memory;
    int status;
    do
        status = bl_guarded(memory, bl_server_loop, server);
    while (bl_is_fault(status) && bl_lane_breaks(server, bl_guard_offset(memory)));
    bl_heartbeat_stop(&server->heartbeat);
    return status;
}

void bl_server_stop(bl_server *server)
{
    bl_shared_store(&server->stop, 1);
    bl_jobs_wake(server);
    bl_server_wake(server);
}

int bl_server_handle_method(bl_server *server, uint32_t method, bl_handler handler, void *context)
{
    if (method >= BL_METHOD_COUNT)
        return -EINVAL;
    server->handlers[method].context = context;
    bl_store_fence_now(); /* the poll loop may run: it must not see a handler without its context */
    server->handlers[method].run = handler;
    return 0;
}

int bl_echo_handler(void *context, bl_call *call)
{
    (void)context;
    if (call->request_size > call->reply_capacity)
        return -BL_ERROR_BAD_REQUEST;
    memcpy(call->reply, call->request, call->request_size);
    call->reply_size = call->request_size;
    return 0;
}

void bl_server_describe(const bl_server *server, bl_server_stat *out)
{
    *out = server->stat;
    out->call_count = server->done.requests;
    out->key_count = server->done.keys;
    out->quantum_request_max = server->most_taken.requests;
    out->quantum_key_max = server->most_taken.keys;
    out->wait_request_max = server->most_waited.requests;
    out->wait_key_max = server->most_waited.keys;
    out->epoch = server->epoch;
    out->live_count = server->live_count;
    out->inherited_count = server->inherited_count;
    out->watched_count = server->pidfds ? bl_pidfds_count(server->pidfds) : 0;
}
