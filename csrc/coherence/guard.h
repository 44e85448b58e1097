/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Guarded regions, in which a failing device is an error and does not end the process. A device
 * that is poisoned, unplugged or cut short answers an access with SIGBUS; inside a guarded region
 * the region ends with an error, and the process lives.
 *
 * A region is left in the middle of its work, so regions are drawn where nothing is held that only
 * their end would give back: around the copy of a block, a call, a heartbeat, the poll loop. They
 * nest; the innermost region of the thread ends. A SIGBUS from outside of the region's pool goes to
 * the handler that was there before. A region costs some ten nanoseconds, and a system call every
 * 100 us.
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

/* Did a region end with a fault, of either kind? */
static inline int bl_is_fault(int status)
{
    return status == -BL_ERROR_DEVICE_FAULT || status == -BL_ERROR_NO_ROOM;
}

/* Judge a fault of an access to this address: which of the two errors it is. */
int bl_fault_judge(const bl_memory *memory, const void *address);

/* Check whether another handler has been installed. Entering a region does this; a region that
 * lasts must call it. */
void bl_guard_look(void);

/* Return the pool offset of the access that ended this thread's last region with a fault, or
 * UINT64_MAX if it lay outside of the linear range. */
uint64_t bl_guard_offset(const bl_memory *memory);

/* Return the same as an address of this process; and note a fault that a helper thread met in this
 * thread's work, as if this thread had met it. */
const void *bl_guard_address(void);
void bl_guard_adopt(const void *address);

#endif
