/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A device that is poisoned, unplugged or cut short answers an access with SIGBUS. Inside a guarded
 * region that is an error of the region, and the process lives.
 *
 * What a region does is left off in the middle, so regions are drawn where nothing is held that
 * only their end would give back: around the copy of a block, a call, a heartbeat, the poll loop.
 * They nest; the innermost of the thread ends. A SIGBUS that is not of the region's pool goes to
 * whoever handled it before. A region costs some ten nanoseconds, and a system call every 100 us.
 */
#ifndef BL_GUARD_H
#define BL_GUARD_H

#include "coherence/memory.h"

typedef int (*bl_guarded_run)(void *context);

/* What run returns, or -BL_ERROR_DEVICE_FAULT. */
int bl_guarded(const bl_memory *memory, bl_guarded_run run, void *context);

/* Has another handler been installed meanwhile? For a region that lasts: entering one does it. */
void bl_guard_look(void);

/* Where in the pool the access was that ended this thread's last region so; UINT64_MAX: outside of
 * the linear range. */
uint64_t bl_guard_offset(const bl_memory *memory);

/* The same as an address of this process; and: a thread that worked for this one met a fault there,
 * as if this one had. */
const void *bl_guard_address(void);
void bl_guard_adopt(const void *address);

#endif
