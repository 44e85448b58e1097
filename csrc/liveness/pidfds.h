/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Proof of death at once: a process of the server's host shows itself over a Unix socket in the
 * runtime directory before it asks for a lane, and the server holds a pidfd of it from then on.
 *
 *   client: connect, send its nonce --> server: the peer's pidfd, from the kernel --> its end
 *
 * The kernel names the peer of a connection, in whatever pid namespace it lives; a pid is never
 * read from the pool. The pidfd stands beside the lock file (liveness/lock.h), which a successor
 * needs and which says the same a little later: whichever says gone, is believed. The lock alone
 * can be kept by a child that was forked past all hooks; the pidfd alone ends with its server.
 * Nothing here waits: without a socket, or a kernel that helps, the lock file is the liveness lock,
 * and for a session that has devices the process that the file names.
 */
#ifndef BL_PIDFDS_H
#define BL_PIDFDS_H

#include "coherence/coherence.h"

typedef struct bl_pidfds bl_pidfds;

/* Watch over those who show themselves to the server that nonce names, count_max at a time: 0, or
 * -errno that passes. out is NULL where nobody can: no sockets in that directory. The socket's file
 * goes with the server's proof (bl_liveness_end). */
int bl_pidfds_open(const bl_memory *memory, const char *directory, uint64_t nonce,
                 uint32_t count_max, bl_pidfds **out);

/* Watch no more. In a forked child, too: its copies are the parent's. */
void bl_pidfds_close(bl_pidfds *pidfds);

/* Meet who has shown itself. The nonce of one whose process has ended, each once, or 0. Who cannot
 * be met for want of descriptors waits until there are some: the kernel keeps what it said. */
uint64_t bl_pidfds_look(bl_pidfds *pidfds);

/* A session ended: nobody watches over it any more. */
void bl_pidfds_forget(bl_pidfds *pidfds, uint64_t nonce);

/* Processes that a pidfd is held of. */
uint32_t bl_pidfds_count(const bl_pidfds *pidfds);

/* Show this process, as the session nonce, to the server that server_nonce names, if that runs on
 * this host. Before it asks for a lane. */
void bl_pidfds_show(const bl_memory *memory, const char *directory, uint64_t server_nonce,
                  uint64_t nonce);

#endif
