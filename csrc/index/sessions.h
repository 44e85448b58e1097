/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Lists sessions for display: their lanes, what each one holds, and quarantined space.
 */
#ifndef BL_INDEX_SESSIONS_H
#define BL_INDEX_SESSIONS_H

#include "index/state.h"

int bl_handle_sessions(void *index, bl_call *call);

#endif
