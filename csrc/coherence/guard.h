/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Guarded regions, in which a failing device is an error and does not end the process. An access to
 * a poisoned, unplugged or truncated device raises SIGBUS. Inside a guarded region, the region then
 * ends with an error, and the process continues.
 *
 * A fault leaves a region in the middle of its work. So a region holds no lock and no resource that
 * only its end releases: regions enclose the copy of a block, a call, a heartbeat, the poll loop.
 * They nest; a fault ends the innermost region of the thread. A SIGBUS at an address outside of the
 * region's pool goes to the handler that was installed before. A region costs about ten
 * nanoseconds, plus a system call every 100 us.
 */
#ifndef BL_GUARD_H
#define BL_GUARD_H

#include "api/error.h"
#include "coherence/memory.h"

typedef int (*bl_guarded_run)(void *context);

/* Execute run in a guarded region. Returns its result; -BL_ERROR_DEVICE_FAULT; or -BL_ERROR_NO_ROOM
 * if a page of a sparse file is missing and its file system has no memory for it: the device is
 * sound, and the access works when there is room again. */
int bl_guarded(const bl_memory *memory, bl_guarded_run run, void *context);

/* Return 1 if a region ended with a fault of either kind. */
static inline int bl_is_fault(int status)
{
    return status == -BL_ERROR_DEVICE_FAULT || status == -BL_ERROR_NO_ROOM;
}

/* Return which of the two errors a fault at this address is. */
int bl_fault_judge(const bl_memory *memory, const void *address);

/* Check whether another handler has been installed. Entering a region does this; a long-lived
 * region must call it. */
void bl_guard_look(void);

/* Return the pool offset of the access that ended this thread's last region with a fault, or
 * UINT64_MAX if it lay outside of the linear range. */
uint64_t bl_guard_offset(const bl_memory *memory);

/* bl_guard_address() returns the same as an address of this process. bl_guard_adopt() records a
 * fault of a helper thread that worked for this thread as this thread's own. */
const void *bl_guard_address(void);
void bl_guard_adopt(const void *address);

#endif
