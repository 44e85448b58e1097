/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The crew: see transfer/crew.h. Whoever is awake takes the next item, so one that wakes up late,
 * or shares its core, costs nobody more than an item's time.
 */
#include "transfer/crew.h"

#include "coherence/coherence.h"
#include "coherence/guard.h"

typedef struct bl_crew_job {
    bl_crew_work work;
    void *context;
    uint64_t count;
    uint64_t next;              /* item; shared */
    uint32_t hands;             /* that have joined */
    int status;
    const void *fault;          /* where, if the status is of a fault */
} bl_crew_job;

/* Take items until there are none: 0, or the first error. */
static int bl_crew_share(bl_crew_job *job, uint32_t hand)
{
    int status = 0;
    for (uint64_t item; status == 0 && (item = bl_shared_add(&job->next, 1)) < job->count;)
        status = job->work(job->context, (uint32_t)item, hand);
    if (status < 0)
        bl_shared_store(&job->next, job->count);
    return status;
}

#ifdef BL_SIM

int bl_crew_run(uint32_t threads, uint32_t count, bl_crew_work work, void *context)
{
    bl_crew_job job = {.work = work, .context = context, .count = count};
    (void)threads;
    return bl_crew_share(&job, 0);
}

#else

#include <pthread.h>
#include <sched.h>
#include <signal.h>

/* To be woken takes as long as to copy 200 KB. So who waits for the next job, or for the last item
 * of this one, looks for a moment before it sleeps. */
enum { BL_CREW_LOOK_NS = 50 * 1000 };

typedef struct bl_crew_state {
    pthread_mutex_t lock;       /* of all that follows */
    pthread_cond_t wanted;      /* there are seats */
    pthread_cond_t left;        /* nobody is active */
    bl_crew_job *job;           /* or NULL */
    uint64_t hand_count;        /* threads of the crew */
    uint64_t seats;             /* that may still join the job; looked at without the lock too */
    uint64_t active;            /* that did, and are not done; likewise */
} bl_crew_state;

#define BL_CREW_NEW                                                                                \
    {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0, 0}

/* Look at a word until it is 0, or is not (wanted), for a moment. */
static void bl_crew_look(const uint64_t *word, int wanted)
{
    uint64_t until = bl_now_ns(NULL) + BL_CREW_LOOK_NS;
    while ((bl_shared_load(word) != 0) != wanted && bl_now_ns(NULL) < until)
        bl_pause(NULL);
}

static bl_crew_state bl_crew = BL_CREW_NEW;
static cpu_set_t bl_crew_cpus;

/* What the process may use: an engine ties the thread that asks for help to a core later on. */
__attribute__((constructor)) static void bl_crew_find_cpus(void)
{
    sched_getaffinity(0, sizeof bl_crew_cpus, &bl_crew_cpus);
}

static pthread_once_t bl_crew_once = PTHREAD_ONCE_INIT;

/* The parent's threads are not in the child, whatever they were doing. */
static void bl_crew_forked(void) { bl_crew = (bl_crew_state)BL_CREW_NEW; }

static void bl_crew_watch_forks(void) { pthread_atfork(NULL, NULL, bl_crew_forked); }

static void *bl_crew_hand(void *argument)
{
    (void)argument;
    pthread_mutex_lock(&bl_crew.lock);
    for (;;) {
        while (bl_crew.seats == 0)
            pthread_cond_wait(&bl_crew.wanted, &bl_crew.lock);
        bl_crew_job *job = bl_crew.job;
        uint32_t hand = ++job->hands;
        bl_shared_store(&bl_crew.active, bl_crew.active + 1);
        bl_shared_store(&bl_crew.seats, bl_crew.seats - 1);
        pthread_mutex_unlock(&bl_crew.lock);
        int status = bl_crew_share(job, hand);
        bl_store_fence_now(); /* the caller's fence does not cover what this thread streamed */
        pthread_mutex_lock(&bl_crew.lock);
        if (status < 0 && job->status == 0)
            job->status = status, job->fault = bl_guard_address();
        bl_shared_store(&bl_crew.active, bl_crew.active - 1);
        if (bl_crew.active == 0)
            pthread_cond_signal(&bl_crew.left);
        pthread_mutex_unlock(&bl_crew.lock);
        bl_crew_look(&bl_crew.seats, 1);
        pthread_mutex_lock(&bl_crew.lock);
    }
    return NULL;
}

/* Under the lock: hire until there are count, as far as the system lets us. Signals are for the
 * threads that were there before; only those that an instruction raises are its own thread's. */
static void bl_crew_hire(uint32_t count)
{
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGBUS), sigdelset(&all, SIGSEGV), sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL), sigdelset(&all, SIGTRAP);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t hand; bl_crew.hand_count < count; bl_crew.hand_count++) {
        if (pthread_create(&hand, NULL, bl_crew_hand, NULL) != 0)
            break;
        pthread_setname_np(hand, "beluga-copy");
        pthread_setaffinity_np(hand, sizeof bl_crew_cpus, &bl_crew_cpus);
        pthread_detach(hand);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Put a job before the crew: 1, or 0 if it has one. */
static int bl_crew_offer(bl_crew_job *job, uint32_t seats)
{
    pthread_once(&bl_crew_once, bl_crew_watch_forks);
    pthread_mutex_lock(&bl_crew.lock);
    int offered = bl_crew.job == NULL;
    if (offered) {
        if (bl_crew.hand_count < seats)
            bl_crew_hire(seats);
        bl_crew.job = job;
        bl_shared_store(&bl_crew.seats, seats < bl_crew.hand_count ? seats : bl_crew.hand_count);
        pthread_cond_broadcast(&bl_crew.wanted);
    }
    pthread_mutex_unlock(&bl_crew.lock);
    return offered;
}

/* Nobody may join any more; wait for those that have. */
static void bl_crew_dismiss(void)
{
    pthread_mutex_lock(&bl_crew.lock);
    bl_shared_store(&bl_crew.seats, 0);
    pthread_mutex_unlock(&bl_crew.lock);
    bl_crew_look(&bl_crew.active, 0);
    pthread_mutex_lock(&bl_crew.lock);
    while (bl_crew.active > 0)
        pthread_cond_wait(&bl_crew.left, &bl_crew.lock);
    bl_crew.job = NULL;
    pthread_mutex_unlock(&bl_crew.lock);
}

int bl_crew_run(uint32_t threads, uint32_t count, bl_crew_work work, void *context)
{
    bl_crew_job job = {.work = work, .context = context, .count = count};
    uint32_t seats = threads < count ? threads : count;
    seats = seats == 0 ? 0 : seats - 1 < BL_CREW_MAX ? seats - 1 : BL_CREW_MAX;
    int offered = seats > 0 && bl_crew_offer(&job, seats);
    int status = bl_crew_share(&job, 0);
    if (offered)
        bl_crew_dismiss();
    if (status == 0 && job.status < 0) {
        status = job.status;
        bl_guard_adopt(job.fault);
    }
    return status;
}

#endif
