/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Hints of clients for eviction: a level for a block, and its lifetime after the block's last use.
 * A hint changes the order of eviction inside the share of the block's tenant, and nothing else.
 * The blocks of a level have an order of their own, by age.
 *
 * A hint ends with its time, with the session that gave it, with the block and with the server; the
 * last hint of a block counts. The levels that keep blocks longer have a budget in each share, and
 * each session has a bound on its hints; a hint beyond them is refused. A block whose hint has
 * expired is the coldest of its share. No memory is allocated before the first hint.
 */
#ifndef BL_HINTS_H
#define BL_HINTS_H

#include "index/blocks.h"

/* Before the first hint (meta->hints is NULL) only bl_handle_hint(), bl_hints_view() and
 * bl_hints_destroy() may be called. */

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

/* Note in the view of a share what hints may favor there, and what they do. Any thread may ask. */
void bl_hints_view(const bl_meta *meta, uint32_t share, bl_share_view *out);

#endif
