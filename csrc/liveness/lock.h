/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Liveness locks: they show which processes of this host are alive, and which are proven gone (D7).
 *
 * A session or a server holds a lock on a file of its own name in the pool's runtime directory for
 * as long as its process can write to the pool. The kernel releases the lock when the process has
 * died, after its memory is gone: getting the lock proves that the process is gone. Unlike a pidfd,
 * the file outlives the server that watches it, so a successor can use it, too; and its name is the
 * nonce, never a pid read from the pool. Without the file (another host, another mount namespace)
 * nothing is proven, and a stopped heartbeat leads to quarantine only.
 *
 * A lock that is free is no proof while a device may write for the process: the kernel closes a
 * dying process's files one after another, and the device's may come after the lock's. A session
 * whose payload a device writes records this in its file (bl_liveness_devices), with its pid, and
 * is gone when that process is (see bl_liveness_process_ended). A successor of the server can read
 * the file, too.
 *
 * A forked child shares the lock and closes its copy at fork (bl_session_forked). The simulator has
 * its own body (tests/sim/native/liveness.c).
 */
#ifndef BL_LIVENESS_H
#define BL_LIVENESS_H

#include <errno.h>

#include "coherence/coherence.h"

/* Return 1 if this error is temporary: this process or machine is out of descriptors or memory.
 * Then the state is unknown, and the caller retries. */
static inline int bl_error_passes(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS ||
           error == ENOSPC;
}

enum { BL_PATH_SIZE = 4096 };

/* The files of a server next to its liveness lock, which are removed with it. Each name has the
 * server's nonce. */
#define BL_LIVENESS_SOCKET "pidfds"    /* see liveness/pidfds.h */
#define BL_LIVENESS_ASLEEP "asleep"    /* the word of liveness/wake.h */
#define BL_LIVENESS_BELL "bell"        /* the bell of liveness/wake.h */

/* Hold the liveness lock of nonce. Returns a descriptor, or -errno. */
int bl_liveness_hold(const bl_memory *memory, const char *directory, uint64_t nonce);

/* Return 1 if this directory has the liveness lock of this nonce, held or not, else 0. */
int bl_liveness_known(const bl_memory *memory, const char *directory, uint64_t nonce);

/* Watch another process's liveness lock. Returns a descriptor; -ENOENT (nothing can be proven
 * here); or -errno: see bl_error_passes(). */
int bl_liveness_watch(const bl_memory *memory, const char *directory, uint64_t nonce);

/* Return 1 once the watched process has ended, and the DMA of its devices; 0 before. */
int bl_liveness_gone(const bl_memory *memory, int descriptor);

/* Record in a held liveness lock that from now on a device may write to the pool for this process
 * (1), or that none may any more (0). Returns 0 or -errno. Call it before the device's first write,
 * and after its last. */
int bl_liveness_devices(const bl_memory *memory, int descriptor, int may_write);

/* Return 1 if a device may have written for a watched process until its end, else 0. */
int bl_liveness_has_devices(const bl_memory *memory, int descriptor);

/* End a watch or a hold. remove: also delete the file, which is not needed any more. */
void bl_liveness_end(const bl_memory *memory, const char *directory, uint64_t nonce, int descriptor,
                     int remove);

/* List nonces whose process is gone and whose liveness lock still exists, at most count_max.
 * Returns their number, or -errno. They may be obsolete: see bl_housekeeping_sweep(). */
int bl_liveness_left(const bl_memory *memory, const char *directory, uint64_t *nonces,
                     uint32_t count_max);

/* Take a lock among the processes of this host. Returns a descriptor, -EAGAIN (another process has
 * it), or -errno. */
int bl_host_lock(const bl_memory *memory, const char *directory, const char *name);
void bl_host_unlock(const bl_memory *memory, int descriptor);

/* Read the boot id, which identifies this boot of the operating system. */
int bl_boot_id(const bl_memory *memory, uint64_t boot_id[2]);

/* Return a unique number: random, never zero. */
uint64_t bl_new_nonce(const bl_memory *memory);

#endif
