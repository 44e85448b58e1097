/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What clients say of the worth of blocks: a level, and for how long it holds after the last use. A
 * hint bends the order of eviction inside the share of the block's tenant, and nothing else. The
 * blocks of a level have an order of their own, by age.
 *
 * A hint ends with its time, with the session that gave it, with the block and with the server; the
 * last hint of a block counts. The levels that keep blocks longer have a budget in each share, and
 * each session may have so many hints: what exceeds that is refused. A block whose hint has run out
 * is the coldest of its share. While there was no hint, none of this has any memory.
 */
#ifndef BL_HINTS_H
#define BL_HINTS_H

#include "index/blocks.h"

/* While there was no hint, only bl_handle_hint() and bl_hints_destroy() may be called. */

/* Forget the hint of a block that leaves the index. */
void bl_hint_forget(bl_meta *meta, uint32_t number);

/* Note that blocks were used: hits of a lookup. */
void bl_hint_used(bl_meta *meta, uint32_t number, uint64_t now_ns);

/* End hints whose time is over, at most some of them. */
void bl_hints_expire(bl_meta *meta);

/* End the hints of a session that ended. */
void bl_hints_lane_gone(bl_meta *meta, uint32_t lane);
void bl_hints_destroy(bl_meta *meta);
int bl_handle_hint(void *meta, bl_call *call);

#endif
