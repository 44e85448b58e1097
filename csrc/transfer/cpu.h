/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The copy engine of the CPU, which executes a plan (api/transfer.h) with one thread or several.
 */
#ifndef BL_CPU_H
#define BL_CPU_H

#include "api/transfer.h"
#include "coherence/memory.h"
#include "iosched/throttle.h"

enum { BL_PARTS_PER_THREAD = 4 };   /* limits the delay by a slow thread to a quarter of its work */

/* Returns the given settings, or the default ones. Sizes below a line become a line: with a size of
 * 0 a copy would not advance. */
bl_copy_settings bl_copy_settings_of(const bl_copy_settings *given);

/* Execute a plan. Returns 0; -EINVAL if it is invalid; -EBADMSG if a read's checksum differs;
 * -ENOMEM; -BL_ERROR_DEVICE_FAULT; or -ECANCELED if the throttle was stopped. A write does not
 * fence for this thread: one bl_fence_store covers a batch. With a throttle, each byte is admitted
 * before it is copied; if one thread copies, its throttle stays open. */
int bl_plan_execute(const bl_memory *memory, const bl_plan *plan,
                    const bl_copy_settings *settings, int write, bl_throttle *throttle);

#endif
