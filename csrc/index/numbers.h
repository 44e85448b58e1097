/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The numbers of blocks.
 */
#ifndef BL_INDEX_NUMBERS_H
#define BL_INDEX_NUMBERS_H

#include "index/state.h"

/* Take an unused number, or return -BL_ERROR_TABLE_FULL. */
int64_t bl_number_unused(bl_index *index);

/* Free a number whose line was never written, or is clear. */
void bl_number_give(bl_index *index, uint32_t number);

/* Free a number whose line is the trace of a block: it is reused last. */
void bl_number_rest(bl_index *index, uint32_t number);

#endif
