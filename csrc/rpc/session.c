/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Makes sessions, calls through them, and closes them. This file alone decides, for every kind of
 * call, what happens when the server is replaced or does not reply.
 *
 * A call is applied once by one server, however long its reply takes. If the server ends the
 * session before it reads a call, the next session sends the call again, at once. If the server is
 * replaced meanwhile, a single call is sent again to the new one, which has no record of the old
 * one's unanswered calls: handlers must allow for that (D10 describes how the block calls do).
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "coherence/crash_point.h"
#include "coherence/guard.h"
#include "rpc/session_state.h"

enum {
    BL_DETACH_TIMEOUT_NS = 200 * 1000 * 1000,
    /* A copy waits at most a second for its link (iosched/throttle.c). Space that is still written
     * after this time stays taken until the process ends. */
    BL_WRITERS_TIMEOUT_NS = 2 * 1000 * 1000 * 1000LL,
    BL_WRITERS_NAP_NS = 50 * 1000
};

int bl_session_open(const bl_pool *pool, const char *directory, uint32_t host, uint64_t timeout_ns,
                    bl_session **out)
{
    if (host >= BL_HOST_COUNT || strlen(directory) >= BL_PATH_SIZE)
        return -EINVAL;
    bl_session *session = calloc(1, sizeof *session);
    if (session == NULL)
        return -ENOMEM;
    session->pool = pool;
    session->host = host;
    session->liveness_lock = -1;
    bl_mutex_init(&session->lock);
    bl_mutex_init(&session->writers_lock);
    *out = session; /* before the attachment: a child forked during it finds the session's lock */
    strcpy(session->directory, directory);
    session->parent = mmap(NULL, BL_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                           -1, 0);
    session->scratch = malloc(2 * (size_t)pool->geometry.bulk_size);
    int status = session->parent == MAP_FAILED || session->scratch == NULL ? -ENOMEM : 0;
    if (status == 0 && madvise(session->parent, BL_PAGE_SIZE, MADV_WIPEONFORK) < 0)
        status = -errno;
    if (status == 0) {
        *session->parent = 1;
        status = bl_boot_id(&pool->memory, session->boot_id);
    }
    if (status == 0)
        status = bl_lobby_attach(session, timeout_ns);
    if (status < 0) {
        *out = NULL;
        bl_session_free(session);
    }
    return status;
}

int bl_session_end(bl_session *session, uint64_t timeout_ns)
{
    const bl_memory *memory = &session->pool->memory;
    uint64_t until_ns = bl_now_ns(memory) + timeout_ns;
    if (*session->parent == 0)
        return 1;
    if (!bl_lock_for(memory, &session->lock, timeout_ns))
        return 0;
    session->closed = 1;
    bl_unlock(memory, &session->lock);
    while (bl_shared_load(&session->users) > 0) {
        if (bl_now_ns(memory) >= until_ns)
            return 0;
        bl_nap(memory, BL_WRITERS_NAP_NS);
    }
    bl_lock(memory, &session->lock); /* a put or get made its last call before */
    if (session->attached)
        bl_lobby_detach(session, BL_DETACH_TIMEOUT_NS);
    session->attached = 0;
    bl_unlock(memory, &session->lock);
    return 1;
}

void bl_session_free(bl_session *session)
{
    bl_waker_close(&session->waker);
    if (session->parent != MAP_FAILED)
        munmap(session->parent, BL_PAGE_SIZE);
    bl_mutex_destroy(&session->lock);
    bl_mutex_destroy(&session->writers_lock);
    free(session->scratch);
    free(session);
}

int bl_session_lock(bl_session *session)
{
    if (*session->parent == 0) /* the lock may be that of a thread of the parent */
        return -BL_ERROR_FORKED;
    bl_lock(&session->pool->memory, &session->lock);
    if (!session->closed)
        return 0;
    bl_unlock(&session->pool->memory, &session->lock);
    return -BL_ERROR_CLOSED;
}

void bl_session_unlock(bl_session *session)
{
    bl_unlock(&session->pool->memory, &session->lock);
}

int bl_session_use(bl_session *session, bl_attachment *now)
{
    int status = bl_session_lock(session);
    if (status < 0)
        return status;
    bl_shared_add(&session->users, 1);
    if (now != NULL)
        *now = bl_session_attachment(session);
    bl_session_unlock(session);
    return 0;
}

void bl_session_unuse(bl_session *session)
{
    bl_shared_add(&session->users, UINT64_MAX);
}

