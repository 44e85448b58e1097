/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The server's side of the lower tiers: a directory of the keys that they have, the committed
 * blocks that were not offered to them yet, and the keys that clients request from them.
 */
#ifndef BL_INDEX_LOWER_H
#define BL_INDEX_LOWER_H

#include "index/state.h"

/* Queue a block that was committed, or recovered, to be offered. */
void bl_lower_committed(bl_index *index, uint32_t number);
void bl_lower_recovered(bl_index *index, uint32_t number);

void bl_lower_forget(bl_index *index, uint32_t number);

/* A session has ended: if it was the service's, requeue the work that it had taken. */
void bl_lower_lane_gone(bl_index *index, uint32_t lane);

/* Return the state of a key that the pool does not have: MISS, BELOW, or PENDING. */
uint32_t bl_lower_state(const bl_index *index, const uint64_t key[2]);

/* Cancel the lower tiers' work on a key that is being removed; number is its block, or negative.
 * Its tombstones already exist. */
void bl_lower_remove(bl_index *index, const uint64_t key[2], int64_t number);

/* Announce recovered tombstones to the service. */
void bl_lower_removed(bl_index *index);

/* Return the tiers, as bits, whose first attempt the caller of a removal waits for. */
uint8_t bl_lower_awaited(const bl_index *index, const uint64_t key[2]);

/* Return 1 if the service onboards a key that was removed meanwhile. flags are those of its
 * reserve. */
int bl_lower_unwanted(const bl_index *index, const uint64_t key[2], uint32_t flags);

/* Return the error for a grant without room: status, or -BL_ERROR_OFFLOADING if blocks that wait to
 * be offered will make room. */
int bl_lower_refusal(const bl_index *index, int status);
void bl_lower_destroy(bl_index *index);
int bl_handle_onboard(void *index, bl_call *call);
int bl_handle_tiers(void *index, bl_call *call);
int bl_handle_lower_take(void *index, bl_call *call);
int bl_handle_lower_report(void *index, bl_call *call);

#endif
