/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Jobs: calls that threads of the server's process answer (rpc/jobs.h). Nothing here touches the
 * pool.
 */
#include "rpc/jobs.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/host_atomic.h"

/* Return a copy of bytes, padded to whole lines, or NULL. */
static uint8_t *bl_job_bytes(const uint8_t *bytes, uint32_t size)
{
    uint64_t lines = (uint64_t)size / BL_LINE_SIZE + 1;
    uint8_t *copy = malloc(lines * BL_LINE_SIZE);
    if (copy != NULL && size > 0)
        memcpy(copy, bytes, size);
    return copy;
}

static void bl_job_clear(bl_job *job)
{
    free(job->bytes);
    job->bytes = NULL;
    bl_host_store(&job->state, BL_JOB_FREE);
}

/* Return a free job, or NULL. */
static bl_job *bl_job_free(bl_jobs *jobs)
{
    for (uint32_t i = 0; i < jobs->count; i++) {
        jobs->last = jobs->last + 1 < jobs->count ? jobs->last + 1 : 0;
        if (bl_host_load(&jobs->list[jobs->last].state) == BL_JOB_FREE)
            return &jobs->list[jobs->last];
    }
    return NULL;
}

/* The status is used only if the lane has no job afterward. */
int bl_function_handler(void *context, bl_call *call)
{
    bl_server *server = context;
    bl_jobs *jobs = server->jobs;
    bl_lane *lane = &server->lanes[call->lane];
    bl_job *job = bl_job_free(jobs);
    uint8_t *bytes = job != NULL ? bl_job_bytes(call->request, call->request_size) : NULL;
    if (bytes == NULL)
        return -ENOMEM;
    bl_host_store(&job->ticket, ++jobs->posted);
    job->nonce = lane->nonce;
    job->ticks = server->trace.ticks;
    job->bytes = bytes;
    job->request_size = call->request_size;
    job->lane = call->lane;
    bl_host_store(&job->state, BL_JOB_WAITING);
    lane->job = (uint32_t)(job - jobs->list) + 1;
    (void)!write(jobs->wake, &(uint64_t){1}, sizeof(uint64_t));
    return 0;
}

bl_job *bl_job_done(const bl_server *server, const bl_lane *lane)
{
    bl_job *job = &server->jobs->list[lane->job - 1];
    return bl_host_load(&job->state) == BL_JOB_DONE ? job : NULL;
}

void bl_job_end(const bl_server *server, bl_lane *lane)
{
    if (lane->job == 0)
        return;
    bl_job *job = &server->jobs->list[lane->job - 1];
    lane->job = 0;
    if (bl_host_swap(&job->state, BL_JOB_RUNNING, BL_JOB_DROPPED))
        return; /* the job's thread clears it */
    if (bl_host_swap(&job->state, BL_JOB_WAITING, BL_JOB_DONE)) { /* no thread takes it from now
                                                                   * on */
        bl_job_clear(job);
        return;
    }
    /* the job was taken or finished between the two swaps */
    if (!bl_host_swap(&job->state, BL_JOB_RUNNING, BL_JOB_DROPPED))
        bl_job_clear(job);
}

void bl_jobs_session_ended(const bl_server *server, uint32_t number)
{
    if (server->jobs == NULL)
        return;
    bl_host_store(&server->jobs->ended[number], server->lanes[number].nonce);
    (void)!write(server->jobs->wake, &(uint64_t){1}, sizeof(uint64_t));
}

/* Take the report of a session's end. Returns whether there was one. */
static int bl_jobs_take_ended(const bl_server *server, bl_function_call *out)
{
    for (uint32_t number = 0; number < server->pool->geometry.lane_count; number++) {
        uint64_t *ended = &server->jobs->ended[number];
        uint64_t nonce = bl_host_load(ended);
        if (nonce != 0 && bl_host_swap(ended, nonce, 0)) {
            *out = (bl_function_call){.nonce = nonce, .lane = number};
            return 1;
        }
    }
    return 0;
}

/* Take the oldest waiting job, or return NULL. */
static bl_job *bl_job_oldest(bl_jobs *jobs)
{
    for (;;) {
        bl_job *oldest = NULL;
        for (uint32_t i = 0; i < jobs->count; i++) {
            bl_job *job = &jobs->list[i];
            if (bl_host_load(&job->state) == BL_JOB_WAITING &&
                (oldest == NULL || bl_host_load(&job->ticket) < bl_host_load(&oldest->ticket)))
                oldest = job;
        }
        if (oldest == NULL || bl_host_swap(&oldest->state, BL_JOB_WAITING, BL_JOB_RUNNING))
            return oldest;
    }
}

int bl_function_open(bl_server *server)
{
    if (server->jobs != NULL)
        return 0;
    uint32_t count = server->pool->geometry.lane_count + BL_FUNCTION_THREADS_MAX;
    bl_jobs *jobs = calloc(1, sizeof *jobs + count * sizeof *jobs->list +
                                  server->pool->geometry.lane_count * sizeof *jobs->ended);
    if (jobs == NULL)
        return -ENOMEM;
    jobs->count = count;
    jobs->ended = (uint64_t *)&jobs->list[count];
    jobs->wake = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    if (jobs->wake < 0) {
        int error = errno;
        free(jobs);
        return -error;
    }
    server->jobs = jobs;
    return 0;
}

int bl_function_take(bl_server *server, bl_function_call *out)
{
    bl_jobs *jobs = server->jobs;
    for (;;) {
        uint64_t one;
        if (bl_host_load(&server->stop))
            return 0;
        if (read(jobs->wake, &one, sizeof one) != (ssize_t)sizeof one && errno != EINTR)
            return -errno;
        bl_job *job = bl_job_oldest(jobs);
        if (job == NULL && bl_jobs_take_ended(server, out))
            return 2;
        if (job == NULL)
            continue; /* the job's session has ended, or the server stops */
        *out = (bl_function_call){
            .request = job->bytes,
            .nonce = job->nonce,
            .request_size = job->request_size,
            .lane = job->lane,
            .number = (uint32_t)(job - jobs->list),
        };
        return 1;
    }
}

int bl_function_answer(bl_server *server, uint32_t number, const uint8_t *reply, uint32_t size,
                       int32_t status)
{
    bl_jobs *jobs = server->jobs;
    if (number >= jobs->count || size > server->pool->geometry.bulk_size)
        return -EINVAL;
    bl_job *job = &jobs->list[number];
    uint8_t *bytes = bl_job_bytes(reply, size);
    free(job->bytes);
    job->bytes = bytes;
    job->reply_size = bytes != NULL ? size : 0;
    job->status = bytes != NULL ? status : -ENOMEM;
    if (bl_host_swap(&job->state, BL_JOB_RUNNING, BL_JOB_DONE)) {
        bl_server_wake(server);
        return 0;
    }
    bl_job_clear(job); /* the caller is gone */
    return 0;
}

void bl_jobs_wake(const bl_server *server)
{
    if (server->jobs != NULL)
        (void)!write(server->jobs->wake, &(uint64_t){BL_FUNCTION_THREADS_MAX}, sizeof(uint64_t));
}

void bl_jobs_forked(const bl_server *server)
{
    if (server->jobs != NULL)
        close(server->jobs->wake);
}

void bl_jobs_free(bl_server *server)
{
    if (server->jobs == NULL)
        return;
    for (uint32_t i = 0; i < server->jobs->count; i++)
        free(server->jobs->list[i].bytes);
    close(server->jobs->wake);
    free(server->jobs);
}