/* Add to the number of writers. Returns it. */
static uint32_t bl_session_writers(bl_session *session, uint32_t more)
{
    const bl_memory *memory = &session->pool->memory;
    bl_lock(memory, &session->writers_lock);
    uint32_t writers = session->writers += more;
    bl_unlock(memory, &session->writers_lock);
    return writers;
}

int bl_session_write(bl_session *session, uint64_t nonce)
{
    bl_lock(&session->pool->memory, &session->lock);
    int held = session->attached && session->nonce == nonce;
    if (held)
        bl_session_writers(session, 1);
    bl_session_unlock(session);
    return held ? 0 : -BL_ERROR_SESSION_LOST;
}

void bl_session_written(bl_session *session)
{
    bl_session_writers(session, UINT32_MAX);
}

int bl_session_holds(bl_session *session, uint64_t nonce)
{
    bl_lock(&session->pool->memory, &session->lock);
    int held = session->attached && session->nonce == nonce;
    bl_session_unlock(session);
    return held;
}

void bl_session_forked(bl_session *session)
{
    if (session->liveness_lock >= 0)
        close(session->liveness_lock); /* the child's copy would keep the lock held */
}

int bl_session_describe(bl_session *session, bl_session_stat *out)
{
    *out = (bl_session_stat){0};
    int status = bl_session_lock(session);
    if (status < 0)
        return status;
    *out = session->stat;
    out->epoch = session->epoch;
    out->lane = session->lane;
    out->nonce = session->nonce;
    bl_session_unlock(session);
    return 0;
}

/* Attach the session, if it is not attached. Returns 0 or an error. */
static int bl_session_ready(bl_session *session, uint64_t timeout_ns)
{
    return session->attached ? 0 : bl_lobby_attach(session, timeout_ns);
}

/* Abandon the nonce: its grants and pins end when this process is proven gone. */
static void bl_session_abandon(bl_session *session)
{
    bl_heartbeat_stop(&session->heartbeat); /* one per session: the next nonce starts another */
    session->old_nonce = 0;
    session->attached = 0; /* the lock's descriptor stays open: only this process's end frees it */
    session->stat.reattach_count++;
}

/* Wait until no other thread copies into space granted to the nonce. Returns 0 after a while. */
static int bl_session_quiet(bl_session *session)
{
    const bl_memory *memory = &session->pool->memory;
    uint64_t until_ns = bl_now_ns(memory) + BL_WRITERS_TIMEOUT_NS;
    while (bl_session_writers(session, 0) > 0) {
        if (bl_now_ns(memory) >= until_ns)
            return 0;
        bl_nap(memory, BL_WRITERS_NAP_NS);
    }
    return 1;
}

/* Publish in the heartbeat line that the nonce has ended, for the next server; a call that attaches
 * under a new nonce also reports this, and does not wait until the server reads heartbeats. */
static void bl_session_drop(bl_session *session)
{
    if (!bl_session_quiet(session)) {
        bl_session_abandon(session);
        return;
    }
    bl_heartbeat_end(&session->heartbeat);
    bl_crash_point("drop.silent");
    bl_session_rest(session);
    bl_liveness_end(&session->pool->memory, session->directory, session->nonce,
                    session->liveness_lock, 0);
    session->liveness_lock = -1;
    bl_crash_point("drop.liveness_ended");
    session->old_nonce = session->nonce;
    session->attached = 0;
    session->stat.reattach_count++;
}

int bl_session_devices(bl_session *session)
{
    int status = bl_session_lock(session);
    if (status < 0)
        return status;
    if (!session->devices && session->attached)
        status = bl_liveness_devices(&session->pool->memory, session->liveness_lock, 1);
    if (status == 0)
        session->devices = 1; /* also for the sessions that follow this one */
    bl_session_unlock(session);
    return status;
}

void bl_session_leave(bl_session *session, uint64_t nonce)
{
    bl_lock(&session->pool->memory, &session->lock);
    if (session->attached && session->nonce == nonce)
        bl_session_abandon(session);
    bl_session_unlock(session);
}

typedef struct bl_session_task {
    bl_session *session;
    const bl_message *message;  /* for a call */
    const bl_pump *pump;        /* for a pump */
    uint64_t timeout_ns;
} bl_session_task;

/* Run a call. A request that was in flight when a device failed may still be answered, so this
 * nonce must not be used any more. */
static int bl_session_run(bl_session *session, bl_guarded_run run, bl_session_task *task)
{
    int status = bl_guarded(&session->pool->memory, run, task);
    if (bl_is_fault(status) && session->attached)
        bl_session_drop(session);
    return status;
}

