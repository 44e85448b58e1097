/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Liveness locks: which processes of this host are alive, and which are proven gone (D7).
 *
 * A session or a server holds a lock on a file of its own name in the pool's runtime directory for
 * as long as its process can write to the pool. The kernel drops the lock when the process has
 * died, after its memory is gone: getting the lock proves that the process is gone. Unlike a pidfd,
 * the file outlives the server that watches it, so a successor can use it, too; and it is found by
 * nonce, never by a pid read from the pool. Without the file (another host, another mount
 * namespace) nothing is proven, and silence leads to quarantine only.
 *
 * A lock that is free is no proof while a device may write for the process: the kernel closes a
 * dying process's files one after another, and the device's may come after the lock's. A session
 * whose payload a device writes says so in its file (bl_liveness_devices), with the number of its
 * process, and is gone when that process is (see bl_liveness_process_ended). The file is there for
 * a successor of the server, too.
 *
 * A forked child shares the lock and gives its copy up at fork (bl_session_forked). The simulator
 * has its own body (sim/liveness.c).
 */
#ifndef BL_LIVENESS_H
#define BL_LIVENESS_H

#include <errno.h>

#include "coherence/coherence.h"

/* Does this error pass, because this process or machine is out of descriptors or memory? Then
 * nothing is known of what was asked for, and the caller asks again. */
static inline int bl_error_passes(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS ||
           error == ENOSPC;
}

enum { BL_PATH_SIZE = 4096 };

/* Hold the liveness lock of nonce: a descriptor, or -errno. */
int bl_liveness_hold(const bl_memory *memory, const char *directory, uint64_t nonce);

/* Does this directory have the liveness lock of this nonce, held or not? 0: it has not; else 1. */
int bl_liveness_known(const bl_memory *memory, const char *directory, uint64_t nonce);

/* Watch another process's liveness lock: a descriptor, or -ENOENT (nothing can be proven here), or
 * -errno: see bl_error_passes(). */
int bl_liveness_watch(const bl_memory *memory, const char *directory, uint64_t nonce);

/* Return 1 once the watched process is gone for good, with what its devices do for it; 0 before. */
int bl_liveness_gone(const bl_memory *memory, int descriptor);

/* Note in a held liveness lock that from now on a device may write to the pool for this process
 * (1), or that none may any more (0): 0 or -errno. Call it before the device's first write, and
 * after its last. */
int bl_liveness_devices(const bl_memory *memory, int descriptor, int may_write);

/* May a device have written for a watched process until that ended? 1 or 0. */
int bl_liveness_has_devices(const bl_memory *memory, int descriptor);

/* End a watch or a hold. remove: nobody needs this liveness lock any more. */
void bl_liveness_end(const bl_memory *memory, const char *directory, uint64_t nonce, int descriptor,
                     int remove);

/* List nonces whose process is gone and whose liveness lock is still there, at most count_max:
 * their number, or -errno. Nobody may need them any more: see bl_housekeeping_sweep(). */
int bl_liveness_left(const bl_memory *memory, const char *directory, uint64_t *nonces,
                     uint32_t count_max);

/* Take a lock among the processes of this host: a descriptor, or -EAGAIN (another process has it),
 * or -errno. */
int bl_host_lock(const bl_memory *memory, const char *directory, const char *name);
void bl_host_unlock(const bl_memory *memory, int descriptor);

/* Read the boot id, which names this start of the operating system. */
int bl_boot_id(const bl_memory *memory, uint64_t boot_id[2]);

/* Return a number that nobody else has: random, never zero. */
uint64_t bl_new_nonce(const bl_memory *memory);

#endif
