/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The thread pool (transfer/thread_pool.h). Each running thread takes the next item, so a thread
 * that wakes up late, or shares its core, delays the job by at most one item.
 */
#include "transfer/thread_pool.h"

#include "coherence/coherence.h"
#include "coherence/guard.h"

typedef struct bl_thread_pool_job {
    bl_thread_pool_work work;
    void *context;
    uint64_t count;
    uint64_t next;              /* the next item; shared */
    uint32_t workers;           /* workers that have joined */
    int status;
    const void *fault;          /* the pool offset of a fault, if that is the status */
} bl_thread_pool_job;

/* Take items until none is left. Returns 0, or the first error. */
static int bl_thread_pool_share(bl_thread_pool_job *job, uint32_t worker)
{
    int status = 0;
    for (uint64_t item; status == 0 && (item = bl_shared_add(&job->next, 1)) < job->count;)
        status = job->work(job->context, (uint32_t)item, worker);
    if (status < 0)
        bl_shared_store(&job->next, job->count);
    return status;
}

#ifdef BL_SIM

int bl_thread_pool_run(uint32_t threads, uint32_t count, bl_thread_pool_work work, void *context)
{
    bl_thread_pool_job job = {.work = work, .context = context, .count = count};
    (void)threads;
    return bl_thread_pool_share(&job, 0);
}

#else

#include <sched.h>

#include "base/minmax.h"
#include "base/thread.h"

/* Waking a thread takes as long as copying 200 KB. So a thread that waits for the next job, or for
 * the last item of this one, spins before it sleeps. */
enum { BL_THREAD_POOL_LOOK_NS = 50 * 1000 };

typedef struct bl_thread_pool_state {
    pthread_mutex_t lock;       /* protects all that follows */
    pthread_cond_t wanted;      /* signaled when a job can be joined */
    pthread_cond_t left;        /* signaled when no worker is active */
    bl_thread_pool_job *job;    /* or NULL */
    uint64_t worker_count;      /* threads of the thread pool */
    uint64_t openings;          /* workers that may still join; also read without the lock */
    uint64_t active;            /* workers that joined and are not done; also read without the
                                 * lock */
} bl_thread_pool_state;

#define BL_THREAD_POOL_NEW                                                                         \
    {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0, 0}

/* Spin, for a limited time, until a word is 0 (wanted 0) or not 0 (wanted 1). */
static void bl_thread_pool_look(const uint64_t *word, int wanted)
{
    uint64_t until = bl_now_ns(NULL) + BL_THREAD_POOL_LOOK_NS;
    while ((bl_shared_load(word) != 0) != wanted && bl_now_ns(NULL) < until)
        bl_pause(NULL);
}

static bl_thread_pool_state bl_thread_pool = BL_THREAD_POOL_NEW;
static cpu_set_t bl_thread_pool_cpus;

/* Workers may run on all cores of the process. The set is read at load time, because an engine may
 * pin the calling thread to one core later. */
__attribute__((constructor)) static void bl_thread_pool_find_cpus(void)
{
    sched_getaffinity(0, sizeof bl_thread_pool_cpus, &bl_thread_pool_cpus);
}

static pthread_once_t bl_thread_pool_once = PTHREAD_ONCE_INIT;

/* The parent's threads do not exist in the child, so its state is reset. */
static void bl_thread_pool_forked(void)
{
    bl_thread_pool = (bl_thread_pool_state)BL_THREAD_POOL_NEW;
}

static void bl_thread_pool_watch_forks(void) { pthread_atfork(NULL, NULL, bl_thread_pool_forked); }