static int bl_session_attempt(void *context)
{
    bl_session_task *task = context;
    bl_session *session = task->session;
    const bl_message *message = task->message;
    const bl_memory *memory = &session->pool->memory;
    bl_wait wait = bl_wait_make(memory, task->timeout_ns);
    for (;;) {
        int status = bl_session_ready(session, bl_wait_left_ns(memory, &wait));
        if (status == 0)
            status = bl_lane_call(session, message, &wait);
        if (status != -BL_ERROR_SESSION_LOST && status != -BL_ERROR_DEPOSED &&
            status != -BL_ERROR_TIMEOUT) {
            session->stat.call_count++;
            return status;
        }
        if (session->attached)
            bl_session_drop(session); /* a late reply must not be taken for that of a later call */
        if (status == -BL_ERROR_TIMEOUT || bl_wait_left_ns(memory, &wait) == 0)
            return -BL_ERROR_TIMEOUT;
    }
}

int bl_session_call_locked(bl_session *session, const bl_message *message, uint64_t timeout_ns)
{
    bl_session_task task = {.session = session, .message = message, .timeout_ns = timeout_ns};
    return bl_session_run(session, bl_session_attempt, &task);
}

int bl_session_call(bl_session *session, const bl_message *message, uint64_t timeout_ns)
{
    int status = bl_session_lock(session);
    if (status < 0)
        return status;
    status = bl_session_call_locked(session, message, timeout_ns);
    bl_session_unlock(session);
    return status;
}

int64_t bl_session_call_bytes(bl_session *session, uint32_t method, const uint8_t *request,
                              uint32_t request_size, uint8_t *reply, uint32_t reply_capacity,
                              uint64_t timeout_ns)
{
    uint32_t size = 0;
    bl_message message = {
        .method = method,
        .request = request,
        .request_size = request_size,
        .reply = reply,
        .reply_capacity = reply_capacity,
        .reply_size = &size,
    };
    int status = bl_session_call(session, &message, timeout_ns);
    return status < 0 ? status : (int64_t)size;
}

static int bl_session_pump_all(void *context)
{
    const bl_session_task *task = context;
    bl_session *session = task->session;
    const bl_pump *pump = task->pump;
    uint64_t timeout_ns = task->timeout_ns;
    const bl_memory *memory = &session->pool->memory;
    uint32_t slots = session->pool->geometry.slot_count;
    uint32_t depth = pump->depth < slots ? pump->depth : slots;
    uint64_t sent = 0, done = 0, now = 0;
    bl_reply replies[BL_WINDOW_MAX];
    if (depth == 0 || pump->size > BL_MESSAGE_INLINE_SIZE)
        return -EINVAL;
    int status = bl_session_ready(session, timeout_ns), worst = 0;
    if (status < 0)
        return status;
    while (done < pump->count) {
        uint64_t room = depth - (sent - done), rest = pump->count - sent;
        uint32_t batch = (uint32_t)(rest < room ? rest : room);
        if (pump->latencies_ns)
            now = bl_now_ns(memory);
        for (uint32_t i = 0; pump->latencies_ns && i < batch; i++)
            pump->latencies_ns[sent + i] = now;
        if (batch > 0) {
            bl_lane_send(session, pump->method, 0, pump->requests + sent * pump->size, pump->size,
                         batch);
            bl_fence_store(memory); /* one fence for the batch */
            sent += batch;
        }
        bl_wait wait = bl_wait_make(memory, timeout_ns);
        int taken = bl_lane_wait(session, replies, BL_WINDOW_MAX, &wait);
        if (taken <= 0) {
            bl_session_drop(session);
            return taken == 0 ? -BL_ERROR_SESSION_LOST : taken;
        }
        if (pump->latencies_ns)
            now = bl_now_ns(memory);
        for (int i = 0; i < taken; i++, done++) {
            if (replies[i].status < 0)
                worst = replies[i].status;
            if (pump->latencies_ns)
                pump->latencies_ns[done] = now - pump->latencies_ns[done];
            if (pump->replies)
                memcpy(pump->replies + done * pump->size, replies[i].payload, pump->size);
        }
    }
    session->stat.call_count += done;
    return worst;
}

int bl_session_pump(bl_session *session, const bl_pump *pump, uint64_t timeout_ns)
{
    bl_session_task task = {.session = session, .pump = pump, .timeout_ns = timeout_ns};
    int status = bl_session_lock(session);
    if (status < 0)
        return status;
    status = bl_session_run(session, bl_session_pump_all, &task);
    bl_session_unlock(session);
    return status;
}
