/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Retires memory that failed under a copy: it is never granted again.
 */
#ifndef BL_INDEX_RETIRE_H
#define BL_INDEX_RETIRE_H

#include "index/state.h"

int bl_handle_retire(void *index, bl_call *call);

#endif
