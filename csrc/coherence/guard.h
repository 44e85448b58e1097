/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Guarded regions, in which a device failure is an error instead of the end of the process. An
 * access to a poisoned, unplugged or truncated device raises SIGBUS; within a guarded region, the
 * region then ends with an error, and the process continues.
 *
 * A fault leaves a region at any instruction. So a region must not hold a lock or a resource that
 * only its end would release. Regions enclose the copy of a block, a call, a heartbeat, and the
 * poll loop. They nest; a fault ends the innermost region of the thread. A SIGBUS at an address
 * outside of the region's pool is passed to the previously installed handler. A region costs about
 * ten nanoseconds, plus a system call every 100 us.
 */
#ifndef BL_GUARD_H
#define BL_GUARD_H

#include "api/error.h"
#include "coherence/memory.h"

typedef int (*bl_guarded_run)(void *context);

/* Execute run in a guarded region. Returns its result; -BL_ERROR_DEVICE_FAULT; or -BL_ERROR_NO_ROOM
 * if the file system could not allocate a page of a sparse file: the device is sound, and the
 * access succeeds once there is room. */
int bl_guarded(const bl_memory *memory, bl_guarded_run run, void *context);

/* Return 1 if status is a fault of either kind. */
static inline int bl_is_fault(int status)
{
    return status == -BL_ERROR_DEVICE_FAULT || status == -BL_ERROR_NO_ROOM;
}

/* Return which of the two errors a fault at this address means. */
int bl_fault_judge(const bl_memory *memory, const void *address);

/* Check whether another handler was installed. Entering a region does this; a long-lived region
 * must call it regularly. */
void bl_guard_look(void);

/* Return the pool offset of this thread's last fault, or UINT64_MAX if it was outside of the linear
 * range. */
uint64_t bl_guard_offset(const bl_memory *memory);

/* bl_guard_address() returns the address of that fault in this process. bl_guard_adopt() records
 * the fault of a helper thread as this thread's own. */
const void *bl_guard_address(void);
void bl_guard_adopt(const void *address);

#endif