static void *bl_thread_pool_worker(void *argument)
{
    (void)argument;
    pthread_mutex_lock(&bl_thread_pool.lock);
    for (;;) {
        while (bl_thread_pool.openings == 0)
            pthread_cond_wait(&bl_thread_pool.wanted, &bl_thread_pool.lock);
        bl_thread_pool_job *job = bl_thread_pool.job;
        uint32_t worker = ++job->workers;
        bl_shared_store(&bl_thread_pool.active, bl_thread_pool.active + 1);
        bl_shared_store(&bl_thread_pool.openings, bl_thread_pool.openings - 1);
        pthread_mutex_unlock(&bl_thread_pool.lock);
        int status = bl_thread_pool_share(job, worker);
        bl_store_fence_now(); /* the caller's fence does not cover what this thread streamed */
        pthread_mutex_lock(&bl_thread_pool.lock);
        if (status < 0 && job->status == 0)
            job->status = status, job->fault = bl_guard_address();
        bl_shared_store(&bl_thread_pool.active, bl_thread_pool.active - 1);
        if (bl_thread_pool.active == 0)
            pthread_cond_signal(&bl_thread_pool.left);
        pthread_mutex_unlock(&bl_thread_pool.lock);
        bl_thread_pool_look(&bl_thread_pool.openings, 1);
        pthread_mutex_lock(&bl_thread_pool.lock);
    }
    return NULL;
}

/* Start threads until there are count, or until the system refuses one. The caller holds the
 * lock. */
static void bl_thread_pool_hire(uint32_t count)
{
    for (pthread_t worker; bl_thread_pool.worker_count < count; bl_thread_pool.worker_count++) {
        if (bl_thread_start(&worker, bl_thread_pool_worker, NULL) < 0)
            break;
        pthread_setname_np(worker, "beluga-copy");
        pthread_setaffinity_np(worker, sizeof bl_thread_pool_cpus, &bl_thread_pool_cpus);
        pthread_detach(worker);
    }
}

/* Offer a job to the thread pool. Returns 0 if it has one already. */
static int bl_thread_pool_offer(bl_thread_pool_job *job, uint32_t wanted)
{
    pthread_once(&bl_thread_pool_once, bl_thread_pool_watch_forks);
    pthread_mutex_lock(&bl_thread_pool.lock);
    int offered = bl_thread_pool.job == NULL;
    if (offered) {
        if (bl_thread_pool.worker_count < wanted)
            bl_thread_pool_hire(wanted);
        bl_thread_pool.job = job;
        bl_shared_store(&bl_thread_pool.openings, bl_min(wanted, bl_thread_pool.worker_count));
        pthread_cond_broadcast(&bl_thread_pool.wanted);
    }
    pthread_mutex_unlock(&bl_thread_pool.lock);
    return offered;
}

/* Close the job to further workers, and wait for those that have joined. */
static void bl_thread_pool_dismiss(void)
{
    pthread_mutex_lock(&bl_thread_pool.lock);
    bl_shared_store(&bl_thread_pool.openings, 0);
    pthread_mutex_unlock(&bl_thread_pool.lock);
    bl_thread_pool_look(&bl_thread_pool.active, 0);
    pthread_mutex_lock(&bl_thread_pool.lock);
    while (bl_thread_pool.active > 0)
        pthread_cond_wait(&bl_thread_pool.left, &bl_thread_pool.lock);
    bl_thread_pool.job = NULL;
    pthread_mutex_unlock(&bl_thread_pool.lock);
}

int bl_thread_pool_run(uint32_t threads, uint32_t count, bl_thread_pool_work work, void *context)
{
    bl_thread_pool_job job = {.work = work, .context = context, .count = count};
    uint32_t wanted = threads < count ? threads : count;
    wanted = wanted == 0 ? 0 : wanted - 1 < BL_THREAD_POOL_MAX ? wanted - 1 : BL_THREAD_POOL_MAX;
    int offered = wanted > 0 && bl_thread_pool_offer(&job, wanted);
    int status = bl_thread_pool_share(&job, 0);
    if (offered)
        bl_thread_pool_dismiss();
    if (status == 0 && job.status < 0) {
        status = job.status;
        bl_guard_adopt(job.fault);
    }
    return status;
}

#endif
