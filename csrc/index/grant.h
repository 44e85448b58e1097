/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Handles the calls of writers: reserve, commit, abort (D10).
 */
#ifndef BL_INDEX_GRANT_H
#define BL_INDEX_GRANT_H

#include "index/state.h"

/* End a grant without a block: its space becomes free, or held if its writer may still write. */
void bl_grant_end(bl_index *index, uint32_t number, enum bl_end end);
int bl_handle_reserve(void *index, bl_call *call);
int bl_handle_commit(void *index, bl_call *call);
int bl_handle_abort(void *index, bl_call *call);

#endif
