/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The copy engine of the CPU: executes a plan (api/transfer.h) by one thread or several.
 */
#ifndef BL_CPU_H
#define BL_CPU_H

#include "api/transfer.h"
#include "coherence/memory.h"
#include "iosched/throttle.h"

enum { BL_PARTS_PER_THREAD = 4 };   /* so that a slow one is waited for a quarter of its time */

/* What was given, or the default; none at a time, which would have no end, is a line at a time. */
bl_copy_settings bl_copy_settings_of(const bl_copy_settings *given);

/* A plan: 0, -EINVAL: it is none, -EBADMSG: a read's checksum differs, -ENOMEM or
 * -BL_ERROR_DEVICE_FAULT. A write does not fence for this thread: one bl_fence_store covers a
 * batch. With a throttle the bytes are paid for (-ECANCELED); one thread leaves it open. */
int bl_plan_execute(const bl_memory *memory, const bl_plan *plan,
                    const bl_copy_settings *settings, int write, bl_throttle *throttle);

#endif
