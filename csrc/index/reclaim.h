/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Makes room for a block (D8, D11): the lowest free run of pages that is long enough, or else the
 * space of the coldest blocks that make such a run.
 */
#ifndef BL_INDEX_RECLAIM_H
#define BL_INDEX_RECLAIM_H

#include "index/state.h"

/* Allocate space for a block of stored bytes. Returns 0, -BL_ERROR_NO_SPACE, _TOO_LARGE or
 * _DEPOSED. */
int bl_space_take(bl_index *index, uint64_t stored, uint64_t *offset);

/* Take an unused number; if there is none, evict a block. Returns the number, or
 * -BL_ERROR_TABLE_FULL. */
int64_t bl_number_take(bl_index *index);

/* Return the blocks of this index for a search for victims. */
bl_residents bl_index_residents(bl_index *index);

/* Add a block that has space to the list of its stripe, and count its space for its share. */
void bl_block_place(bl_index *index, uint32_t number);

/* Close the extents in a range (or all extents) that have neither used nor held space. */
void bl_extents_return(bl_index *index, uint64_t offset, uint32_t size);
void bl_extents_return_all(bl_index *index);

/* Free a used block's space, and remove the block from its stripe's list. */
void bl_space_give(bl_index *index, uint32_t number);

/* Remove a committed block without pins from the index, the table and its space. */
void bl_block_leave(bl_index *index, uint32_t number, enum bl_removal_reason why);

/* Remove a committed block from lookups at once, and free its space after the last pin. */
void bl_block_drop(bl_index *index, uint32_t number, enum bl_removal_reason why);

#endif
