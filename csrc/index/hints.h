/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Eviction hints from clients: a level for a block, and a lifetime after the block's last use. A
 * hint only changes the eviction order within the share of the block's tenant. The blocks of a
 * level are ordered by age.
 *
 * A hint ends when it expires, with the session that gave it, with the block and with the server; a
 * later hint replaces an earlier one. HIGH and PINNED have a budget in each share, and each session
 * has a limit; hints beyond these are refused. A block whose hint has expired is the coldest of its
 * share. No memory is allocated before the first hint.
 */
#ifndef BL_HINTS_H
#define BL_HINTS_H

#include "index/state.h"

/* Before the first hint (index->hints is NULL) only bl_handle_hint(), bl_hints_view() and
 * bl_hints_destroy() may be called. */

/* Drop the hint of a block that is removed from the index. */
void bl_hint_forget(bl_index *index, uint32_t number);

/* Record a hit of a block with a hint. */
void bl_hint_used(bl_index *index, uint32_t number, uint64_t now_ns);

/* Expire some of the hints that are due. */
void bl_hints_expire(bl_index *index);

void bl_hints_lane_gone(bl_index *index, uint32_t lane);
void bl_hints_destroy(bl_index *index);
int bl_handle_hint(void *index, bl_call *call);

/* Fill in the budget of hints and its use in the view of a share. Any thread may call this. */
void bl_hints_view(const bl_index *index, uint32_t share, bl_share_view *out);

#endif
