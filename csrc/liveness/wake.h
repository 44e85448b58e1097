/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Waking a server that sleeps because it has no work (D18). Any process of its host can wake it at
 * once. Processes of other hosts cannot; the server polls for their requests.
 *
 *   server                               caller, on the same host
 *   announce: word = 1                   stream the request
 *   full fence, of the next round        full fence, of the first poll for the reply
 *   poll lanes and lobby: no request     word == 1: ring the bell
 *   sleep until the bell rings, or for a time
 *
 * Each side writes before it reads, with a full fence between. So at least one of them reads what
 * the other wrote: the server finds the request, or the caller finds the word set. The bell is a
 * FIFO: it keeps a ring that arrives before the server sleeps, and a ring for a server that has
 * died is lost with it.
 *
 * While the server is awake, a call costs its caller one load of a word that is not written. Word
 * and bell are files of the runtime directory, with the server's nonce in their names: only
 * processes of this host reach them, and servers do not share them. Callers may read the word, and
 * only the server may write it. Where these files cannot be made, the server polls for the requests
 * of its own host, too.
 */
#ifndef BL_WAKE_H
#define BL_WAKE_H

#include "base/host_atomic.h"
#include "coherence/coherence.h"

/* The server's side. */
typedef struct bl_sleeper bl_sleeper;

/* Make the word and the bell of the server with this nonce: 0, or -errno if a later attempt may
 * succeed (bl_error_passes). *out is NULL where they cannot be made. bl_liveness_end() removes the
 * files. */
int bl_sleeper_open(const bl_memory *memory, const char *directory, uint64_t nonce,
                    bl_sleeper **out);

/* A forked child calls this, too, because its descriptors belong to the parent. */
void bl_sleeper_close(bl_sleeper *sleeper);

/* Return 1 from bl_announce() to bl_sleeper_rise(), else 0. */
int bl_sleeper_announced(const bl_sleeper *sleeper);

/* The body of the verb bl_announce: from now on callers ring. The server polls everything once more
 * before it sleeps. */
void bl_sleeper_announce(bl_sleeper *sleeper);

/* The server is awake: callers need not ring. */
void bl_sleeper_rise(bl_sleeper *sleeper);

/* Sleep until the bell rings, the descriptor also (or -1) is readable, or ns nanoseconds have
 * passed. Returns 1 if the server was woken, 0 after ns. Call it after bl_announce() and a complete
 * poll. */
int bl_sleeper_wait(const bl_memory *memory, bl_sleeper *sleeper, int also, uint64_t ns);

/* Ring from another thread of the server's process, after a change that its loop must see. Safe in
 * a signal handler. */
void bl_sleeper_wake(const bl_sleeper *sleeper);

/* The caller's side. */
typedef struct bl_waker {
    const uint64_t *word;       /* NULL: this process cannot wake the server */
    uint64_t nonce;             /* of the server */
} bl_waker;

/* Open the word of the server with this nonce; the word of an earlier server is closed. */
void bl_waker_open(const bl_memory *memory, const char *directory, uint64_t nonce,
                   bl_waker *waker);
void bl_waker_close(bl_waker *waker);

/* Return 1 if the server sleeps or is about to. A full fence separates the caller's request and
 * this load. */
static inline int bl_waker_asleep(const bl_waker *waker)
{
    return waker->word != NULL && bl_host_load(waker->word) != 0;
}

/* The body of the verb bl_wake. */
void bl_waker_ring(const char *directory, const bl_waker *waker);

#endif
