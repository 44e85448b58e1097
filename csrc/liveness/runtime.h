/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Checks that the processes of this host share a runtime directory. Liveness locks, other locks and
 * sockets lie there, and lines that a host writes rely on its locks. Two processes of one host with
 * different directories (other users, containers) could write such a line at the same time, and
 * could prove nothing about each other. The second process is rejected.
 */
#ifndef BL_RUNTIME_H
#define BL_RUNTIME_H

#include "pool/epoch.h"
#include "liveness/lock.h"
#include "pool/boot.h"

/* Return 1 if the server of this epoch line is a process of this boot that has no liveness lock in
 * this directory. A server's lock exists before its line is TAKING, and is removed after its line
 * is STOPPED or a successor's. So an unchanged line without a lock belongs to a server that has
 * another directory (or this one was emptied). */
static inline int bl_runtime_elsewhere(const bl_pool *pool, const char *directory,
                                       const uint64_t boot_id[2], const bl_epoch_line *line)
{
    bl_epoch_line again;
    if (line->epoch == 0 || bl_epoch_last_word(line) || !bl_boot_same(line->boot_id, boot_id) ||
        bl_liveness_known(&pool->memory, directory, line->nonce))
        return 0;
    return bl_epoch_line_read(pool, line->epoch % BL_HALF_COUNT, &again) == 1 &&
           memcmp(&again, line, sizeof again) == 0;
}

#endif
