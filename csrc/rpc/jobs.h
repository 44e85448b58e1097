/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Calls that threads of the server's process answer. The poll loop takes such a call, copies its
 * request into a job, and continues with other lanes. A thread takes the job, runs the function of
 * a program, and stores the reply, which the poll loop sends in a later round. So a slow function
 * delays only its caller, and the loop never waits for a lock.
 *
 *   FREE --post, loop--> WAITING --take, thread--> RUNNING --answer, thread--> DONE --sent--> FREE
 *   the session ends meanwhile: WAITING, DONE --loop--> FREE;
 *                               RUNNING --loop--> DROPPED --answer, thread--> FREE
 *
 * A lane has at most one job, and its later requests wait for it: replies are in order. So there
 * are never more jobs than lanes and threads together, and as many are made at the start.
 */
#ifndef BL_JOBS_H
#define BL_JOBS_H

#include "rpc/server_state.h"

enum bl_job_state {
    BL_JOB_FREE = 0,
    BL_JOB_WAITING = 1,
    BL_JOB_RUNNING = 2,
    BL_JOB_DONE = 3,
    BL_JOB_DROPPED = 4
};

typedef struct bl_job {
    uint64_t state;             /* shared; the other fields belong to its owner: see above */
    uint64_t ticket;            /* the oldest job is taken first */
    uint64_t nonce;             /* of the session */
    uint64_t ticks;             /* when the request was found in its lane */
    uint8_t *bytes;             /* of the request, then of the reply; whole lines */
    uint32_t request_size;
    uint32_t reply_size;
    uint32_t lane;
    int32_t status;
} bl_job;

typedef struct bl_jobs {
    uint64_t posted;            /* tickets issued */
    uint32_t count;
    uint32_t last;              /* index of the last free job found */
    uint64_t *ended;            /* shared, by lane: the nonce of a session that ended, until a
                                 * thread takes it; or 0 */
    int wake;                   /* an eventfd that counts the waiting jobs and ended sessions */
    bl_job list[];
} bl_jobs;

/* Return the lane's job if it is done, else NULL. */
bl_job *bl_job_done(const bl_server *server, const bl_lane *lane);

/* End the lane's job: its reply was sent, or its session has ended. */
void bl_job_end(const bl_server *server, bl_lane *lane);

/* Report the end of the lane's session to a thread, which drops what it stores for it. */
void bl_jobs_session_ended(const bl_server *server, uint32_t number);

/* Wake every thread that waits for a job; a signal handler may call it. */
void bl_jobs_wake(const bl_server *server);

/* Close a forked child's copies of the parent's descriptors. */
void bl_jobs_forked(const bl_server *server);

void bl_jobs_free(bl_server *server);

#endif
