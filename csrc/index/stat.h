/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Statistics of the block index, for callers in the process and for the call of clients.
 */
#ifndef BL_INDEX_STAT_H
#define BL_INDEX_STAT_H

#include "index/state.h"

int bl_handle_stat(void *index, bl_call *call);

#endif
