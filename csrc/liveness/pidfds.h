/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The pidfd watch, which proves a death at once: a process of the server's host connects to a Unix
 * socket in the runtime directory before it requests a lane, and the server holds a pidfd of it
 * from then on.
 *
 *   client: connect, send its nonce --> server: the peer's pidfd, from the kernel --> its end
 *
 * The kernel identifies the peer of a connection, whatever its pid namespace; a pid is never read
 * from the pool. The pidfd complements the lock file (liveness/lock.h), which a successor needs and
 * which proves the same a little later: the server acts when either proves that the process is
 * gone. A child that was forked past all hooks can keep the lock; a pidfd ends with its server.
 * Nothing here waits: without a socket, or on a kernel without this feature, the lock file is the
 * only proof, and for a session that has devices the process that the file names.
 */
#ifndef BL_PIDFDS_H
#define BL_PIDFDS_H

#include "coherence/coherence.h"

typedef struct bl_pidfds bl_pidfds;

/* Watch processes that connect to the server with this nonce, count_max at a time. Returns 0, or a
 * temporary -errno. out is NULL if that directory supports no sockets. The socket's file is removed
 * with the server's liveness lock (bl_liveness_end). */
int bl_pidfds_open(const bl_memory *memory, const char *directory, uint64_t nonce,
                   uint32_t count_max, bl_pidfds **out);

/* Stop watching. A forked child calls it, too, because its descriptors belong to the parent. */
void bl_pidfds_close(bl_pidfds *pidfds);

/* Accept processes that have connected. Return the nonce of one whose process has ended, each once,
 * or 0. A process that cannot be accepted for lack of descriptors waits until there are some: the
 * kernel buffers its bytes. */
uint64_t bl_pidfds_look(bl_pidfds *pidfds);

/* Return a descriptor that is readable when bl_pidfds_look() has work. Returns -1 while a
 * connection cannot be accepted: the descriptor would stay readable. */
int bl_pidfds_descriptor(const bl_pidfds *pidfds);

/* Stop watching a session that ended. */
void bl_pidfds_forget(bl_pidfds *pidfds, uint64_t nonce);

/* Return the pid of a session's process in this process's namespace; 0: unknown. It is for display
 * only; no decision depends on it. */
uint32_t bl_pidfds_pid(const bl_pidfds *pidfds, uint64_t nonce);

/* Return how many processes are watched by a pidfd. */
uint32_t bl_pidfds_count(const bl_pidfds *pidfds);

/* Connect this process, as the session nonce, to the server with server_nonce, if that runs on this
 * host. Call it before the process requests a lane. */
void bl_pidfds_show(const bl_memory *memory, const char *directory, uint64_t server_nonce,
                    uint64_t nonce);

#endif
