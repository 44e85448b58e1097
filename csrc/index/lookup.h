/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Handles the calls of readers: lookup, release, remove, stat.
 */
#ifndef BL_INDEX_LOOKUP_H
#define BL_INDEX_LOOKUP_H

#include "index/state.h"

/* Remove count pins of any session. */
void bl_unpin(bl_index *index, uint32_t number, uint32_t count);
int bl_handle_lookup(void *index, bl_call *call);

/* Record the hits of the last lookup in the eviction orders: a hook of the server. */
void bl_lookup_deferred(void *index);

int bl_handle_release(void *index, bl_call *call);
int bl_handle_remove(void *index, bl_call *call);
int bl_handle_removing(void *index, bl_call *call);

#endif
