/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Who is alive on this host, and who is proven gone (D7).
 *
 * A session or a server holds a lock on a file of its own name in the pool's runtime directory for
 * as long as its process can write to the pool. The kernel drops the lock when the process has
 * died, after its memory is gone: whoever gets the lock has the proof. Unlike a pidfd, the file
 * outlives the server that watches it, so a successor finds the proof too; and it is looked for by
 * nonce, never by a pid read from the pool. Without the file (another host, another mount
 * namespace) nothing is proven, and silence leads to quarantine only.
 *
 * A forked child shares the lock: it gives its copy up at fork (bl_session_forked). The simulator
 * has its own body (sim_world.c).
 */
#ifndef BL_PROOF_H
#define BL_PROOF_H

#include "coherence.h"

enum { BL_PATH_SIZE = 4096 };

/* Hold the proof of life of nonce: a descriptor, or -errno. */
int bl_proof_hold(const bl_memory *memory, const char *directory, uint64_t nonce);

/* Watch somebody else's: a descriptor, or -ENOENT (nothing can be proven here), or -errno. */
int bl_proof_watch(const bl_memory *memory, const char *directory, uint64_t nonce);

/* 1 once the watched process is gone for good, 0 before. */
int bl_proof_gone(const bl_memory *memory, int descriptor);

/* End a watch or a hold. remove: nobody needs this proof any more. */
void bl_proof_end(const bl_memory *memory, const char *directory, uint64_t nonce, int descriptor,
                  int remove);

/* Nonces whose process is gone and whose proof is still there, at most count_max: their number, or
 * -errno. Nobody may need them any more: see bl_house_sweep(). */
int bl_proof_left(const bl_memory *memory, const char *directory, uint64_t *nonces,
                  uint32_t count_max);

/* A lock among the processes of this host: a descriptor, or -EAGAIN (somebody has it), or
 * -errno. */
int bl_host_lock(const bl_memory *memory, const char *directory, const char *name);
void bl_host_unlock(const bl_memory *memory, int descriptor);

/* Who this operating system is, since it started. */
int bl_boot_id(const bl_memory *memory, uint64_t boot_id[2]);

/* A number nobody else has: random, never zero. */
uint64_t bl_new_nonce(const bl_memory *memory);

#endif
