/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The removal log: why keys were removed from the index, for display (`beluga explain`).
 */
#ifndef BL_INDEX_REMOVAL_LOG_H
#define BL_INDEX_REMOVAL_LOG_H

#include "index/state.h"

int bl_removal_log_create(bl_index *index);
void bl_removal_log_destroy(bl_index *index);

/* Prefetch the slot of a key that is about to be removed. */
void bl_removal_log_prefetch(const bl_index *index, const uint64_t key[2]);

/* Record why a key was removed from the index. */
void bl_removal_log_add(bl_index *index, const uint64_t key[2], enum bl_removal_reason why);
int bl_handle_removal_reasons(void *index, bl_call *call);

#endif
